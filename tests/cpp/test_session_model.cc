// Random requests of many peers against a session table, and what must hold of every answer.
#include <doctest/doctest.h>

#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/cpp/session_fixture.h"

namespace hymcache::testing {
namespace {

using Result = SessionTable::Result;
using wire::BlockState;

constexpr std::uint64_t kSessions = 6;
constexpr std::uint64_t kPeers = 4;
constexpr std::uint32_t kObjects = 48;

// Everything below is done in the store's loop.
class Model {
 public:
  Model(Store& store, std::vector<Entry> objects, std::uint64_t seed, const FaultPlan& faults)
      : store_(store), objects_(std::move(objects)), random_(seed), faults_(faults) {}

  SessionTable* table = nullptr;

  void take(SessionTable::Answer answer) {
    const auto asked = waits_.find(answer.request_id);
    REQUIRE(asked != waits_.end());  // answered once
    const Wait wait = asked->second;
    waits_.erase(asked);
    CHECK(answer.peer == wait.peer);
    CHECK(answer.first == wait.first);
    CHECK(answer.rows.size() <= wait.count_max);
    if (answer.rows.empty()) CHECK(answer.bulk.empty());
    std::size_t part = 0;
    for (std::size_t i = 0; i < answer.rows.size(); ++i) {
      const std::uint32_t index = wait.first + static_cast<std::uint32_t>(i);
      check_row(wait.session, index, answer.rows[i]);
      if (answer.rows[i].state != BlockState::kReady || !answer.inline_bytes) continue;
      CHECK(answer.bulk[part].iov_base ==
            store_.device().region().base + answer.rows[i].region_offset);
      CHECK(answer.bulk[part++].iov_len == answer.rows[i].length);
      blocks(wait.session)[index].may_miss = true;  // released with this
    }
    CHECK(answer.bulk.size() == part);
    if (answer.sent) to_send_.push_back(std::move(answer));
  }

  void step() {
    const std::uint64_t session = draw(kSessions);
    switch (draw(16)) {
      case 0:
      case 1:
      case 2:
      case 3:
        return prefetch(session);
      case 4:
      case 5:
      case 6:
      case 7:
      case 8:
        return wait(session);
      case 9:
      case 10:
      case 11:
        return release(session);
      case 12:
        return send_some(1 + draw(4));
      case 13:
        if (draw(3) == 0) return end(session);
        return table->pump();
      case 14:
        if (draw(8) == 0) return peer_gone(draw(kPeers));
        return table->expire();
      default:
        if (draw(4) == 0) return drop(draw(kObjects));
    }
  }

  void finish() {
    for (std::uint64_t session = 0; session < kSessions; ++session) end(session);
    CHECK(waits_.empty());
    send_some(to_send_.size());
    CHECK(table->stats().sessions == 0);
    for (std::uint32_t i = 0; i < kObjects; ++i) drop(i);
  }

 private:
  struct Block {
    std::uint32_t object = 0;
    bool may_miss = false;  // stale, released, or on its way already
  };
  struct Wait {
    std::uint64_t peer = 0;
    std::uint64_t session = 0;
    std::uint32_t first = 0;
    std::uint32_t count_max = 0;
  };
  struct Open {
    std::uint64_t peer = 0;
    std::vector<Block> blocks;
  };

  std::uint64_t draw(std::uint64_t below) { return random_() % below; }
  std::vector<Block>& blocks(std::uint64_t session) { return open_.at(session).blocks; }

  void check_row(std::uint64_t session, std::uint32_t index, const wire::WaitRow& row) {
    const Block& block = blocks(session).at(index);
    const Entry& entry = objects_[block.object];
    switch (row.state) {
      case BlockState::kReady:
        CHECK(row.length == entry.length);
        CHECK(row.crc32c == entry.crc32c);
        REQUIRE(store_.directory().verify(entry.key, entry.address, entry.generation) != nullptr);
        if (faults_.corrupt_read == 0) {
          CHECK(
              holds(store_.device().region().base + row.region_offset, block.object, entry.length));
        }
        break;
      case BlockState::kMiss:
        CHECK(block.may_miss);
        break;
      case BlockState::kDeviceError:
        CHECK(faults_.fail_read > 0);
        break;
    }
  }

  void prefetch(std::uint64_t session) {
    std::vector<wire::PrefetchRow> rows;
    std::vector<Block> added;
    for (std::uint64_t count = 1 + draw(6); count > 0; --count) {
      Block block{.object = static_cast<std::uint32_t>(draw(kObjects))};
      rows.push_back(row_of(objects_[block.object]));
      block.may_miss = dropped_.contains(block.object);
      if (draw(10) == 0) {
        rows.back().generation += 1;
        block.may_miss = true;
      }
      added.push_back(block);
    }
    const std::uint64_t peer = draw(kPeers);
    // Before the call, which may answer a wait for these.
    const bool is_new = !open_.contains(session);
    Open& open = open_[session];
    if (is_new) open.peer = peer;
    open.blocks.insert(open.blocks.end(), added.begin(), added.end());
    const Result result = table->prefetch(peer,
                                          {.session = session_id(session),
                                           .lease_ms = 600'000,
                                           .count = static_cast<std::uint32_t>(rows.size())},
                                          std::as_bytes(std::span(rows)));
    REQUIRE(result == Result::kOk);
  }

  void wait(std::uint64_t session) {
    Wait wait{.peer = draw(kPeers), .session = session, .first = 0, .count_max = 0};
    const std::uint32_t request_id = ++last_request_id_;
    const bool is_open = open_.contains(session);
    if (is_open) {
      wait.first = static_cast<std::uint32_t>(draw(blocks(session).size() + 2));
      open_.at(session).peer = wait.peer;
    }
    wait.count_max = 1 + static_cast<std::uint32_t>(draw(5));
    waits_[request_id] = wait;
    const bool is_inline = draw(2) == 0;
    const Result result = table->wait(wait.peer, request_id,
                                      {.session = session_id(session),
                                       .first = wait.first,
                                       .count_max = wait.count_max,
                                       .timeout_ms = draw(2) == 0 ? 0u : 600'000u,
                                       .flags = is_inline ? wire::WaitRequest::kInline : 0});
    REQUIRE(result == (is_open ? Result::kOk : Result::kNoSession));
    if (!is_open) waits_.erase(request_id);
  }

  void release(std::uint64_t session) {
    if (!open_.contains(session)) return;
    const auto size = static_cast<std::uint32_t>(blocks(session).size());
    const auto first = static_cast<std::uint32_t>(draw(size + 1));
    const auto count = static_cast<std::uint32_t>(draw(6));
    for (std::uint32_t i = first; i < std::min(size, first + count); ++i) {
      blocks(session)[i].may_miss = true;
    }
    table->release({.session = session_id(session), .first = first, .count = count});
  }

  void send_some(std::uint64_t count) {
    for (; count > 0 && !to_send_.empty(); --count) {
      const auto at = to_send_.begin() + static_cast<std::ptrdiff_t>(draw(to_send_.size()));
      const SessionTable::Answer answer = std::move(*at);
      to_send_.erase(at);
      std::size_t part = 0;  // the bytes were left alone until now
      for (const wire::WaitRow& row : answer.rows) {
        if (row.state != BlockState::kReady) continue;
        const iovec& bytes = answer.bulk[part++];
        if (faults_.corrupt_read > 0) continue;
        CHECK(crc32c(0, bytes.iov_base, bytes.iov_len) == row.crc32c);
      }
      answer.sent();
    }
  }

  void end(std::uint64_t session) {
    table->end(session_id(session));
    forget(session);
  }

  void peer_gone(std::uint64_t peer) {
    table->on_peer_gone(peer);
    for (std::uint64_t session = 0; session < kSessions; ++session) {
      if (open_.contains(session) && open_.at(session).peer == peer) forget(session);
    }
  }

  // All waits of a session have their answer when it is gone.
  void forget(std::uint64_t session) {
    for (const auto& [id, wait] : waits_) CHECK(wait.session != session);
    open_.erase(session);
  }

  void drop(std::uint64_t object) {
    if (!dropped_.insert(object).second) return;
    const Entry& entry = objects_[object];
    for (auto& [id, open] : open_) {
      for (Block& block : open.blocks) block.may_miss |= block.object == object;
    }
    CHECK(store_.directory().drop(entry.key, entry.generation));
  }

  Store& store_;
  const std::vector<Entry> objects_;
  std::mt19937_64 random_;
  const FaultPlan faults_;
  std::map<std::uint64_t, Open> open_;
  std::map<std::uint32_t, Wait> waits_;  // not yet answered
  std::vector<SessionTable::Answer> to_send_;
  std::set<std::uint64_t> dropped_;
  std::uint32_t last_request_id_ = 0;
};

void run(std::uint64_t seed, const FaultPlan& faults) {
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  Store store({.staging_bytes = 512 * kKiB, .faults = faults});
  std::vector<Entry> objects;
  for (std::uint32_t i = 0; i < kObjects; ++i) {
    constexpr std::uint32_t kLengths[] = {1, 4096, 4097, 20'000, 65'536, 200'000, 524'288};
    objects.push_back(store.put(i, kLengths[random() % std::size(kLengths)]));
  }
  store.forget_dram();

  Model model(store, objects, random(), faults);
  std::unique_ptr<SessionTable> table;
  store.call([&] {
    table = std::make_unique<SessionTable>(
        store.loop(), store.device(), store.directory(), SessionLimits{.window_bytes = 300'000},
        [&](SessionTable::Answer answer) { model.take(std::move(answer)); });
    model.table = table.get();
    store.device().on_staged = [&](RequestId request) { table->on_staged(request); };
    store.on_driven = [&] { table->pump(); };
  });
  // Several steps a turn of the loop, so that I/O ends between some and not between others.
  for (int turn = 0; turn < 400; ++turn) {
    store.call([&] {
      for (std::uint64_t steps = random() % 6; steps > 0; --steps) model.step();
      CHECK(store.device().stats().staging_used_bytes <= 512 * kKiB);
    });
  }
  store.call([&] { model.finish(); });
  eventually([&] { return store.device_stats().reads_in_flight == 0; });
  CHECK(store.device_stats().staging_used_bytes == 0);
  CHECK(store.device_stats().live_bytes == 0);  // no slot is pinned, not in the write buffer either
  store.call([&] { table.reset(); });
}

TEST_CASE("session model: healthy device") {
  for (int i = 0; i < 6; ++i) run(test_seed() + i, {});
}

TEST_CASE("session model: reads that fail, reads that take long") {
  for (int i = 0; i < 6; ++i) {
    run(test_seed() + i, {.seed = test_seed(), .fail_read = 0.1, .delay_read = 0.3});
  }
}

TEST_CASE("session model: reads that bring other bytes") {
  run(test_seed(), {.seed = test_seed(), .corrupt_read = 0.3, .delay_read = 0.1});
}

}  // namespace
}  // namespace hymcache::testing
