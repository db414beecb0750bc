// Prefetch sessions over a real device: windows, turns, revocation and stale locations.
#include <doctest/doctest.h>

#include <vector>

#include "tests/cpp/session_fixture.h"

namespace hymcache::testing {
namespace {

using Result = SessionTable::Result;
using wire::BlockState;

TEST_CASE("sessions: a window is staged ahead, in order, and moves on with releases") {
  Sessions sessions({}, {.window_bytes = 4 * kBlock});
  const auto entries = sessions.on_device(100, 10, kBlock);
  REQUIRE(sessions.prefetch(1, entries) == Result::kOk);
  sessions.settle();
  CHECK(sessions.staged_bytes() == 4 * kBlock);

  REQUIRE(sessions.wait(1, 1, 0) == Result::kOk);
  const auto first = sessions.answer(1);
  REQUIRE(first.answer.rows.size() == 4);
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(first.answer.rows[i].state == BlockState::kReady);
    CHECK(first.answer.rows[i].crc32c == entries[i].crc32c);
    CHECK(first.answer.rows[i].flags == Entry::kHasCrc);
    CHECK(holds_object(first.bytes[i], 100 + i));
  }
  // Handed blocks count: nothing more is staged before one is released.
  CHECK(sessions.staged_bytes() == 4 * kBlock);
  sessions.release(1, 0, 1);
  sessions.settle();
  CHECK(sessions.staged_bytes() == 4 * kBlock);
  REQUIRE(sessions.read(1, 2, 4).size() == 1);
  sessions.release(1, 1, 4);
  sessions.settle();
  REQUIRE(sessions.read(1, 3, 5).size() == 4);
  sessions.release(1, 5, 4);
  REQUIRE(sessions.read(1, 4, 9).size() == 1);
  sessions.release(1, 9, 1);
  sessions.settle();
  CHECK(sessions.staged_bytes() == 0);
  CHECK(sessions.stats().blocks_ready == 10);
  CHECK(sessions.stats().bytes_handed == 10 * kBlock);
}

TEST_CASE("sessions: a block larger than the window has it to itself") {
  Sessions sessions({}, {.window_bytes = 4 * kKiB});
  const auto entries = sessions.on_device(1, 3, kBlock);
  REQUIRE(sessions.prefetch(1, entries) == Result::kOk);
  for (std::uint32_t i = 0; i < 3; ++i) {
    const auto rows = sessions.read(1, i + 1, i);
    REQUIRE(rows.size() == 1);
    CHECK(rows[0].state == BlockState::kReady);
    CHECK(sessions.staged_bytes() == kBlock);
    sessions.release(1, i, 1);
  }
}

TEST_CASE("sessions: blocks of all sizes share a window by their bytes") {
  Sessions sessions({}, {.window_bytes = 256 * kKiB});
  std::vector<Entry> entries;
  for (const std::uint32_t kib : {200, 100, 64, 8, 252, 1}) {
    entries.push_back(sessions.store().put(entries.size(), kib * kKiB));
  }
  sessions.store().forget_dram();
  REQUIRE(sessions.prefetch(1, entries) == Result::kOk);
  sessions.settle();
  CHECK(sessions.staged_bytes() == 200 * kKiB);
  sessions.release(1, 0, 1);
  sessions.settle();
  CHECK(sessions.staged_bytes() == (100 + 64 + 8) * kKiB);
  sessions.release(1, 1, 2);
  sessions.settle();
  CHECK(sessions.staged_bytes() == 8 * kKiB);  // 252 KiB do not fit beside these
  sessions.release(1, 3, 1);
  sessions.settle();
  CHECK(sessions.staged_bytes() == (252 + 4) * kKiB);  // a device page for the last
}

TEST_CASE("sessions: they take turns with the slots") {
  Sessions sessions;  // room for 16 blocks
  const auto entries = sessions.on_device(0, 64, kBlock);
  for (std::uint64_t session = 0; session < 4; ++session) {
    const auto from = entries.begin() + static_cast<std::ptrdiff_t>(16 * session);
    REQUIRE(sessions.prefetch(session, std::vector<Entry>(from, from + 16)) == Result::kOk);
  }
  sessions.settle();
  // The first came when there was room for all of its own. It gives half of it back, and now the
  // others get an equal share.
  sessions.release(0, 0, 9);
  sessions.settle();
  CHECK(sessions.staged_bytes() == 16 * kBlock);
  for (std::uint64_t session = 1; session < 4; ++session) {
    CHECK(sessions.read(session, static_cast<std::uint32_t>(session), 0).size() == 3);
  }
}

TEST_CASE("sessions: a reader goes before those who only prepare") {
  Sessions sessions;
  const auto entries = sessions.on_device(0, 32, kBlock);
  const std::vector<Entry> ahead(entries.begin(), entries.begin() + 16);
  REQUIRE(sessions.prefetch(1, ahead) == Result::kOk);
  sessions.settle();
  REQUIRE(sessions.staged_bytes() == 16 * kBlock);
  REQUIRE(sessions.prefetch(2, std::vector<Entry>(entries.begin() + 16, entries.end())) ==
          Result::kOk);
  CHECK(sessions.staged_bytes() == 16 * kBlock);
  CHECK(sessions.stats().blocks_revoked == 0);

  REQUIRE(sessions.wait(2, 1, 0, 1) == Result::kOk);
  const auto answered = sessions.answer(1);
  REQUIRE(answered.answer.rows.size() == 1);
  CHECK(answered.answer.rows[0].state == BlockState::kReady);
  CHECK(holds_object(answered.bytes[0], 16));
  CHECK(sessions.stats().blocks_revoked >= 1);

  // What was revoked is staged again when there is room; nothing of it is lost.
  sessions.end(2);
  std::uint32_t request_id = 100;
  for (std::uint32_t at = 0; at < 16;) {
    REQUIRE(sessions.wait(1, ++request_id, at) == Result::kOk);
    const auto some = sessions.answer(request_id);
    for (std::size_t i = 0; i < some.answer.rows.size(); ++i) {
      REQUIRE(some.answer.rows[i].state == BlockState::kReady);
      CHECK(holds_object(some.bytes[i], at + i));
    }
    at += static_cast<std::uint32_t>(some.answer.rows.size());
  }
}

TEST_CASE("sessions: slots that become free go to whoever is read from") {
  Sessions sessions;
  const auto entries = sessions.on_device(0, 48, kBlock);
  const auto from = [&](std::size_t first) {
    return std::vector<Entry>(entries.begin() + static_cast<std::ptrdiff_t>(first),
                              entries.begin() + static_cast<std::ptrdiff_t>(first) + 16);
  };
  REQUIRE(sessions.prefetch(1, from(0)) == Result::kOk);
  sessions.settle();
  REQUIRE(sessions.prefetch(2, from(16)) == Result::kOk);
  REQUIRE(sessions.prefetch(3, from(32)) == Result::kOk);
  CHECK(sessions.read(2, 1, 0, 1).size() == 1);  // at the cost of one of the first's
  CHECK(sessions.stats().blocks_revoked == 1);
  sessions.release(1, 0, 8);
  sessions.settle();
  CHECK(sessions.read(2, 2, 1, 8).size() == 8);  // staged ahead, as the window allows
  CHECK(sessions.stats().blocks_revoked == 1);
}

TEST_CASE("sessions: a large block of a reader takes the place of many small ones") {
  Sessions sessions;
  const auto small = sessions.on_device(0, 64, 16 * kKiB);
  const auto large = sessions.on_device(1000, 1, 1024 * kKiB);
  REQUIRE(sessions.prefetch(1, small) == Result::kOk);
  sessions.settle();
  REQUIRE(sessions.staged_bytes() == 1024 * kKiB);
  REQUIRE(sessions.prefetch(2, large) == Result::kOk);
  const auto rows = sessions.read(2, 1, 0);
  REQUIRE(rows.size() == 1);
  CHECK(rows[0].state == BlockState::kReady);
  CHECK(sessions.stats().blocks_revoked == 64);
}

TEST_CASE("sessions: a reader that needs no revocation causes none") {
  Sessions sessions;
  const auto half = sessions.on_device(0, 1, 512 * kKiB);
  const auto large = sessions.on_device(10, 1, 1024 * kKiB);
  const auto small = sessions.on_device(20, 1, kBlock);
  REQUIRE(sessions.prefetch(1, half) == Result::kOk);
  sessions.settle();
  REQUIRE(sessions.prefetch(2, large) == Result::kOk);  // waits for room
  REQUIRE(sessions.prefetch(3, small) == Result::kOk);  // stands behind it
  const auto rows = sessions.read(3, 1, 0);
  REQUIRE(rows.size() == 1);
  CHECK(rows[0].state == BlockState::kReady);
  CHECK(sessions.stats().blocks_revoked == 0);
}

TEST_CASE("sessions: what a reader was handed is never revoked") {
  Sessions sessions;
  const auto entries = sessions.on_device(0, 17, kBlock);
  const std::vector<Entry> first(entries.begin(), entries.begin() + 16);
  REQUIRE(sessions.prefetch(1, first) == Result::kOk);
  sessions.settle();
  REQUIRE(sessions.read(1, 1, 0).size() == 16);
  REQUIRE(sessions.prefetch(2, std::vector<Entry>(entries.begin() + 16, entries.end())) ==
          Result::kOk);
  REQUIRE(sessions.wait(2, 2, 0, 1, 0, kPeer, /*timeout_ms=*/30) == Result::kOk);
  CHECK(sessions.answer(2).answer.rows.empty());
  CHECK(sessions.stats().blocks_revoked == 0);
  sessions.release(1, 0, 1);
  CHECK(sessions.read(2, 3, 0).at(0).state == BlockState::kReady);
}

TEST_CASE("sessions: a session can give way although it ends in a miss") {
  Sessions sessions;
  const auto entries = sessions.on_device(0, 17, kBlock);
  std::vector<wire::PrefetchRow> rows;
  for (std::size_t i = 0; i < 16; ++i) rows.push_back(row_of(entries[i]));
  rows.push_back(row_of(entries[0]));
  rows.back().generation += 1;
  REQUIRE(sessions.prefetch(1, rows) == Result::kOk);
  sessions.settle();
  REQUIRE(sessions.prefetch(2, {entries[16]}) == Result::kOk);
  CHECK(sessions.read(2, 1, 0).at(0).state == BlockState::kReady);
  CHECK(sessions.stats().blocks_revoked == 1);
  sessions.end(2);
  sessions.settle();
  CHECK(sessions.read(1, 2, 0).size() == 17);
}

TEST_CASE("sessions: a location that is stale in any respect is a miss") {
  Sessions sessions;
  const auto entries = sessions.on_device(0, 2, kBlock);
  std::vector<wire::PrefetchRow> rows(6, row_of(entries[0]));
  rows[0].generation += 1;
  rows[1].address = entries[1].address;
  rows[2].length -= 1;
  rows[3].key = numbered_key(999);
  rows[4].key = entries[1].key;
  REQUIRE(sessions.prefetch(1, rows) == Result::kOk);
  sessions.settle();
  const auto answered = sessions.read(1, 1, 0);
  REQUIRE(answered.size() == 6);
  for (std::size_t i = 0; i < 5; ++i) CHECK(answered[i].state == BlockState::kMiss);
  CHECK(answered[5].state == BlockState::kReady);
  CHECK(sessions.stats().blocks_missed == 5);
}

TEST_CASE("sessions: an object that goes while it is staged is a miss, and leaves its window") {
  Sessions sessions({}, {.window_bytes = 2 * kBlock});
  const auto entries = sessions.on_device(0, 3, kBlock);
  REQUIRE(sessions.prefetch(1, entries) == Result::kOk);
  sessions.settle();
  sessions.store().call([&] {
    for (int i = 0; i < 2; ++i) {
      CHECK(sessions.store().directory().drop(entries[i].key, entries[i].generation));
    }
  });
  const std::uint32_t flags = wire::WaitRequest::kInline;  // such a reader releases nothing itself
  REQUIRE(sessions.wait(1, 1, 0, 2, flags) == Result::kOk);
  const auto rows = sessions.answer(1).answer.rows;
  REQUIRE(rows.size() == 2);
  CHECK(rows[0].state == BlockState::kMiss);
  CHECK(rows[1].state == BlockState::kMiss);
  REQUIRE(sessions.wait(1, 2, 2, 1, flags) == Result::kOk);
  CHECK(sessions.answer(2).answer.rows.at(0).state == BlockState::kReady);
}

TEST_CASE("sessions: a dropped object stays readable to whom it was handed") {
  Sessions sessions;
  const auto entries = sessions.on_device(5, 1, kBlock);
  REQUIRE(sessions.prefetch(1, entries) == Result::kOk);
  const auto rows = sessions.read(1, 1, 0);
  sessions.store().call([&] {
    CHECK(sessions.store().directory().drop(entries[0].key, entries[0].generation));
    CHECK(holds(sessions.store().device().region().base + rows[0].region_offset, 5, kBlock));
  });
  CHECK(sessions.staged_bytes() == kBlock);
  sessions.release(1, 0, 1);
  CHECK(sessions.staged_bytes() == 0);
}

}  // namespace
}  // namespace hymcache::testing
