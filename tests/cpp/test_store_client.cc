// A client, a master and storage nodes over real sockets: what is put can be got, and when not.
#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "lookup/csrc/store_client.h"
#include "tests/cpp/service_fixture.h"

namespace hymcache::testing {
namespace {

using Status = BlockStatus;

TEST_CASE("client: objects of all sizes come back, by either transport") {
  Service service({NodeOptions{.staging_bytes = 8u << 20, .write_buffer_bytes = 8u << 20}});
  for (const TransportChoice transport : kTransports) {
    CAPTURE(name_of(transport));
    const auto client = service.client(transport);
    const std::uint64_t first = transport == TransportChoice::kShm ? 0 : 1000;
    Blocks blocks(first,
                  {1, 2, 63, 4095, 4096, 4097, 65'536, 65'537, 262'144, 1'000'003, 4u << 20});
    CHECK(count(put(*client, blocks), Status::kOk) == blocks.size());
    wait_found(*client, blocks.keys());
    CHECK(count(get(*client, blocks), Status::kOk) == blocks.size());
    service.node().wait_flushed();
    // And from the device: what is put now takes the place of all that was in DRAM.
    Blocks others(first + 100, 4, 1u << 20);
    Blocks more(first + 200, 4, 1u << 20);
    for (Blocks* const some : {&others, &more}) {
      CHECK(count(put(*client, *some), Status::kOk) == some->size());
      service.node().wait_flushed();
    }
    CHECK(count(get(*client, blocks), Status::kOk) == blocks.size());
    const ClientStats stats = client->stats();
    const auto& bytes = transport == TransportChoice::kShm ? stats.shm : stats.tcp;
    const auto& none = transport == TransportChoice::kShm ? stats.tcp : stats.shm;
    CHECK(bytes.written == blocks.bytes() + others.bytes() + more.bytes());
    CHECK(bytes.read == 2 * blocks.bytes());
    CHECK(none.written == 0);
    CHECK(none.read == 0);
  }
  CHECK(service.node()->stats().device.reads > 0);
  service.node().wait_idle();
}

TEST_CASE("client: a lookup answers for each key in order, however many there are") {
  Service service({NodeOptions{.write_buffer_bytes = 16u << 20}});
  const auto client = service.client();
  Blocks blocks(0, 300, 64);
  CHECK(count(put(*client, blocks), Status::kOk) == 300);
  wait_found(*client, blocks.keys());
  std::vector<ObjectKey> keys;
  for (std::uint64_t i = 0; i < 1000; ++i)
    keys.push_back(numbered_key(i % 3 == 0 ? i / 3 : 1'000'000));
  const auto rows = client->lookup(keys, client->deadline());
  REQUIRE(rows.size() == keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const bool stored = i % 3 == 0 && i / 3 < 300;
    REQUIRE(rows[i].valid() == stored);
    if (stored) CHECK(rows[i].key == keys[i]);
  }
  CHECK(client->lookup({}, client->deadline()).empty());
}

TEST_CASE("client: a match is the longest run of hits from the front, with its prefetch begun") {
  Service service;
  const auto writer = service.client();
  Blocks blocks(0, 100, 4096);
  CHECK(count(put(*writer, blocks), Status::kOk) == 100);
  wait_found(*writer, blocks.keys());
  for (const TransportChoice transport : kTransports) {
    CAPTURE(name_of(transport));
    const auto client = service.client(transport);
    std::vector<ObjectKey> keys = numbered_keys(0, 200);
    keys[70] = numbered_key(777);
    const ReadPlan plan = client->match(keys, client->deadline());
    REQUIRE(plan.rows.size() == 70);
    REQUIRE(plan.sessions.size() == 1);
    CHECK(service.node()->stats().sessions.sessions == 1);

    // Read in two parts, the second by a plan that has travelled.
    const ReadPlan travelled = ReadPlan::parse(plan.serialize());
    std::vector<Status> statuses(70);
    const char* const used =
        client->read(travelled, 0, blocks.wipe().places(), {}, client->deadline(), statuses);
    CHECK(std::string(used) == name_of(transport));
    CHECK(count(statuses, Status::kOk) == 70);
    for (std::size_t i = 0; i < 70; ++i) CHECK(blocks.holds(i));
    service.node().wait_idle();  // reading ends the session
    CHECK(service.node()->stats().sessions.opened == (transport == TransportChoice::kShm ? 1 : 2));
  }
  const auto none = writer->match(numbered_keys(5000, 40), writer->deadline());
  CHECK(none.rows.empty());
  CHECK(none.sessions.empty());
}

TEST_CASE("client: reading starts anywhere in a plan, and a block of another size is a miss") {
  Service service;
  for (const TransportChoice transport : kTransports) {
    CAPTURE(name_of(transport));
    const auto client = service.client(transport);
    const std::uint64_t first = transport == TransportChoice::kShm ? 0 : 1000;
    Blocks blocks(first, 20, 5000);
    CHECK(count(put(*client, blocks), Status::kOk) == 20);
    wait_found(*client, blocks.keys());
    const ReadPlan plan = client->match(blocks.keys(), client->deadline());

    Blocks tail(first + 12, {5000, 5000, 4999, 5000, 5001, 5000, 5000, 5000, 5000, 5000});
    std::vector<Status> statuses(tail.size());
    client->read(plan, 12, tail.places(), {}, client->deadline(), statuses);
    const std::vector<Status> expected{Status::kOk,   Status::kOk,  Status::kMiss, Status::kOk,
                                       Status::kMiss, Status::kOk,  Status::kOk,   Status::kOk,
                                       Status::kMiss, Status::kMiss};  // beyond the plan
    CHECK(statuses == expected);
    for (std::size_t i = 0; i < tail.size(); ++i) {
      if (statuses[i] == Status::kOk) CHECK(tail.holds(i));
    }
    service.node().wait_idle();
  }
}

TEST_CASE("client: a plan whose session the node has forgotten is read all the same") {
  Service service;
  for (const TransportChoice transport : kTransports) {
    CAPTURE(name_of(transport));
    const auto client = service.client(transport);
    const std::uint64_t first = transport == TransportChoice::kShm ? 0 : 1000;
    Blocks blocks(first, 30, 5000);
    CHECK(count(put(*client, blocks), Status::kOk) == 30);
    wait_found(*client, blocks.keys());
    const ReadPlan plan = client->match(blocks.keys(), client->deadline());
    client->abandon(plan);
    service.node().wait_idle();
    std::vector<Status> statuses(25);
    Blocks tail(first + 5, 25, 5000);
    client->read(plan, 5, tail.places(), {}, client->deadline(), statuses);
    CHECK(count(statuses, Status::kOk) == 25);
    for (std::size_t i = 0; i < 25; ++i) CHECK(tail.holds(i));
    service.node().wait_idle();
  }
}

TEST_CASE("client: checksums can be left out, by the writer or by the reader") {
  Service service;
  std::uint64_t first = 0;
  for (const bool written : {true, false}) {
    for (const bool verified : {true, false}) {
      for (const TransportChoice transport : kTransports) {
        const auto client = service.client(transport);
        Blocks blocks(first += 100, 3, 10'000);
        std::vector<Status> statuses(3);
        client->write(1, false, blocks.keys(), blocks.fill_all().places(), {.checksums = written},
                      client->deadline(), statuses);
        CHECK(count(statuses, Status::kOk) == 3);
        wait_found(*client, blocks.keys());
        const ReadPlan plan{.rows = client->lookup(blocks.keys(), client->deadline()),
                            .sessions = {}};
        CHECK(((plan.rows[0].flags & Entry::kHasCrc) != 0) == written);
        client->read(plan, 0, blocks.wipe().places(), {.checksums = verified}, client->deadline(),
                     statuses);
        CHECK(count(statuses, Status::kOk) == 3);
        for (std::size_t i = 0; i < 3; ++i) CHECK(blocks.holds(i));
      }
    }
  }
}

TEST_CASE("client: what is stored already is not written again") {
  Service service;
  for (const TransportChoice transport : kTransports) {
    const auto client = service.client(transport);
    Blocks blocks(0, 5, 1000);
    const auto statuses = put(*client, blocks);
    CHECK(count(statuses,
                transport == TransportChoice::kShm ? Status::kOk : Status::kStoredAlready) == 5);
  }
  CHECK(service.node()->stats().writes.committed == 5);
}

TEST_CASE("client: in prefix order nothing follows a block that was not stored") {
  Service service;
  const auto client = service.client();
  Blocks blocks(0, {100, 100, 3u << 20, 100, 100});
  const auto statuses = put(*client, blocks, /*prefix_order=*/true);
  const std::vector<Status> expected{Status::kOk, Status::kOk, Status::kSkipTooLarge,
                                     Status::kSkipPrefix, Status::kSkipPrefix};
  CHECK(statuses == expected);
  // In no order each stands for itself; and what is stored already breaks no prefix.
  Blocks apart(0, {100, 100, 3u << 20, 100, 100});
  const auto again = put(*client, apart);
  CHECK(again[2] == Status::kSkipTooLarge);
  CHECK(again[4] == Status::kOk);
  Blocks more(0, 2, 100);
  CHECK(count(put(*client, more, true), Status::kStoredAlready) == 2);
}

TEST_CASE("client: a prefix of many frames ends at the first block that is refused") {
  Service service({NodeOptions{.write_buffer_bytes = 16u << 20}});
  const auto client = service.client();
  std::vector<std::uint32_t> lengths(600, 64);
  lengths[300] = 0;  // too large, in the words of a node
  Blocks blocks(0, lengths);
  const auto statuses = put(*client, blocks, /*prefix_order=*/true);
  CHECK(count(statuses, Status::kOk) == 300);
  CHECK(statuses[300] == Status::kSkipTooLarge);
  CHECK(count(statuses, Status::kSkipPrefix) == 299);
}

TEST_CASE("client: a full buffer and a full device are answers, at once") {
  Service service(
      {{.capacity_bytes = 4u << 20, .segment_bytes = 1u << 20, .write_buffer_bytes = 1u << 20}});
  for (const TransportChoice transport : kTransports) {
    CAPTURE(name_of(transport));
    const auto client = service.client(transport);
    Blocks blocks(transport == TransportChoice::kShm ? 0 : 1000, 32, 64 * kKiB);
    const TimePoint before = Clock::now();
    const auto statuses = put(*client, blocks);
    CHECK(Clock::now() - before < std::chrono::seconds(5));
    CHECK(count(statuses, Status::kOk) >= 1);
    CHECK(count(statuses, Status::kSkipBufferFull) >= 1);
    CHECK(count(statuses, Status::kOk) + count(statuses, Status::kSkipBufferFull) == 32);
    service.node().wait_flushed();
  }
  const auto client = service.client();
  eventually([&] {
    Blocks blocks(5000, 64, 64 * kKiB);
    const auto statuses = put(*client, blocks);
    return count(statuses, Status::kSkipDeviceFull) > 0;
  });
  const auto& refused = service.node()->stats().writes.refused;
  CHECK(refused[static_cast<int>(wire::OfferState::kBufferFull)] > 0);
  CHECK(refused[static_cast<int>(wire::OfferState::kDeviceFull)] > 0);
}

TEST_CASE("client: a draining node serves reads and refuses writes") {
  Service service;
  const auto client = service.client();
  Blocks blocks(0, 3, 1000);
  CHECK(count(put(*client, blocks), Status::kOk) == 3);
  wait_found(*client, blocks.keys());
  service.node()->set_draining(true);
  Blocks others(10, 3, 1000);
  CHECK(count(put(*client, others), Status::kSkipDraining) == 3);
  CHECK(count(get(*client, blocks), Status::kOk) == 3);
  service.node()->set_draining(false);
  CHECK(count(put(*client, others), Status::kOk) == 3);
}

TEST_CASE("client: a master that drains a node is obeyed") {
  Service service({NodeOptions{}}, std::chrono::milliseconds(1000));
  CHECK(service.master().drain(service.node().id(), true));
  eventually([&] { return service.node()->stats().draining; });
  const auto client = service.client();
  Blocks blocks(0, 1, 1000);
  CHECK(put(*client, blocks).front() == Status::kUnavailable);  // no node takes writes
  CHECK(service.master().drain(service.node().id(), false));
  eventually([&] { return !service.node()->stats().draining; });
  eventually([&] { return put(*client, blocks).front() == Status::kOk; });
}

TEST_CASE("client: many at once, readers and writers of the same objects") {
  Service service;
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      const auto client = service.client(kTransports[t % 2]);
      for (int round = 0; round < 5; ++round) {
        Blocks blocks(static_cast<std::uint64_t>(10 * round), 10, 20'000);
        for (const Status status : put(*client, blocks)) {
          failures += status != Status::kOk && status != Status::kStoredAlready &&
                      status != Status::kSkipBufferFull;
        }
        for (const Status status : get(*client, blocks)) {
          failures += status != Status::kOk && status != Status::kMiss;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(failures == 0);
  service.node().wait_idle();
  CHECK(service.node()->stats().corrupt_dropped == 0);
}

TEST_CASE("client: one client serves many threads") {
  Service service;
  const auto client = service.client();
  Blocks stored(0, 16, 20'000);
  CHECK(count(put(*client, stored), Status::kOk) == 16);
  wait_found(*client, stored.keys());
  std::vector<std::thread> threads;
  std::atomic<std::size_t> read{0};
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      Blocks mine(0, 16, 20'000);
      for (int round = 0; round < 5; ++round) read += count(get(*client, mine), Status::kOk);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(read == 8 * 5 * 16);
  CHECK(client->stats().hits >= 8 * 5 * 16);
}

TEST_CASE("client: closed while others use it") {
  Service service;
  const auto client = service.client();
  Blocks stored(0, 8, 20'000);
  CHECK(count(put(*client, stored), Status::kOk) == 8);
  wait_found(*client, stored.keys());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      Blocks mine(0, 8, 20'000);
      for (;;) {
        try {
          get(*client, mine);
        } catch (const Error& error) {
          CHECK(error.kind() == ErrorKind::kUnavailable);
          CHECK(std::string(error.what()) == "the client is closed");
          return;
        }
      }
    });
  }
  ::usleep(20'000);
  client->close();
  for (std::thread& thread : threads) thread.join();
  Blocks more(100, 2, 100);
  CHECK(count(put(*client, more), Status::kUnavailable) == 2);
  CHECK_THROWS_WITH_AS(client->require_members(client->deadline()), "the client is closed", Error);
  // No connection is left behind.
  eventually([&] { return service.node()->stats().server.connections == 0; });
}

}  // namespace
}  // namespace hymcache::testing
