// A session table over a real device, and the answers that it has given.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "kv_manager/csrc/session_table.h"
#include "tests/cpp/store_fixture.h"

namespace hymcache::testing {

using SessionResult = SessionTable::Result;
inline constexpr std::uint64_t kPeer = 1;
inline constexpr std::uint32_t kBlock = 64 * kKiB;

inline wire::SessionId session_id(std::uint64_t number) {
  wire::SessionId id{};
  std::memcpy(id.data(), &number, sizeof number);
  return id;
}

inline wire::PrefetchRow row_of(const Entry& entry) {
  return {.key = entry.key,
          .address = entry.address,
          .generation = entry.generation,
          .length = entry.length,
          .reserved = 0};
}

class Sessions {
 public:
  struct Answered {
    SessionTable::Answer answer;
    std::vector<std::vector<std::uint8_t>> bytes;  // of the rows that are ready
  };

  explicit Sessions(const StoreOptions& options = {}, const SessionLimits& limits = {})
      : store_(options) {
    store_.call([&] {
      table_ = std::make_unique<SessionTable>(
          store_.loop(), store_.device(), store_.directory(), limits,
          [this](SessionTable::Answer answer) { take(std::move(answer)); });
      store_.device().on_staged = [this](RequestId request) { table_->on_staged(request); };
      store_.on_driven = [this] { table_->pump(); };
    });
  }
  ~Sessions() {
    store_.stop();
    for (Answered& answered : answers_) answered.answer.sent = nullptr;
    table_.reset();
  }

  Store& store() { return store_; }
  // Objects first, first + 1, ... with nothing of them in DRAM.
  std::vector<Entry> on_device(std::uint64_t first, std::uint32_t count, std::uint32_t length) {
    std::vector<Entry> entries;
    for (std::uint32_t i = 0; i < count; ++i) entries.push_back(store_.put(first + i, length));
    store_.forget_dram();
    return entries;
  }

  template <class T>
  T ask(const std::function<T(SessionTable&)>& question) {
    return store_.ask<T>([&] { return question(*table_); });
  }
  void call(const std::function<void(SessionTable&)>& task) {
    store_.call([&] { task(*table_); });
  }
  SessionResult prefetch(std::uint64_t session, const std::vector<wire::PrefetchRow>& rows,
                         std::uint64_t peer = kPeer, std::uint32_t lease_ms = 60'000) {
    return ask<SessionResult>([&](SessionTable& table) {
      return table.prefetch(peer,
                            {.session = session_id(session),
                             .lease_ms = lease_ms,
                             .count = static_cast<std::uint32_t>(rows.size())},
                            std::as_bytes(std::span(rows)));
    });
  }
  SessionResult prefetch(std::uint64_t session, const std::vector<Entry>& entries,
                         std::uint64_t peer = kPeer, std::uint32_t lease_ms = 60'000) {
    std::vector<wire::PrefetchRow> rows;
    for (const Entry& entry : entries) rows.push_back(row_of(entry));
    return prefetch(session, rows, peer, lease_ms);
  }
  SessionResult wait(std::uint64_t session, std::uint32_t request_id, std::uint32_t first,
                     std::uint32_t count_max = 256, std::uint32_t flags = 0,
                     std::uint64_t peer = kPeer, std::uint32_t timeout_ms = 20'000) {
    return ask<SessionResult>([&](SessionTable& table) {
      return table.wait(peer, request_id,
                        {.session = session_id(session),
                         .first = first,
                         .count_max = count_max,
                         .timeout_ms = timeout_ms,
                         .flags = flags});
    });
  }
  void release(std::uint64_t session, std::uint32_t first, std::uint32_t count) {
    call([&](SessionTable& table) {
      table.release({.session = session_id(session), .first = first, .count = count});
    });
  }
  void end(std::uint64_t session) {
    call([&](SessionTable& table) { table.end(session_id(session)); });
  }
  SessionStats stats() {
    return ask<SessionStats>([](SessionTable& table) { return table.stats(); });
  }

  std::size_t answers() {
    return store_.ask<std::size_t>([&] { return answers_.size(); });
  }
  // The only answer so far to this request.
  Answered answer(std::uint32_t request_id) {
    Answered found;
    eventually([&] {
      return store_.ask<bool>([&] {
        const auto at = std::find_if(answers_.begin(), answers_.end(), [&](const Answered& a) {
          return a.answer.request_id == request_id;
        });
        if (at == answers_.end()) return false;
        found = *at;
        return true;
      });
    });
    return found;
  }
  // WAIT, and what it says about its blocks: they must have the contents of their numbers.
  std::vector<wire::WaitRow> read(std::uint64_t session, std::uint32_t request_id,
                                  std::uint32_t first, std::uint32_t count_max = 256) {
    REQUIRE(wait(session, request_id, first, count_max) == SessionResult::kOk);
    return answer(request_id).answer.rows;
  }
  // Until so many blocks of the session are staged and no I/O runs.
  void settle() {
    eventually([&] {
      return store_.ask<bool>([&] { return store_.device().stats().reads_in_flight == 0; });
    });
  }
  std::uint64_t staged_bytes() { return store_.device_stats().staging_used_bytes; }

 private:
  void take(SessionTable::Answer answer) {
    Answered answered{.answer = std::move(answer), .bytes = {}};
    for (const wire::WaitRow& row : answered.answer.rows) {
      if (row.state != wire::BlockState::kReady) continue;
      const std::uint8_t* const from = store_.device().region().base + row.region_offset;
      answered.bytes.emplace_back(from, from + row.length);
    }
    answers_.push_back(std::move(answered));
  }

  Store store_;
  std::unique_ptr<SessionTable> table_;
  std::vector<Answered> answers_;
};

inline bool holds_object(const std::vector<std::uint8_t>& bytes, std::uint64_t number) {
  return holds(bytes.data(), number, static_cast<std::uint32_t>(bytes.size()));
}

}  // namespace hymcache::testing
