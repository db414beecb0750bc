// The catalog: which rows are shown, and that its counts add up whatever nodes do.
#include <doctest/doctest.h>

#include <map>
#include <random>
#include <string>
#include <vector>

#include "master/csrc/catalog.h"

namespace hymcache {
namespace {

constexpr std::chrono::milliseconds kLease{3000};
const TimePoint kStart{std::chrono::hours(1)};

ObjectKey make_key(std::uint64_t number) {
  ObjectKey key{};
  std::memcpy(key.data(), &number, sizeof number);
  return key;
}

Entry make_row(std::uint64_t key, NodeId node, Generation generation) {
  Entry row;
  row.key = make_key(key);
  row.node = node;
  row.generation = generation;
  row.length = 4096;
  row.name_space = key % 3;
  row.flags = Entry::kValid;
  return row;
}

struct Fixture {
  MemberTable members{kLease};
  Catalog catalog{members, 1u << 16};

  NodeRecord& enroll(NodeId id, std::uint64_t incarnation, TimePoint now = kStart) {
    wire::Member member;
    member.node = id;
    member.name = wire::to_text<64>("n" + std::to_string(id));
    member.tcp = wire::to_text<64>("127.0.0.1:1");
    member.incarnation = incarnation;
    members.detach(id);
    return *members.enroll(member, id, now).node;
  }
  std::uint32_t publish(NodeRecord& node, const std::vector<Entry>& rows) {
    return catalog.publish(node, std::as_bytes(std::span(rows)));
  }
  std::uint32_t withdraw(NodeRecord& node, std::uint64_t key, Generation generation) {
    const wire::WithdrawRow row{.key = make_key(key), .generation = generation};
    return catalog.withdraw(node, wire::as_bytes(row));
  }
  Entry find(std::uint64_t key) const {
    Entry row;
    const ObjectKey wanted = make_key(key);
    catalog.lookup({&wanted, 1}, &row);
    return row;
  }
  void sweep_all() {
    for (int i = 0; i < 1000 && catalog.hidden_rows() > 0; ++i) catalog.sweep(64);
  }
};

TEST_CASE_FIXTURE(Fixture, "catalog: a batch of lookups gives rows for hits and zeros for misses") {
  NodeRecord& node = enroll(1, 1);
  CHECK(publish(node, {make_row(10, 1, 5), make_row(12, 1, 6)}) == 2);
  const std::vector<ObjectKey> keys{make_key(10), make_key(11), make_key(12)};
  std::vector<Entry> rows(3, make_row(99, 9, 9));
  CHECK(catalog.lookup(keys, rows.data()) == 2);
  CHECK(rows[0].generation == 5);
  CHECK(rows[0].epoch == node.epoch);
  CHECK_FALSE(rows[1].valid());
  CHECK(rows[1].node == 0);
  CHECK(rows[2].generation == 6);
}

TEST_CASE_FIXTURE(Fixture, "catalog: a key on two nodes is found while either is alive") {
  NodeRecord& first = enroll(1, 1);
  NodeRecord& second = enroll(2, 1, kStart + kLease / 2);
  publish(first, {make_row(10, 1, 5)});
  publish(second, {make_row(10, 2, 6)});
  CHECK(catalog.rows() == 2);
  CHECK(catalog.rows_of(make_key(10), 8).size() == 2);
  CHECK(find(10).valid());
  members.expire(kStart + kLease);
  CHECK(find(10).node == 2);
  CHECK(withdraw(second, 10, 6) == 1);
  CHECK_FALSE(find(10).valid());
}

TEST_CASE_FIXTURE(Fixture, "catalog: only the generation that was withdrawn goes") {
  NodeRecord& node = enroll(1, 1);
  publish(node, {make_row(10, 1, 5)});
  publish(node, {make_row(10, 1, 6)});
  CHECK(catalog.rows() == 1);
  CHECK(withdraw(node, 10, 5) == 0);
  CHECK(find(10).generation == 6);
  CHECK(withdraw(node, 10, 6) == 1);
  CHECK(catalog.rows() == 0);
  CHECK(withdraw(node, 10, 6) == 0);
}

TEST_CASE_FIXTURE(Fixture,
                  "catalog: what is not published again vanishes at SYNCED, then is swept") {
  NodeRecord& node = enroll(1, 1);
  publish(node, {make_row(10, 1, 5), make_row(11, 1, 6)});
  enroll(1, 1);
  publish(node, {make_row(11, 1, 6)});
  CHECK(find(10).valid());
  CHECK(catalog.hidden_rows() == 0);
  members.end_sync(node);
  CHECK_FALSE(find(10).valid());
  CHECK(find(11).valid());
  CHECK(catalog.hidden_rows() == 1);
  sweep_all();
  CHECK(catalog.rows() == 1);
  CHECK(catalog.hidden_rows() == 0);
  CHECK(node.rows == 1);
}

TEST_CASE_FIXTURE(Fixture, "catalog: another process of a node shows nothing of the one before") {
  NodeRecord& node = enroll(1, 1);
  publish(node, {make_row(10, 1, 5), make_row(11, 1, 6)});
  enroll(1, 2);
  CHECK_FALSE(find(10).valid());
  publish(node, {make_row(11, 1, 1)});
  CHECK(find(11).generation == 1);
  sweep_all();
  CHECK(catalog.rows() == 1);
}

TEST_CASE("catalog: a full index refuses new rows and takes new values of old ones") {
  MemberTable members(kLease);
  Catalog catalog(members, 2);
  wire::Member member;
  member.node = 1;
  NodeRecord& node = *members.enroll(member, 1, kStart).node;
  const std::vector<Entry> rows{make_row(1, 1, 1), make_row(2, 1, 1), make_row(3, 1, 1),
                                make_row(1, 1, 2)};
  CHECK(catalog.publish(node, std::as_bytes(std::span(rows))) == 3);
  CHECK(catalog.rows() == 2);
  CHECK(node.rows == 2);
}

TEST_CASE_FIXTURE(Fixture, "catalog: namespaces are counted, the largest first") {
  NodeRecord& node = enroll(1, 1);
  publish(node, {make_row(0, 1, 1), make_row(1, 1, 1), make_row(3, 1, 1)});
  CHECK(catalog.namespace_count() == 2);
  auto largest = catalog.largest_namespaces(8);
  REQUIRE(largest.size() == 2);
  CHECK(largest[0] == std::pair<std::uint64_t, std::uint64_t>(0, 2));
  CHECK(largest[1] == std::pair<std::uint64_t, std::uint64_t>(1, 1));
  Entry moved = make_row(1, 1, 2);
  moved.name_space = 7;
  publish(node, {moved});
  largest = catalog.largest_namespaces(1);
  REQUIRE(largest.size() == 1);
  CHECK(largest[0].first == 0);
  CHECK(catalog.namespace_count() == 2);
  withdraw(node, 1, 2);
  CHECK(catalog.namespace_count() == 1);
}

// What the catalog must show, kept in the plainest way.
struct Model {
  struct Row {
    Generation generation;
    std::uint32_t epoch;
  };
  struct Node {
    std::uint64_t incarnation = 0;
    bool alive = false;
    std::uint32_t epoch = 0;
    std::map<std::uint64_t, Row> rows;  // those that are shown while it is alive
  };
  std::map<NodeId, Node> nodes;
};

TEST_CASE_FIXTURE(Fixture,
                  "catalog: shows what the plain model shows after any sequence of events") {
  const std::uint64_t seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  constexpr std::uint64_t kKeys = 40;
  Model model;
  TimePoint now = kStart;
  Generation generation = 0;
  for (int step = 0; step < 20'000; ++step) {
    const auto id = static_cast<NodeId>(1 + random() % 3);
    Model::Node& mine = model.nodes[id];
    const std::uint64_t key = random() % kKeys;
    const std::uint64_t event = random() % 100;
    NodeRecord* const node = members.find(id);
    if (event < 4) {
      const bool same = mine.incarnation != 0 && random() % 2 == 0;
      const bool forgotten = node == nullptr || node->state == NodeState::kForgotten;
      if (!same) ++mine.incarnation;
      if (!same || forgotten) mine.rows.clear();
      mine.epoch = enroll(id, mine.incarnation, now).epoch;
      mine.alive = true;
    } else if (event < 5) {
      now += kLease;
      members.expire(now);
      for (auto& [other, state] : model.nodes) state.alive = false;
    } else if (event < 7) {
      if (node != nullptr && node->state == NodeState::kLost) members.forget(*node, now);
    } else if (event < 9 && mine.alive) {
      members.end_sync(*node);
      std::erase_if(mine.rows, [&](const auto& row) { return row.second.epoch != mine.epoch; });
    } else if (event < 60 && mine.alive) {
      publish(*node, {make_row(key, id, ++generation)});
      mine.rows[key] = {generation, mine.epoch};
    } else if (event < 80 && mine.alive) {
      const auto found = mine.rows.find(key);
      if (found != mine.rows.end()) {
        REQUIRE(withdraw(*node, key, found->second.generation) == 1);
        mine.rows.erase(found);
      }
    } else if (event < 85) {
      // Rows of a lost node that the sweep has met are not back when it returns.
      catalog.sweep(16);
      for (auto& [other, state] : model.nodes) {
        if (state.alive) continue;
        std::erase_if(state.rows, [&, owner = other](const auto& row) {
          const auto rows = catalog.rows_of(make_key(row.first), 8);
          return std::none_of(rows.begin(), rows.end(),
                              [&](const Entry& entry) { return entry.node == owner; });
        });
      }
    } else {
      const Entry row = find(key);
      bool expected = false;
      for (const auto& [other, state] : model.nodes) {
        expected = expected || (state.alive && state.rows.contains(key));
      }
      REQUIRE(row.valid() == expected);
      if (expected) REQUIRE(model.nodes[row.node].rows.at(key).generation == row.generation);
    }
    std::uint64_t rows = 0;
    for (const auto& [other, record] : members.nodes()) {
      rows += record.rows;
      REQUIRE(record.rows_shown <= record.rows);
      REQUIRE(record.rows_current <= record.rows_shown);
      if (record.alive()) REQUIRE(record.rows_shown == model.nodes[other].rows.size());
    }
    REQUIRE(rows == catalog.rows());
  }
  sweep_all();
  CHECK(catalog.hidden_rows() == 0);
}

}  // namespace
}  // namespace hymcache
