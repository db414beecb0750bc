// How prefetch sessions and their blocks end: releases, sending, peers, leases, bounds, faults.
#include <doctest/doctest.h>

#include <vector>

#include "tests/cpp/session_fixture.h"

namespace hymcache::testing {
namespace {

using Result = SessionTable::Result;
using wire::BlockState;

TEST_CASE("sessions: blocks may be released at any time") {
  Sessions sessions({}, {.window_bytes = 2 * kBlock});
  const auto entries = sessions.on_device(0, 6, kBlock);
  REQUIRE(sessions.prefetch(1, entries) == Result::kOk);
  sessions.release(1, 0, 1);  // while it is read from the device
  sessions.release(1, 3, 2);  // before it is issued
  sessions.release(1, 4, 100'000'000);
  sessions.release(9, 0, 1);
  sessions.settle();
  CHECK(sessions.staged_bytes() == 2 * kBlock);
  CHECK(sessions.read(1, 1, 1).size() == 5);
  sessions.release(1, 1, 1);
  sessions.release(1, 1, 1);
  sessions.release(1, 2, 1);
  CHECK(sessions.staged_bytes() == 0);
  const auto rows = sessions.read(1, 2, 0);
  REQUIRE(rows.size() == 6);
  for (const auto& row : rows) CHECK(row.state == BlockState::kMiss);
}

TEST_CASE("sessions: who waits for a block that is released learns so at once") {
  Sessions sessions({.faults = {.delay_read = 1, .delay_drives_max = 1'000'000}});
  const auto entries = sessions.on_device(0, 1, kBlock);
  REQUIRE(sessions.prefetch(1, entries) == Result::kOk);
  REQUIRE(sessions.wait(1, 1, 0) == Result::kOk);
  sessions.release(1, 0, 1);
  CHECK(sessions.answer(1).answer.rows.at(0).state == BlockState::kMiss);
}

TEST_CASE("sessions: inline blocks are released when they have left") {
  Sessions sessions({}, {.window_bytes = 4 * kBlock});
  const auto entries = sessions.on_device(0, 8, kBlock);
  REQUIRE(sessions.prefetch(1, entries) == Result::kOk);
  sessions.settle();
  REQUIRE(sessions.wait(1, 1, 0, 256, wire::WaitRequest::kInline) == Result::kOk);
  auto sent = sessions.answer(1).answer;
  REQUIRE(sent.bulk.size() == 4);
  CHECK(sent.inline_bytes);
  sessions.release(1, 0, 4);  // has no effect on what is on its way
  CHECK(sessions.staged_bytes() == 4 * kBlock);
  sessions.store().call([&] {
    for (std::size_t i = 0; i < 4; ++i) {
      CHECK(holds(static_cast<std::uint8_t*>(sent.bulk[i].iov_base), i, kBlock));
    }
    sent.sent();
  });
  sessions.settle();
  REQUIRE(sessions.wait(1, 2, 4, 256, wire::WaitRequest::kInline) == Result::kOk);
  CHECK(sessions.answer(2).answer.bulk.size() == 4);
  CHECK(sessions.stats().bytes_sent == 8 * kBlock);
}

TEST_CASE("sessions: answers that leave out of order settle their own blocks") {
  Sessions sessions;
  std::vector<Entry> entries;
  for (const std::uint32_t kib : {64, 128, 4, 16}) {
    entries.push_back(sessions.store().put(entries.size(), kib * kKiB));
  }
  sessions.store().forget_dram();
  REQUIRE(sessions.prefetch(1, entries) == Result::kOk);
  sessions.settle();
  const std::uint32_t flags = wire::WaitRequest::kInline;
  REQUIRE(sessions.wait(1, 1, 0, 2, flags) == Result::kOk);
  REQUIRE(sessions.wait(1, 2, 0, 4, flags, /*peer=*/2) == Result::kOk);
  auto first = sessions.answer(1).answer;
  auto second = sessions.answer(2).answer;
  REQUIRE(second.rows.size() == 4);
  CHECK(second.rows[0].state == BlockState::kMiss);  // on its way to another
  CHECK(second.rows[2].state == BlockState::kReady);
  sessions.store().call([&] { second.sent(); });
  CHECK(sessions.staged_bytes() == (64 + 128) * kKiB);
  sessions.store().call([&] { first.sent(); });
  CHECK(sessions.staged_bytes() == 0);
}

TEST_CASE("sessions: an end during sending leaves the bytes alone until they have left") {
  Sessions sessions;
  const auto entries = sessions.on_device(0, 2, kBlock);
  REQUIRE(sessions.prefetch(1, entries) == Result::kOk);
  sessions.settle();
  REQUIRE(sessions.wait(1, 1, 0, 1, wire::WaitRequest::kInline) == Result::kOk);
  auto sent = sessions.answer(1).answer;
  sessions.end(1);
  CHECK(sessions.staged_bytes() == kBlock);
  // A session of the same name is another one: what left for the first does not touch it.
  REQUIRE(sessions.prefetch(1, entries) == Result::kOk);
  sessions.settle();
  sessions.store().call([&] {
    CHECK(holds(static_cast<std::uint8_t*>(sent.bulk[0].iov_base), 0, kBlock));
    sent.sent();
  });
  CHECK(sessions.staged_bytes() == 2 * kBlock);
  CHECK(sessions.read(1, 2, 0).size() == 2);
  sessions.end(1);
  CHECK(sessions.staged_bytes() == 0);
}

TEST_CASE("sessions: a peer that goes takes its sessions along, in whatever state") {
  Sessions sessions({}, {.window_bytes = 2 * kBlock});
  const auto entries = sessions.on_device(0, 4, kBlock);
  REQUIRE(sessions.prefetch(1, entries, /*peer=*/1) == Result::kOk);  // queued and issued
  REQUIRE(sessions.prefetch(2, entries, /*peer=*/1) == Result::kOk);  // ready
  REQUIRE(sessions.prefetch(3, entries, /*peer=*/1) == Result::kOk);  // handed
  REQUIRE(sessions.prefetch(4, entries, /*peer=*/1) == Result::kOk);  // waited for
  REQUIRE(sessions.prefetch(5, entries, /*peer=*/1) == Result::kOk);  // sending
  REQUIRE(sessions.prefetch(6, entries, /*peer=*/1) == Result::kOk);  // claimed by another peer
  REQUIRE(sessions.prefetch(7, entries, /*peer=*/2) == Result::kOk);
  sessions.settle();
  REQUIRE(sessions.read(3, 3, 0, 1).size() == 1);
  REQUIRE(sessions.wait(4, 4, 3) == Result::kOk);
  REQUIRE(sessions.wait(5, 5, 0, 1, wire::WaitRequest::kInline) == Result::kOk);
  auto sending = sessions.answer(5).answer;
  REQUIRE(sessions.wait(6, 6, 0, 1, 0, /*peer=*/3) == Result::kOk);
  sessions.call([](SessionTable& table) { table.on_peer_gone(1); });
  CHECK(sessions.stats().sessions == 2);
  CHECK_FALSE(sessions.answer(4).answer.session_known);
  sessions.store().call([&] { sending.sent(); });
  CHECK(sessions.wait(3, 7, 0) == Result::kNoSession);
  CHECK(sessions.wait(6, 8, 0, 1, 0, 3) == Result::kOk);
  sessions.call([](SessionTable& table) {
    table.on_peer_gone(3);
    table.on_peer_gone(2);
    table.on_peer_gone(99);
  });
  CHECK(sessions.stats().sessions == 0);
  sessions.settle();
  CHECK(sessions.staged_bytes() == 0);
}

TEST_CASE("sessions: an idle session expires, one that is waited for does not") {
  Sessions sessions({.faults = {.delay_read = 1, .delay_drives_max = 1'000'000}});
  const auto entries = sessions.on_device(0, 1, kBlock);
  REQUIRE(sessions.prefetch(1, entries, kPeer, /*lease_ms=*/1) == Result::kOk);
  REQUIRE(sessions.prefetch(2, entries, kPeer, /*lease_ms=*/1) == Result::kOk);
  REQUIRE(sessions.prefetch(3, entries, kPeer, /*lease_ms=*/60'000) == Result::kOk);
  REQUIRE(sessions.wait(2, 1, 0) == Result::kOk);
  ::usleep(5'000);
  sessions.call([](SessionTable& table) { table.expire(); });
  CHECK(sessions.stats().sessions == 2);
  CHECK(sessions.stats().expired == 1);
  CHECK(sessions.wait(1, 2, 0) == Result::kNoSession);
  CHECK(sessions.answers() == 0);
}

TEST_CASE("sessions: a wait ends with its time, and then may be made anew") {
  Sessions sessions({.faults = {.delay_read = 1, .delay_drives_max = 100}});
  const auto entries = sessions.on_device(0, 1, kBlock);
  REQUIRE(sessions.prefetch(1, entries) == Result::kOk);
  REQUIRE(sessions.wait(1, 1, 1, 1, 0, kPeer, /*timeout_ms=*/5) == Result::kOk);  // no such block
  const auto first = sessions.answer(1).answer;
  CHECK(first.rows.empty());
  CHECK(first.session_known);
  CHECK(first.first == 1);
  REQUIRE(sessions.wait(1, 2, 0, 1, 0, kPeer, /*timeout_ms=*/0) == Result::kOk);
  CHECK(sessions.read(1, 3, 0).at(0).state == BlockState::kReady);
  CHECK(sessions.answer(2).answer.request_id == 2);
}

TEST_CASE("sessions: the newer of two readers counts, and the older is told") {
  Sessions sessions({.faults = {.delay_read = 1, .delay_drives_max = 100}});
  const auto entries = sessions.on_device(0, 1, kBlock);
  REQUIRE(sessions.prefetch(1, entries) == Result::kOk);
  REQUIRE(sessions.wait(1, 1, 0, 1, 0, /*peer=*/1) == Result::kOk);
  REQUIRE(sessions.wait(1, 2, 0, 1, 0, /*peer=*/2) == Result::kOk);
  CHECK(sessions.answer(1).answer.rows.empty());
  CHECK(sessions.answer(1).answer.peer == 1);
  CHECK(sessions.answer(2).answer.rows.at(0).state == BlockState::kReady);
  CHECK(sessions.answer(2).answer.peer == 2);
}

TEST_CASE("sessions: an end tells who waits") {
  Sessions sessions({.faults = {.delay_read = 1, .delay_drives_max = 1'000'000}});
  const auto entries = sessions.on_device(0, 1, kBlock);
  REQUIRE(sessions.prefetch(1, entries) == Result::kOk);
  REQUIRE(sessions.wait(1, 1, 0) == Result::kOk);
  sessions.end(1);
  CHECK_FALSE(sessions.answer(1).answer.session_known);
  sessions.settle();
  CHECK(sessions.staged_bytes() == 0);
}

TEST_CASE("sessions: rows may follow a wait for them") {
  Sessions sessions;
  const auto entries = sessions.on_device(0, 2, kBlock);
  REQUIRE(sessions.prefetch(1, {entries[0]}) == Result::kOk);
  REQUIRE(sessions.wait(1, 1, 1) == Result::kOk);
  REQUIRE(sessions.prefetch(1, {entries[1]}) == Result::kOk);
  CHECK(sessions.answer(1).answer.rows.at(0).state == BlockState::kReady);
}

TEST_CASE("sessions: there are bounds on sessions and blocks") {
  Sessions sessions({}, {.sessions_max = 2, .blocks_max = 5});
  const auto entries = sessions.on_device(0, 3, kBlock);
  CHECK(sessions.prefetch(1, entries) == Result::kOk);
  CHECK(sessions.prefetch(2, entries) == Result::kBusy);  // six blocks
  CHECK(sessions.prefetch(2, {entries[0]}) == Result::kOk);
  CHECK(sessions.prefetch(3, {entries[0]}) == Result::kBusy);  // three sessions
  // A session that cannot have all of its rows ends: its reader starts over, and waits for none.
  REQUIRE(sessions.wait(1, 1, 3) == Result::kOk);
  CHECK(sessions.prefetch(1, entries) == Result::kBusy);
  CHECK_FALSE(sessions.answer(1).answer.session_known);
  CHECK(sessions.stats().sessions == 1);
  CHECK(sessions.prefetch(3, {entries[0]}) == Result::kOk);
  const std::vector<wire::PrefetchRow> none;
  CHECK(sessions.prefetch(3, none) == Result::kOk);
}

TEST_CASE("sessions: a session has a bound of its own") {
  Sessions sessions;
  const std::vector<wire::PrefetchRow> rows(wire::kPrefetchRowsMax);
  for (std::uint32_t i = 0; i < wire::kSessionBlocksMax / wire::kPrefetchRowsMax; ++i) {
    REQUIRE(sessions.prefetch(1, rows) == Result::kOk);
  }
  CHECK(sessions.prefetch(1, rows) == Result::kBusy);
}

TEST_CASE("sessions: what the device cannot read is said, and read anew when asked again") {
  Sessions sessions({.faults = {.fail_read = 1}});
  const auto entries = sessions.on_device(0, 2, kBlock);
  REQUIRE(sessions.prefetch(1, entries) == Result::kOk);
  sessions.settle();
  const auto rows = sessions.read(1, 1, 0);
  REQUIRE(rows.size() == 2);
  CHECK(rows[0].state == BlockState::kDeviceError);
  CHECK(sessions.stats().blocks_failed == 2);
  CHECK(sessions.staged_bytes() == 0);
}

TEST_CASE("sessions: a report finds the object that a block names") {
  Sessions sessions;
  const auto entries = sessions.on_device(0, 1, kBlock);
  REQUIRE(sessions.prefetch(1, entries) == Result::kOk);
  sessions.call([&](SessionTable& table) {
    REQUIRE(table.entry_of(session_id(1), 0) != nullptr);
    CHECK(table.entry_of(session_id(1), 0)->generation == entries[0].generation);
    CHECK(table.entry_of(session_id(1), 1) == nullptr);
    CHECK(table.entry_of(session_id(2), 0) == nullptr);
    sessions.store().directory().drop(entries[0].key, entries[0].generation);
    CHECK(table.entry_of(session_id(1), 0) == nullptr);
  });
}

TEST_CASE("sessions: a table that goes gives everything back") {
  Sessions sessions;
  const auto entries = sessions.on_device(0, 8, kBlock);
  std::unique_ptr<SessionTable> table;
  sessions.store().call([&] {
    table = std::make_unique<SessionTable>(sessions.store().loop(), sessions.store().device(),
                                           sessions.store().directory(), SessionLimits{},
                                           [](const SessionTable::Answer&) {});
    std::vector<wire::PrefetchRow> rows;
    for (const Entry& entry : entries) rows.push_back(row_of(entry));
    table->prefetch(1, {.session = session_id(1), .lease_ms = 1000, .count = 8},
                    std::as_bytes(std::span(rows)));
    CHECK(sessions.store().device().stats().staging_used_bytes == 8 * kBlock);
    table.reset();
  });
  sessions.settle();
  CHECK(sessions.staged_bytes() == 0);
}

}  // namespace
}  // namespace hymcache::testing
