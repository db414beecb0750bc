// A master behind real sockets: what nodes and clients may count on.
#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/master_peers.h"
#include "tests/cpp/starvation.h"

namespace hymcache {
namespace {

using namespace master_tests;
using std::chrono::milliseconds;
using std::chrono::seconds;

TEST_CASE("master: what a node publishes is found, until it is withdrawn") {
  MasterServer master(make_options());
  master.start();
  Node node(master, 7, 1);
  const wire::RegisterReply registered = node.enroll();
  CHECK(registered.lease_ms == 10'000);
  CHECK(registered.epoch == 1);
  CHECK(node.publish({1, 2}, 5).accepted == 2);

  const auto client = connect(master, wire::Role::kClient);
  std::vector<Entry> rows = ask(*client, {make_key(1), make_key(3), make_key(2)});
  REQUIRE(rows.size() == 3);
  CHECK(rows[0].node == 7);
  CHECK(rows[0].generation == 5);
  CHECK(rows[0].epoch == registered.epoch);
  CHECK_FALSE(rows[1].valid());
  CHECK(rows[2].valid());
  CHECK(ask(*client, {}).empty());

  CHECK(node.withdraw(1, 4) == 0);
  CHECK(node.withdraw(1, 5) == 1);
  CHECK_FALSE(ask(*client, {make_key(1)})[0].valid());

  const MasterStats stats = master.stats();
  CHECK(stats.counters.lookups == 3);
  CHECK(stats.counters.lookup_keys == 4);
  CHECK(stats.counters.lookup_hits == 2);
  CHECK(stats.counters.rows_published == 2);
  CHECK(stats.counters.rows_withdrawn == 1);
  CHECK(stats.rows == 1);
  CHECK(stats.nodes_alive == 1);
  CHECK(stats.server.connections == 2);
  CHECK(stats.cpu_ns > 0);
}

TEST_CASE("master: members tell who is alive, and their version tells of changes") {
  MasterServer master(make_options());
  master.start();
  const auto client = connect(master, wire::Role::kClient);
  std::vector<wire::Member> members;
  const std::uint64_t empty_version = ask_members(*client, &members).version;
  CHECK(members.empty());
  CHECK(master.wait_members(0, seconds(0)) == empty_version);

  Node node(master, 7, 1);
  const std::uint64_t version = node.enroll().members_version;
  CHECK(version != empty_version);
  CHECK(master.wait_members(empty_version, seconds(10)) == version);
  CHECK(node.beat().members_version == version);
  CHECK(ask_members(*client, &members).version == version);
  REQUIRE(members.size() == 1);
  CHECK(members[0].node == 7);
  CHECK(wire::from_text(members[0].name) == "n7");
  CHECK(members[0].capacity_bytes == 100);
  CHECK(members[0].used_bytes == 40);
  CHECK(members[0].state == wire::MemberState::kAlive);

  CHECK((node.beat().flags & wire::HeartbeatReply::kDrain) == 0);
  CHECK(master.drain(7, true));
  CHECK((node.beat().flags & wire::HeartbeatReply::kDrain) != 0);
  CHECK(ask_members(*client, &members).version != version);
  CHECK(members[0].state == wire::MemberState::kDraining);
  CHECK_FALSE(master.drain(8, true));
}

TEST_CASE("master: a node that falls silent is hidden after its lease, and may come back") {
  constexpr milliseconds kLease{150};
  constexpr milliseconds kStall = kLease / 3;
  MasterServer master(make_options(kLease));
  master.start();
  const auto client = connect(master, wire::Role::kClient);
  std::uint64_t incarnation = 0;
  const auto enroll = [&] {
    auto node = std::make_unique<Node>(master, 7, ++incarnation);
    node->enroll();
    node->publish({1}, 5);
    node->sync();
    return node;
  };
  const auto is_shown = [&] { return ask(*client, {make_key(1)})[0].valid(); };
  testing::check_unless_stalled(kStall, [&]() -> std::string {
    try {
      const auto node = enroll();
      for (const TimePoint end = Clock::now() + 2 * kLease; Clock::now() < end;) {
        std::this_thread::sleep_for(kLease / 3);
        node->beat();
      }
    } catch (const Error& error) {
      return error.what();
    }
    return is_shown() ? "" : "what it holds is not shown";
  });

  const auto silent = enroll();
  CHECK(eventually([&] { return !is_shown(); }));
  CHECK(eventually([&] { return master.stats().rows == 0; }));
  REQUIRE(master.members().size() == 1);
  CHECK(master.members()[0].record.state == NodeState::kLost);
  CHECK(master.stats().counters.leases_lapsed > 0);
  std::string message;
  CHECK(error_of([&] { silent->beat(); }, &message) == ErrorKind::kUnavailable);
  CHECK(message.find("lapsed") != std::string::npos);

  testing::check_unless_stalled(kStall, [&]() -> std::string {
    const auto node = enroll();
    if (!is_shown()) return "what it holds is not shown again";
    try {
      master.forget(7);
      return "it is forgotten while it is alive";
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::kConfig);
      return "";
    }
  });

  CHECK(eventually([&] { return master.stats().nodes_alive == 0; }));
  CHECK(master.forget(7));
  CHECK_FALSE(master.forget(7));
  CHECK(master.members().empty());
}

TEST_CASE("master: a connection that breaks costs nothing, and SYNCED hides what is gone") {
  MasterServer master(make_options());
  master.start();
  const auto client = connect(master, wire::Role::kClient);
  auto node = std::make_unique<Node>(master, 7, 1);
  node->enroll();
  node->publish({1, 2}, 5);
  node->sync();
  node->channel().close();
  CHECK(eventually([&] { return master.stats().server.connections == 1; }));
  CHECK(ask(*client, {make_key(1)})[0].valid());

  node = std::make_unique<Node>(master, 7, 1);
  node->enroll();
  node->publish({2}, 5);
  CHECK(ask(*client, {make_key(1)})[0].valid());
  node->sync();
  CHECK_FALSE(ask(*client, {make_key(1)})[0].valid());
  CHECK(ask(*client, {make_key(2)})[0].valid());
  CHECK(eventually([&] { return master.stats().rows == 1; }));
  CHECK(master.stats().counters.rows_swept == 1);
}

TEST_CASE("master: the same process on a second connection takes over from the first") {
  MasterServer master(make_options());
  master.start();
  Node first(master, 7, 1);
  first.enroll();
  Node second(master, 7, 1);
  second.enroll();
  CHECK(error_of([&] { first.beat(); }) == ErrorKind::kUnavailable);
  CHECK(second.beat().lease_ms == 10'000);
}

TEST_CASE("master: a second live node of one name is refused with what to do about it") {
  MasterServer master(make_options());
  master.start();
  Node first(master, 7, 1);
  first.enroll();
  first.publish({1}, 5);
  Node second(master, 7, 2);
  std::string message;
  CHECK(error_of([&] { second.enroll(); }, &message) == ErrorKind::kConfig);
  CHECK(message.find("another live node has the name n7") != std::string::npos);
  CHECK(message.find("node.name") != std::string::npos);

  Node other_name(master, 7, 3);
  other_name.member().name = wire::to_text<64>("twin");
  CHECK(error_of([&] { other_name.enroll(); }, &message) == ErrorKind::kConfig);
  CHECK(message.find("twin") != std::string::npos);
  CHECK(master.stats().counters.registrations_refused == 2);

  // Its end frees the name at once, and what it had is no longer found.
  first.channel().close();
  CHECK(eventually([&] { return master.members()[0].record.peer == 0; }));
  Node third(master, 7, 2);
  third.enroll();
  const auto client = connect(master, wire::Role::kClient);
  CHECK_FALSE(ask(*client, {make_key(1)})[0].valid());
}

TEST_CASE("master: it can be stopped while it is asked, and started again") {
  MasterServer master(make_options(milliseconds(100)));
  CHECK(error_of([&] { master.stats(); }) == ErrorKind::kUnavailable);
  for (int round = 0; round < 3; ++round) {
    master.start();
    CHECK(error_of([&] { master.start(); }) == ErrorKind::kConfig);
    Node node(master, 7, 1);
    node.enroll();
    std::thread asker([&] {
      try {
        for (;;) master.stats();
      } catch (const Error&) {
      }
    });
    std::thread watcher([&] {
      try {
        for (std::uint64_t version = 0;;) version = master.wait_members(version, seconds(30));
      } catch (const Error&) {
      }
    });
    std::this_thread::sleep_for(milliseconds(20));
    master.stop();
    asker.join();
    watcher.join();
    CHECK(error_of([&] { node.beat(); }) == ErrorKind::kUnavailable);
  }
}

TEST_CASE("master: rows and nodes of a key are all shown to an operator") {
  MasterServer master(make_options());
  master.start();
  Node first(master, 7, 1);
  first.enroll();
  first.publish({1}, 5);
  Node second(master, 8, 1);
  second.enroll();
  second.publish({1}, 6);
  const auto found = master.lookup({make_key(1), make_key(2)});
  REQUIRE(found.size() == 2);
  CHECK(found[0].size() == 2);
  CHECK(found[1].empty());
  for (const FoundRow& row : found[0]) {
    CHECK(row.shown);
    CHECK(row.node_name == "n" + std::to_string(row.entry.node));
  }
  CHECK(error_of([&] { master.lookup(std::vector<ObjectKey>(33)); }) == ErrorKind::kConfig);
}

TEST_CASE("master: a publication that wants no answer gets none, and refusals are told in time") {
  MasterOptions options = make_options();
  options.rows_max = 1;
  MasterServer master(options);
  master.start();
  Node node(master, 7, 1);
  node.enroll();
  std::vector<Entry> rows(2);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i] = {.key = make_key(i + 1), .generation = 5, .node = 7, .flags = Entry::kValid};
  }
  const wire::PublishRequest request{.count = 2, .flags = wire::PublishRequest::kNoAnswer};
  node.channel().post(wire::Type::kPublish, wire::as_bytes(request),
                      std::as_bytes(std::span(rows)));
  CHECK(node.beat().refused == 1);  // what comes is the heartbeat's answer
  CHECK(node.publish({3}, 5).refused == 1);
  CHECK(node.beat().refused == 2);
  CHECK(ask(*connect(master, wire::Role::kClient), {make_key(1)})[0].valid());
  node.enroll();
  CHECK(node.beat().refused == 0);
}

}  // namespace
}  // namespace hymcache
