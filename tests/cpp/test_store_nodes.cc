// Several storage nodes behind one master, and memory that is taken back while it is read.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/service_fixture.h"
#include "transport/csrc/shm_node_channel.h"

namespace hymcache::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Status = BlockStatus;

std::vector<NodeOptions> nodes(std::size_t count) {
  std::vector<NodeOptions> options(count);
  for (std::size_t i = 0; i < count; ++i) options[i].name = "n" + std::to_string(i);
  return options;
}

TEST_CASE("nodes: prefixes spread over the nodes, and each stays together") {
  Service service(nodes(2));
  const auto client = service.client();
  std::map<NodeId, int> prefixes;
  for (std::uint64_t prefix = 0; prefix < 40; ++prefix) {
    Blocks blocks(prefix * 1000, 3, 1000);
    CHECK(count(put(*client, blocks, true), Status::kOk) == 3);
    wait_found(*client, blocks.keys());
    const auto rows = client->lookup(blocks.keys(), client->deadline());
    CHECK(rows[0].node == rows[1].node);
    CHECK(rows[0].node == rows[2].node);
    ++prefixes[rows[0].node];
  }
  REQUIRE(prefixes.size() == 2);
  for (const auto& [node, number] : prefixes) CHECK(number > 5);
}

TEST_CASE("nodes: one plan reads from several, and one that is gone takes only its own blocks") {
  for (const TransportChoice transport : kTransports) {
    CAPTURE(name_of(transport));
    Service service(nodes(3));
    const auto client = service.client(transport);
    // One prefix whose blocks lie on all nodes, in no order.
    Blocks blocks(0, 60, 3000);
    for (std::uint32_t i = 0; i < 60; ++i) {
      Blocks one(i, 1, 3000);
      REQUIRE(put(*client, one).front() == Status::kOk);
    }
    wait_found(*client, blocks.keys());
    const ReadPlan plan = client->match(blocks.keys(), client->deadline());
    REQUIRE(plan.rows.size() == 60);
    CHECK(plan.sessions.size() == 3);
    std::vector<Status> statuses(50);
    Blocks tail(10, 50, 3000);
    client->read(plan, 10, tail.places(), {}, client->deadline(), statuses);
    CHECK(count(statuses, Status::kOk) == 50);
    for (std::size_t i = 0; i < 50; ++i) CHECK(tail.holds(i));
    for (std::size_t i = 0; i < 3; ++i) service.node(i).wait_idle();

    const ReadPlan again = client->match(blocks.keys(), client->deadline());
    service.node(1).stop();
    client->read(again, 10, tail.wipe().places(), {}, client->deadline(), statuses);
    for (std::size_t i = 0; i < 50; ++i) {
      const bool gone = again.rows[10 + i].node == service.node(1).id();
      CHECK(statuses[i] == (gone ? Status::kUnavailable : Status::kOk));
      if (!gone) CHECK(tail.holds(i));
    }
    service.node(0).wait_idle();
    service.node(2).wait_idle();
    // Writers turn to the others at once.
    for (std::uint32_t i = 0; i < 10; ++i) {
      Blocks one(5000 + i, 1, 3000);
      CHECK(put(*client, one).front() == Status::kOk);
    }
    service.node(1).start();
  }
}

TEST_CASE("nodes: one that leaves is named no more after its lease, one that comes is used") {
  Service service(nodes(2), milliseconds(1000));
  const auto client = service.client();
  std::vector<std::uint64_t> on_first;
  for (std::uint64_t i = 0; on_first.size() < 3; ++i) {
    Blocks one(i, 1, 1000);
    REQUIRE(put(*client, one).front() == Status::kOk);
    wait_found(*client, one.keys());
    if (client->lookup(one.keys(), client->deadline())[0].node == service.node(0).id()) {
      on_first.push_back(i);
    }
  }
  service.node(0).stop();
  eventually([&] {
    return !client->lookup({numbered_keys(on_first[0], 1)}, client->deadline())[0].valid();
  });
  const auto members = [&] {
    client->require_members(client->deadline());
    return client->stats().members;
  };
  eventually([&] { return members() == 1; });
  service.node(0).start();
  service.wait_live();
  Blocks one(on_first[0], 1, 1000);
  eventually([&] { return put(*client, one).front() == Status::kOk; });
  eventually([&] { return members() == 2; });
}

// Readers of shared memory ask before and copy after, while everything under them is taken back as
// fast as it can be: sessions end in the middle of copies, objects go, and others take the slots.
// No checksums: the generation words alone must tell.
TEST_CASE("nodes: memory that is taken back during a copy is a miss") {
  const std::uint64_t seed = test_seed();
  CAPTURE(seed);
  Service service({NodeOptions{.staging_bytes = 256 * kKiB, .write_buffer_bytes = 256 * kKiB}});
  constexpr std::uint64_t kObjects = 24;
  constexpr std::uint32_t kLength = 60'000;
  const auto writer = service.client(TransportChoice::kShm);
  for (std::uint64_t i = 0; i < kObjects; ++i) {
    Blocks one(i, 1, kLength);
    eventually([&] { return put(*writer, one).front() == Status::kOk; });
  }
  wait_found(*writer, numbered_keys(0, kObjects));

  std::atomic<bool> stop{false};
  std::mutex mutex;
  wire::SessionId current{};
  const auto connect = [&] {
    auto channel = Channel::connect(service.node().unix_socket(), Identity{}, wire::Role::kNode,
                                    Clock::now() + kPatience);
    return std::make_unique<ShmNodeChannel>(std::move(channel), std::make_shared<SharedRegion>());
  };
  std::thread ender([&] {
    const auto channel = connect();
    while (!stop) {
      wire::SessionId id;
      {
        const std::lock_guard lock(mutex);
        id = current;
      }
      channel->end(id);
      channel->flush(Clock::now() + kPatience);
    }
  });
  std::thread churner([&] {
    const auto client = service.client(TransportChoice::kTcp);
    for (std::uint64_t i = 0; !stop; ++i) {
      Blocks one(i % kObjects, 1, kLength);
      get(*client, one);
    }
  });
  std::uint64_t good = 0, missed = 0;
  const auto channel = connect();
  std::mt19937_64 random(seed);
  const TimePoint start = Clock::now();
  while (Clock::now() < start + seconds(1) ||
         ((good == 0 || missed == 0) && Clock::now() < start + kPatience)) {
    const std::uint64_t first = random() % (kObjects - 4);
    Blocks blocks(first, 4, kLength);
    const auto rows = writer->lookup(blocks.keys(), writer->deadline());
    std::vector<wire::PrefetchRow> prefetch;
    for (const Entry& row : rows) {
      prefetch.push_back({.key = row.key,
                          .address = row.address,
                          .generation = row.generation,
                          .length = row.length,
                          .reserved = 0});
    }
    const wire::SessionId id = random_nonce();
    channel->prefetch(id, prefetch, 10'000);
    {
      const std::lock_guard lock(mutex);
      current = id;
    }
    const BlockPlaces places = blocks.places();
    std::vector<Status> statuses(4);
    const std::vector<std::uint32_t> lengths(4, kLength);
    for (std::uint32_t at = 0; at < 4;) {
      const std::uint32_t some = channel->read(
          id, at, std::span(lengths).subspan(at),
          [&, at](std::uint32_t i) { return blocks.places()(at + i); }, {.checksums = false},
          Clock::now() + kPatience, std::span(statuses).subspan(at));
      if (some == 0) break;  // the session is gone: nothing was read
      for (std::uint32_t i = at; i < at + some; ++i) {
        if (statuses[i] == Status::kOk) {
          ++good;
          CHECK(blocks.holds(i));
        } else {
          ++missed;
        }
      }
      at += some;
    }
    channel->end(id);
  }
  stop = true;
  ender.join();
  churner.join();
  CHECK(good > 0);
  CHECK(missed > 0);
  channel->channel().close();
  service.node().wait_idle();
}

}  // namespace
}  // namespace hymcache::testing
