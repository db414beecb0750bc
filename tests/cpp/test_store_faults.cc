// What fails in a service, and what its clients see: a status within the deadline, never a wrong
// byte.
#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/service_fixture.h"

namespace hymcache::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Status = BlockStatus;

wire::Mac toy_mac(std::string_view message, std::uint8_t secret) {
  wire::Mac mac{};
  for (std::size_t i = 0; i < message.size(); ++i) {
    mac[i % mac.size()] = static_cast<std::uint8_t>(mac[i % mac.size()] * 31 + message[i] + secret);
  }
  return mac;
}

MacFunction secret_mac(std::uint8_t secret) {
  return [secret](std::string_view message) { return toy_mac(message, secret); };
}

// Puts objects and pushes them out of the node's DRAM.
void put_on_device(Service& service, StoreClient& client, Blocks& blocks) {
  CHECK(count(put(client, blocks), Status::kOk) == blocks.size());
  wait_found(client, blocks.keys());
  service.node().wait_flushed();
  // More than the write buffer holds: as much as is taken of it pushes out the rest.
  Blocks others(1'000'000 + client.stats().written[0], 40, 64 * kKiB);
  CHECK(count(put(client, others), Status::kOk) > 0);
  service.node().wait_flushed();
}

TEST_CASE("faults: a bit flipped on the device is a corrupt block, then a miss, and counted") {
  for (const TransportChoice transport : kTransports) {
    CAPTURE(name_of(transport));
    Service service;
    const auto client = service.client(transport);
    Blocks blocks(0, 5, 20'000);
    put_on_device(service, *client, blocks);
    const auto rows = client->lookup(blocks.keys(), client->deadline());
    service.node().flip_on_device(rows[2], 12'345);

    const auto statuses = get(*client, blocks);
    CHECK(statuses[2] == Status::kCorrupt);
    CHECK(count(statuses, Status::kOk) == 4);
    eventually([&] { return service.node()->stats().corrupt_dropped == 1; });
    CHECK(service.node()->stats().reports == 1);
    eventually([&] { return !client->lookup(blocks.keys(), client->deadline())[2].valid(); });
    CHECK(get(*client, blocks)[2] == Status::kMiss);
    CHECK(client->stats().read[static_cast<int>(Status::kCorrupt)] == 1);
    // It can be stored anew.
    CHECK(put(*client, blocks)[2] == Status::kOk);
    wait_found(*client, blocks.keys());
    CHECK(count(get(*client, blocks), Status::kOk) == 5);
    service.node().wait_idle();
  }
}

TEST_CASE("faults: a byte that changes in the node's memory is a corrupt block") {
  for (const TransportChoice transport : kTransports) {
    CAPTURE(name_of(transport));
    Service service;
    const auto client = service.client(transport);
    Blocks blocks(0, 3, 20'000);
    CHECK(count(put(*client, blocks), Status::kOk) == 3);
    wait_found(*client, blocks.keys());
    // In the write buffer, from which it is served: found by its contents.
    std::vector<std::uint8_t> pattern(64);
    fill(pattern.data(), 1, 64);
    const DeviceRegion& region = service.node().region();
    std::uint8_t* const found =
        std::search(region.base, region.base + region.bytes, pattern.begin(), pattern.end());
    REQUIRE(found != region.base + region.bytes);
    found[17] ^= 1;
    const auto statuses = get(*client, blocks);
    CHECK(statuses[1] == Status::kCorrupt);
    CHECK(count(statuses, Status::kOk) == 2);
    eventually([&] { return service.node()->stats().corrupt_dropped == 1; });
  }
}

TEST_CASE("faults: a device that brings other bytes, now and then, never gets them believed") {
  const std::uint64_t seed = test_seed();
  CAPTURE(seed);
  for (const TransportChoice transport : kTransports) {
    Service service({NodeOptions{.faults = {.seed = seed, .corrupt_read = 0.5}}});
    const auto client = service.client(transport);
    Blocks blocks(0, 20, 20'000);
    put_on_device(service, *client, blocks);
    const auto statuses = get(*client, blocks);  // checks what is kOk
    CHECK(count(statuses, Status::kCorrupt) > 0);
    CHECK(count(statuses, Status::kOk) + count(statuses, Status::kCorrupt) == 20);
    service.node().wait_idle();
  }
}

TEST_CASE("faults: what the device cannot read is said so, block by block") {
  const std::uint64_t seed = test_seed();
  CAPTURE(seed);
  for (const TransportChoice transport : kTransports) {
    Service service({NodeOptions{.faults = {.seed = seed, .fail_read = 0.5}}});
    const auto client = service.client(transport);
    Blocks blocks(0, 20, 20'000);
    put_on_device(service, *client, blocks);
    const auto statuses = get(*client, blocks);
    CHECK(count(statuses, Status::kDeviceError) > 0);
    CHECK(count(statuses, Status::kOk) + count(statuses, Status::kDeviceError) == 20);
    service.node().wait_idle();
  }
}

TEST_CASE("faults: an object that the device loses while flushing is gone everywhere") {
  Service service({NodeOptions{.faults = {.fail_flush = 1}}});
  const auto client = service.client();
  Blocks blocks(0, 3, 20'000);
  CHECK(count(put(*client, blocks), Status::kOk) == 3);
  eventually([&] { return service.node()->stats().flush_failures == 3; });
  eventually([&] {
    const auto rows = client->lookup(blocks.keys(), client->deadline());
    return std::none_of(rows.begin(), rows.end(), [](const Entry& row) { return row.valid(); });
  });
  CHECK(service.node()->stats().device.live_bytes == 0);
}

TEST_CASE("faults: a device that takes too long costs the deadline, and nothing after it") {
  for (const TransportChoice transport : kTransports) {
    CAPTURE(name_of(transport));
    Service service({NodeOptions{.faults = {.delay_read = 1, .delay_drives_max = 1'000'000'000}}});
    const auto writer = service.client(transport);
    Blocks blocks(0, 5, 20'000);
    put_on_device(service, *writer, blocks);
    const auto client = service.client(transport);
    const ReadPlan plan{.rows = client->lookup(blocks.keys(), client->deadline()), .sessions = {}};
    std::vector<Status> statuses(5);
    const TimePoint before = Clock::now();
    client->read(plan, 0, blocks.wipe().places(), {}, before + milliseconds(300), statuses);
    const auto took = Clock::now() - before;
    CHECK(count(statuses, Status::kDeadline) == 5);
    CHECK(took > milliseconds(250));
    CHECK(took < seconds(3));
    service.node().wait_idle();  // at once, not when a lease is over
    Blocks others(10, 3, 20'000);
    CHECK(count(put(*writer, others), Status::kOk) == 3);
  }
}

TEST_CASE("faults: time that is over before it begins is no fault of the node's") {
  Service service;
  const auto client = service.client();
  Blocks blocks(0, 3, 20'000);
  CHECK(count(put(*client, blocks), Status::kOk) == 3);
  wait_found(*client, blocks.keys());
  const ReadPlan plan = client->match(blocks.keys(), client->deadline());
  std::vector<Status> statuses(3);
  client->read(plan, 0, blocks.places(), {}, Clock::now() - seconds(1), statuses);
  CHECK(count(statuses, Status::kDeadline) == 3);
  CHECK_THROWS_AS(client->lookup(blocks.keys(), Clock::now() - seconds(1)), Error);
  CHECK(count(get(*client, blocks), Status::kOk) == 3);
}

TEST_CASE("faults: a load that is cancelled leaves others, and the node's name, alone") {
  for (const TransportChoice transport : kTransports) {
    CAPTURE(name_of(transport));
    Service service;
    const auto client = service.client(transport);
    Blocks blocks(0, 20, 20'000);
    CHECK(count(put(*client, blocks), Status::kOk) == 20);
    wait_found(*client, blocks.keys());
    for (int after = 0; after < 20; after += 3) {
      const ReadPlan plan{.rows = client->lookup(blocks.keys(), client->deadline()),
                          .sessions = {}};
      std::vector<Status> statuses(20);
      std::atomic<bool> cancelled{false};
      int calls = 0;
      const BlockPlaces all = blocks.wipe().places();
      const BlockPlaces places = [&](std::uint32_t i) {
        // The first 20 calls ask for the sizes.
        if (++calls > 20 + after) cancelled = true;
        return all(i);
      };
      client->read(plan, 0, places, {.cancelled = &cancelled}, client->deadline(), statuses);
      CHECK(count(statuses, Status::kCancelled) > 0);
      CHECK(count(statuses, Status::kOk) + count(statuses, Status::kCancelled) == 20);
      CHECK(count(get(*client, blocks), Status::kOk) == 20);  // at once
    }
    service.node().wait_idle();
  }
}

TEST_CASE("faults: a node that restarts has forgotten, and everybody notices") {
  Service service({NodeOptions{}}, seconds(2));
  for (const TransportChoice transport : kTransports) {
    CAPTURE(name_of(transport));
    const std::uint64_t first = transport == TransportChoice::kShm ? 0 : 1000;
    const auto client = service.client(transport);
    Blocks blocks(first, 5, 20'000);
    CHECK(count(put(*client, blocks), Status::kOk) == 5);
    wait_found(*client, blocks.keys());
    const ReadPlan plan = client->match(blocks.keys(), client->deadline());
    REQUIRE(plan.rows.size() == 5);

    service.node().stop();
    std::vector<Status> statuses(5);
    client->read(plan, 0, blocks.places(), {}, client->deadline(), statuses);
    CHECK(count(statuses, Status::kUnavailable) == 5);
    service.node().start();
    service.wait_live();
    // Locations from before the restart name nothing.
    eventually([&] {
      client->read(plan, 0, blocks.places(), {}, client->deadline(), statuses);
      return count(statuses, Status::kMiss) == 5;
    });
    const auto rows = client->lookup(blocks.keys(), client->deadline());
    CHECK(std::none_of(rows.begin(), rows.end(), [](const Entry& row) { return row.valid(); }));
    eventually([&] { return count(put(*client, blocks), Status::kOk) == 5; });
    wait_found(*client, blocks.keys());
    CHECK(count(get(*client, blocks), Status::kOk) == 5);
  }
}

TEST_CASE("faults: without a master clients say so, and go on when it is back") {
  Service service({NodeOptions{}}, seconds(2));
  const auto client = service.client();
  Blocks blocks(0, 5, 20'000);
  CHECK(count(put(*client, blocks), Status::kOk) == 5);
  wait_found(*client, blocks.keys());
  const ReadPlan plan = client->match(blocks.keys(), client->deadline());

  service.stop_master();
  CHECK_THROWS_AS(client->lookup(blocks.keys(), client->deadline()), Error);
  const auto newcomer = service.client();
  CHECK_THROWS_AS(newcomer->require_members(newcomer->deadline()), Error);
  CHECK_THROWS_AS(newcomer->match(blocks.keys(), newcomer->deadline()), Error);
  // What is planned already can be read: the node is there.
  std::vector<Status> statuses(5);
  client->read(plan, 0, blocks.wipe().places(), {}, client->deadline(), statuses);
  CHECK(count(statuses, Status::kOk) == 5);

  service.start_master();
  for (const auto& one : {client, newcomer}) {
    eventually([&] {
      try {
        return count(get(*one, blocks), Status::kOk) == 5;
      } catch (const Error&) {
        return false;  // it may be left alone for a moment
      }
    });
  }
}

TEST_CASE("faults: a master that hangs costs one attempt, and then the other one is asked") {
  Service service;
  std::uint16_t port = 0;
  const UniqueFd silent = listen_socket(Endpoint::parse("127.0.0.1:0"), &port);
  ClientOptions options;
  options.masters = {Endpoint::parse("127.0.0.1:" + std::to_string(port)),
                     service.master_endpoint()};
  options.connect_timeout = milliseconds(200);
  options.deadline = seconds(5);
  StoreClient client(options);
  const TimePoint before = Clock::now();
  CHECK(client.lookup(numbered_keys(0, 3), client.deadline()).size() == 3);
  CHECK(Clock::now() - before < seconds(3));
  CHECK(client.stats().connect_failures == 1);
  for (int i = 0; i < 20; ++i) client.lookup(numbered_keys(0, 3), client.deadline());
  CHECK(client.stats().connect_failures == 1);
}

TEST_CASE("faults: another secret is refused, in one line that says what to do") {
  Service service({NodeOptions{.mac = secret_mac(1)}}, seconds(10), secret_mac(1));
  const auto client = service.client();
  Blocks blocks(0, 2, 1000);
  CHECK(count(put(*client, blocks), Status::kOk) == 2);
  for (const MacFunction& mac : {secret_mac(2), MacFunction{}}) {
    ClientOptions options;
    options.masters = {service.master_endpoint()};
    options.mac = mac;
    StoreClient stranger(options);
    try {
      stranger.lookup(blocks.keys(), stranger.deadline());
      FAIL("it was let in");
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::kConfig);
      CHECK(std::string(error.what()).find("secret_file") != std::string::npos);
    }
    CHECK(count(put(stranger, blocks), Status::kUnavailable) == 2);
  }
}

TEST_CASE("faults: a node of another protocol version is refused by name of both") {
  ScratchFolder folder;
  MasterOptions options;
  options.listen = {Endpoint::parse("127.0.0.1:0")};
  MasterServer master(options);
  master.start();
  TestNode node(folder.path(), {master.endpoints().front()}, {.protocol_version_max = 0});
  eventually([&] { return !node->stats().masters.front().last_error.empty(); });
  const std::string error = node->stats().masters.front().last_error;
  CAPTURE(error);
  CHECK(error.find("protocol version") != std::string::npos);
  CHECK(error.find("install the same release") != std::string::npos);
  try {
    Channel::connect(node.tcp(), Identity{}, wire::Role::kNode, Clock::now() + kPatience);
    FAIL("it was let in");
  } catch (const Error& refusal) {
    CHECK(refusal.kind() == ErrorKind::kProtocol);
  }
}

TEST_CASE("faults: a node that cannot be told to masters does not start") {
  ScratchFolder folder;
  NodeOptions options;
  options.advertise_host = std::string(70, 'h');
  CHECK_THROWS_AS(TestNode(folder.path(), {}, options), Error);
  // And leaves nothing behind that keeps the next one from starting.
  options.advertise_host.clear();
  TestNode node(folder.path(), {}, options);
  CHECK(node->stats().objects == 0);
  StorageNodeOptions same_port;
  same_port.listen = node.tcp();
  same_port.log = same_port.warn = [](std::string_view) {};
  CHECK_THROWS_AS(StorageNode(1, same_port,
                              open_file_device({.path = folder.file("other"),
                                                .capacity_bytes = 1u << 20,
                                                .staging_bytes = 1u << 20,
                                                .write_buffer_bytes = 1u << 20,
                                                .preallocate = false,
                                                .log = {}})),
                  Error);
}

}  // namespace
}  // namespace hymcache::testing
