// The table of members: registration, leases and epochs, on a clock of the test's own.
#include <doctest/doctest.h>

#include <string>

#include "master/csrc/member_table.h"

namespace hymcache {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLease{3000};
const TimePoint kStart{std::chrono::hours(1)};

wire::Member make_member(NodeId id, const std::string& name, std::uint64_t incarnation) {
  wire::Member member;
  member.node = id;
  member.name = wire::to_text<64>(name);
  member.tcp = wire::to_text<64>("127.0.0.1:7410");
  member.incarnation = incarnation;
  return member;
}

Entry row_of(const NodeRecord& node) {
  Entry row;
  row.node = node.member.node;
  row.epoch = node.epoch;
  return row;
}

TEST_CASE("members: a node is alive from REGISTER until its lease lapses") {
  MemberTable table(kLease);
  const Enrolled enrolled = table.enroll(make_member(7, "a", 1), 100, kStart);
  REQUIRE(enrolled.state == EnrollState::kEnrolled);
  CHECK(enrolled.replaced == 0);
  CHECK(enrolled.node->alive());
  CHECK(table.alive_count() == 1);
  CHECK(table.next_expiry() == kStart + kLease);

  CHECK(table.expire(kStart + kLease - milliseconds(1)) == 0);
  CHECK(table.renew(100, kStart + milliseconds(1000)) == enrolled.node);
  CHECK(table.expire(kStart + kLease) == 0);
  const std::uint64_t version = table.version();
  CHECK(table.expire(kStart + kLease + milliseconds(1000)) == 1);
  CHECK(enrolled.node->state == NodeState::kLost);
  CHECK(table.alive_count() == 0);
  CHECK(table.version() != version);
  // Its connection may still be there: what comes on it is no longer a node's word.
  CHECK(table.renew(100, kStart + milliseconds(5000)) == nullptr);
}

TEST_CASE("members: a closed connection leaves the node alive until its lease lapses") {
  MemberTable table(kLease);
  NodeRecord& node = *table.enroll(make_member(7, "a", 1), 100, kStart).node;
  table.detach(100);
  CHECK(node.alive());
  CHECK(node.peer == 0);
  CHECK(table.expire(kStart + kLease) == 1);
  CHECK_FALSE(node.alive());
}

TEST_CASE("members: the same process on a new connection shows its rows until SYNCED") {
  MemberTable table(kLease);
  NodeRecord& node = *table.enroll(make_member(7, "a", 1), 100, kStart).node;
  const Entry old_row = row_of(node);
  table.end_sync(node);
  CHECK(node.shows(old_row));

  const Enrolled again = table.enroll(make_member(7, "a", 1), 101, kStart);
  REQUIRE(again.state == EnrollState::kEnrolled);
  CHECK(again.node == &node);
  CHECK(again.replaced == 100);
  CHECK(table.renew(100, kStart) == nullptr);
  const Entry new_row = row_of(node);
  CHECK(new_row.epoch > old_row.epoch);
  CHECK(node.shows(old_row));
  CHECK(node.shows(new_row));

  table.end_sync(node);
  CHECK_FALSE(node.shows(old_row));
  CHECK(node.shows(new_row));
}

TEST_CASE("members: the rows of a lost node come back with its process, not with another") {
  MemberTable table(kLease);
  NodeRecord& node = *table.enroll(make_member(7, "a", 1), 100, kStart).node;
  const Entry row = row_of(node);
  table.expire(kStart + kLease);
  CHECK_FALSE(node.shows(row));

  std::uint64_t incarnation = 1;
  SUBCASE("its own") {}
  SUBCASE("another") { incarnation = 2; }
  REQUIRE(table.enroll(make_member(7, "a", incarnation), 101, kStart + kLease).state ==
          EnrollState::kEnrolled);
  CHECK(node.shows(row) == (incarnation == 1));
}

TEST_CASE("members: a live process keeps its name while its connection is open") {
  MemberTable table(kLease);
  NodeRecord& node = *table.enroll(make_member(7, "a", 1), 100, kStart).node;
  const Entry row = row_of(node);

  const Enrolled refused = table.enroll(make_member(7, "a", 2), 101, kStart);
  CHECK(refused.state == EnrollState::kNameTaken);
  CHECK(refused.node == &node);
  CHECK(node.member.incarnation == 1);

  SUBCASE("not after the connection has closed") {
    table.detach(100);
    CHECK(table.enroll(make_member(7, "a", 2), 101, kStart).state == EnrollState::kEnrolled);
  }
  SUBCASE("not after the lease is over") {
    CHECK(table.enroll(make_member(7, "a", 2), 101, kStart + kLease).state ==
          EnrollState::kEnrolled);
  }
  SUBCASE("not against itself") {
    CHECK(table.enroll(make_member(7, "a", 2), 100, kStart).state == EnrollState::kEnrolled);
  }
  CHECK(node.member.incarnation == 2);
  CHECK_FALSE(node.shows(row));
}

TEST_CASE("members: an id belongs to one live name") {
  MemberTable table(kLease);
  NodeRecord& node = *table.enroll(make_member(7, "a", 1), 100, kStart).node;
  table.set_draining(node, true);
  table.detach(100);
  CHECK(table.enroll(make_member(7, "b", 2), 101, kStart).state == EnrollState::kIdTaken);
  table.expire(kStart + kLease);
  CHECK(table.enroll(make_member(7, "b", 2), 101, kStart + kLease).state == EnrollState::kEnrolled);
  CHECK(wire::from_text(node.member.name) == "b");
  CHECK_FALSE(node.draining);
}

TEST_CASE("members: draining outlives the process") {
  MemberTable table(kLease);
  NodeRecord& node = *table.enroll(make_member(7, "a", 1), 100, kStart).node;
  const std::uint64_t version = table.version();
  table.set_draining(node, true);
  CHECK(table.version() != version);
  CHECK(node.member.state == wire::MemberState::kDraining);
  table.detach(100);
  table.enroll(make_member(7, "a", 2), 101, kStart);
  CHECK(node.draining);
  CHECK(node.member.state == wire::MemberState::kDraining);
}

TEST_CASE("members: no more than kNodesMax are alive") {
  MemberTable table(kLease);
  for (NodeId id = 1; id <= wire::kNodesMax; ++id) {
    REQUIRE(table.enroll(make_member(id, "n" + std::to_string(id), 1), id, kStart).state ==
            EnrollState::kEnrolled);
  }
  const NodeId one_more = wire::kNodesMax + 1;
  CHECK(table.enroll(make_member(one_more, "x", 1), one_more, kStart).state == EnrollState::kFull);
  CHECK(table.enroll(make_member(1, "n1", 1), one_more, kStart).state == EnrollState::kEnrolled);
  CHECK(table.expire(kStart + kLease) == wire::kNodesMax);
  CHECK(table.enroll(make_member(one_more, "x", 1), one_more, kStart + kLease).state ==
        EnrollState::kEnrolled);
}

TEST_CASE("members: lost nodes are forgotten after an hour, and the longest lost when too many") {
  MemberTable table(kLease);
  table.enroll(make_member(7, "a", 1), 100, kStart);
  const TimePoint lost_at = kStart + kLease;
  table.expire(lost_at);
  CHECK(table.next_expiry() == lost_at + MemberTable::kLostKept);
  SUBCASE("after an hour") {
    table.expire(lost_at + MemberTable::kLostKept - milliseconds(1));
    CHECK(table.find(7) != nullptr);
    table.expire(lost_at + MemberTable::kLostKept);
    CHECK(table.find(7) == nullptr);
    CHECK_FALSE(table.next_expiry().has_value());
  }
  SUBCASE("when too many") {
    const TimePoint later = lost_at + milliseconds(1);
    for (NodeId id = 1000; id < 1000 + MemberTable::kLostMax; ++id) {
      table.enroll(make_member(id, "n" + std::to_string(id), 1), id, later);
    }
    table.expire(later + kLease);
    CHECK(table.find(7) == nullptr);
    CHECK(table.nodes().size() == MemberTable::kLostMax);
  }
}

TEST_CASE("members: a forgotten record stays for its rows, and may be used anew") {
  MemberTable table(kLease);
  NodeRecord& node = *table.enroll(make_member(7, "a", 1), 100, kStart).node;
  const Entry row = row_of(node);
  node.rows = node.rows_shown = node.rows_current = 1;
  table.expire(kStart + kLease);
  table.forget(node, kStart + kLease);
  REQUIRE(table.find(7) == &node);
  CHECK(node.state == NodeState::kForgotten);
  SUBCASE("dropped with the last row") {
    table.row_left(node, row);
    CHECK(table.find(7) == nullptr);
  }
  SUBCASE("the same process registers: it starts from nothing") {
    table.enroll(make_member(7, "a", 1), 101, kStart + kLease);
    CHECK(node.alive());
    CHECK_FALSE(node.shows(row));
    CHECK(node.rows == 1);
    CHECK(node.rows_shown == 0);
    table.row_left(node, row);
    CHECK(node.rows == 0);
    CHECK(table.find(7) == &node);
  }
}

}  // namespace
}  // namespace hymcache
