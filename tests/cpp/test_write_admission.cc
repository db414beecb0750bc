// Offers, grants and commits over a real device: what is refused, at once, and how grants end.
#include <doctest/doctest.h>

#include <random>
#include <set>
#include <string>
#include <vector>

#include "kv_manager/csrc/write_admission.h"
#include "tests/cpp/store_fixture.h"

namespace hymcache::testing {
namespace {

using wire::CommitState;
using wire::OfferState;

constexpr std::uint64_t kPeer = 1;
constexpr std::uint64_t kOther = 2;
constexpr std::uint32_t kBlock = 64 * kKiB;

class Writes {
 public:
  explicit Writes(const StoreOptions& options = {}, Clock::duration lease = kGrantLease)
      : store_(options) {
    store_.call([&] {
      admission_ = std::make_unique<WriteAdmission>(store_.loop(), store_.device(),
                                                    store_.directory(), lease);
    });
  }
  ~Writes() {
    store_.stop();
    admission_.reset();
  }

  Store& store() { return store_; }
  void call(const std::function<void(WriteAdmission&)>& task) {
    store_.call([&] { task(*admission_); });
  }
  wire::OfferReplyRow offer(std::uint64_t number, std::uint32_t length,
                            std::uint64_t peer = kPeer) {
    wire::OfferReplyRow reply;
    call([&](WriteAdmission& admission) {
      reply = admission.offer(peer, /*name_space=*/3,
                              {.key = numbered_key(number), .length = length, .reserved = 0});
    });
    return reply;
  }
  // As a client of shared memory does.
  void write_by_itself(const wire::OfferReplyRow& granted, std::uint64_t number,
                       std::uint32_t length) {
    call([&](WriteAdmission&) {
      fill(store_.device().region().base + granted.region_offset, number, length);
    });
  }
  // As the node does with a WRITE.
  bool begin(const wire::OfferReplyRow& granted, std::uint32_t length, iovec* where,
             std::uint64_t peer = kPeer) {
    bool begun = false;
    call([&](WriteAdmission& admission) {
      begun = admission.begin_write(peer, {.grant = granted.grant, .length = length, .reserved = 0},
                                    where);
    });
    return begun;
  }
  CommitState commit(std::uint64_t grant, bool by_itself, std::uint32_t flags = 0,
                     std::uint64_t peer = kPeer, std::uint32_t crc = 0) {
    CommitState state{};
    call([&](WriteAdmission& admission) {
      state = admission.commit(peer, {.grant = grant, .crc32c = crc, .flags = flags}, by_itself);
    });
    return state;
  }
  WriteStats stats() {
    WriteStats stats;
    call([&](WriteAdmission& admission) { stats = admission.stats(); });
    return stats;
  }
  std::uint64_t refused(OfferState state) {
    return stats().refused[static_cast<std::size_t>(state)];
  }
  std::uint64_t buffer_used() { return store_.device_stats().write_buffer_used_bytes; }

 private:
  Store store_;
  std::unique_ptr<WriteAdmission> admission_;
};

TEST_CASE("writes: what is written and committed is stored, with its checksum and namespace") {
  Writes writes;
  const auto granted = writes.offer(5, kBlock);
  REQUIRE(granted.state == OfferState::kGranted);
  CHECK(granted.region_offset >= writes.store().device().region().read_write_offset);
  writes.write_by_itself(granted, 5, kBlock);
  CHECK(writes.store().stored.empty());
  CHECK(writes.commit(granted.grant, true, wire::CommitRow::kHasCrc, kPeer, 0x1234) ==
        CommitState::kStored);
  REQUIRE(writes.store().stored.size() == 1);
  const Entry& entry = writes.store().stored.front();
  CHECK(entry.key == numbered_key(5));
  CHECK(entry.length == kBlock);
  CHECK(entry.name_space == 3);
  CHECK(entry.crc32c == 0x1234);
  CHECK(entry.flags == (Entry::kValid | Entry::kHasCrc));
  CHECK(writes.stats().committed_bytes == kBlock);
  CHECK(writes.stats().open == 0);
  CHECK(writes.commit(granted.grant, true) == CommitState::kNoGrant);
}

TEST_CASE("writes: nobody stores an object twice") {
  Writes writes;
  const auto granted = writes.offer(1, kBlock);
  REQUIRE(granted.state == OfferState::kGranted);
  CHECK(writes.offer(1, kBlock).state == OfferState::kStored);          // being written
  CHECK(writes.offer(1, kBlock, kOther).state == OfferState::kStored);  // by another
  CHECK(writes.commit(granted.grant, true) == CommitState::kStored);
  CHECK(writes.offer(1, 17).state == OfferState::kStored);
  CHECK(writes.refused(OfferState::kStored) == 3);
  CHECK(writes.stats().granted == 1);
}

TEST_CASE("writes: a full buffer refuses at once, and takes again when a grant ends") {
  Writes writes;
  std::vector<wire::OfferReplyRow> granted;
  for (std::uint64_t i = 0; i < 16; ++i) {
    granted.push_back(writes.offer(i, kBlock));
    REQUIRE(granted.back().state == OfferState::kGranted);
  }
  const TimePoint before = Clock::now();
  CHECK(writes.offer(16, kBlock).state == OfferState::kBufferFull);
  CHECK(Clock::now() - before < std::chrono::seconds(1));
  CHECK(writes.commit(granted[3].grant, true, wire::CommitRow::kAbort) == CommitState::kAborted);
  CHECK(writes.offer(16, kBlock).state == OfferState::kGranted);
  // The key of an aborted write is free, too.
  CHECK(writes.commit(granted[4].grant, true, wire::CommitRow::kAbort) == CommitState::kAborted);
  CHECK(writes.offer(4, kBlock).state == OfferState::kGranted);
  CHECK(writes.stats().aborted == 2);
  CHECK(writes.store().stored.empty());
}

TEST_CASE("writes: a full device refuses") {
  Writes writes({.capacity_bytes = 1u << 20, .segment_bytes = 256 * kKiB});
  std::uint64_t stored = 0;
  wire::OfferReplyRow row;
  eventually([&] {
    row = writes.offer(stored, kBlock);
    if (row.state == OfferState::kGranted) {
      CHECK(writes.commit(row.grant, true) == CommitState::kStored);
      ++stored;
    }
    return row.state == OfferState::kDeviceFull;
  });
  CHECK(stored == 16);
  CHECK(writes.refused(OfferState::kDeviceFull) == 1);
}

TEST_CASE("writes: a directory that is full refuses as a device does, and keeps nothing") {
  Writes writes({.objects_max = 2});
  CHECK(writes.offer(0, kBlock).state == OfferState::kGranted);
  CHECK(writes.offer(1, kBlock).state == OfferState::kGranted);
  CHECK(writes.offer(2, kBlock).state == OfferState::kDeviceFull);
  CHECK(writes.buffer_used() == 2 * kBlock);
}

TEST_CASE("writes: what can never fit, and what has no bytes, is too large") {
  Writes writes;
  CHECK(writes.offer(0, 1024 * kKiB).state == OfferState::kGranted);
  CHECK(writes.offer(1, 1024 * kKiB + 1).state == OfferState::kTooLarge);
  CHECK(writes.offer(2, ~0u).state == OfferState::kTooLarge);
  CHECK(writes.offer(3, 0).state == OfferState::kTooLarge);
  CHECK(writes.refused(OfferState::kTooLarge) == 3);
}

TEST_CASE("writes: a draining node takes no new ones, and finishes what it granted") {
  Writes writes;
  const auto granted = writes.offer(0, kBlock);
  writes.call([](WriteAdmission& admission) { admission.set_draining(true); });
  CHECK(writes.offer(1, kBlock).state == OfferState::kDraining);
  CHECK(writes.offer(0, kBlock).state == OfferState::kStored);
  CHECK(writes.commit(granted.grant, true) == CommitState::kStored);
  writes.call([](WriteAdmission& admission) { admission.set_draining(false); });
  CHECK(writes.offer(1, kBlock).state == OfferState::kGranted);
}

TEST_CASE("writes: a grant is its peer's alone") {
  Writes writes;
  const auto granted = writes.offer(0, kBlock);
  iovec where{};
  CHECK_FALSE(writes.begin(granted, kBlock, &where, kOther));
  CHECK(writes.commit(granted.grant, true, 0, kOther) == CommitState::kNoGrant);
  CHECK(writes.commit(granted.grant, true, wire::CommitRow::kAbort, kOther) ==
        CommitState::kNoGrant);
  CHECK(writes.commit(granted.grant + 1, true) == CommitState::kNoGrant);
  CHECK(writes.commit(0, true) == CommitState::kNoGrant);
  CHECK(writes.commit(~0ull, true) == CommitState::kNoGrant);
  CHECK(writes.commit(granted.grant, true) == CommitState::kStored);
}

TEST_CASE("writes: who has no memory in common must send the bytes first") {
  Writes writes;
  const auto granted = writes.offer(0, kBlock);
  CHECK(writes.commit(granted.grant, false) == CommitState::kNotWritten);
  CHECK(writes.commit(granted.grant, false) == CommitState::kNoGrant);
  CHECK(writes.buffer_used() == 0);

  const auto again = writes.offer(0, kBlock);
  iovec where{};
  CHECK_FALSE(writes.begin(again, kBlock - 1, &where));
  REQUIRE(writes.begin(again, kBlock, &where));
  CHECK(where.iov_len == kBlock);
  iovec second{};
  CHECK_FALSE(writes.begin(again, kBlock, &second));  // one at a time
  writes.call([&](WriteAdmission& admission) {
    fill(static_cast<std::uint8_t*>(where.iov_base), 0, kBlock);
    admission.end_write(again.grant);
  });
  CHECK_FALSE(writes.begin(again, kBlock, &second));  // and only once
  CHECK(writes.commit(again.grant, false) == CommitState::kStored);
}

TEST_CASE("writes: a frame that is thrown away leaves its grants unwritten") {
  Writes writes;
  const auto granted = writes.offer(0, kBlock);
  iovec where{};
  REQUIRE(writes.begin(granted, kBlock, &where));
  writes.call([&](WriteAdmission& admission) { admission.cancel_write(granted.grant); });
  REQUIRE(writes.begin(granted, kBlock, &where));
  writes.call([&](WriteAdmission& admission) {
    admission.cancel_write(granted.grant);
    admission.cancel_write(12345);
    admission.end_write(12345);
  });
  CHECK(writes.commit(granted.grant, false) == CommitState::kNotWritten);
}

TEST_CASE("writes: a peer that goes leaves nothing behind") {
  Writes writes;
  const auto first = writes.offer(0, kBlock);
  const auto second = writes.offer(1, kBlock);
  const auto others = writes.offer(2, kBlock, kOther);
  const auto done = writes.offer(3, kBlock);
  CHECK(writes.commit(done.grant, true) == CommitState::kStored);
  iovec where{};
  REQUIRE(writes.begin(second, kBlock, &where));  // in the middle of it
  writes.call([](WriteAdmission& admission) { admission.on_peer_gone(kPeer); });
  CHECK(writes.commit(first.grant, true) == CommitState::kNoGrant);
  CHECK(writes.commit(others.grant, true, 0, kOther) == CommitState::kStored);
  CHECK(writes.stats().aborted == 2);
  CHECK(writes.stats().open == 0);
  CHECK(writes.offer(0, kBlock).state == OfferState::kGranted);
  CHECK(writes.offer(3, kBlock).state == OfferState::kStored);
}

TEST_CASE("writes: a grant has a lease, and not while its bytes come") {
  Writes writes({}, std::chrono::milliseconds(1));
  const auto idle = writes.offer(0, kBlock);
  const auto busy = writes.offer(1, kBlock);
  iovec where{};
  REQUIRE(writes.begin(busy, kBlock, &where));
  ::usleep(5'000);
  writes.call([](WriteAdmission& admission) { admission.expire(); });
  CHECK(writes.commit(idle.grant, true) == CommitState::kNoGrant);
  CHECK(writes.stats().aborted == 1);
  CHECK(writes.offer(0, kBlock).state == OfferState::kGranted);
  writes.call([&](WriteAdmission& admission) { admission.end_write(busy.grant); });
  CHECK(writes.commit(busy.grant, false) == CommitState::kStored);
}

TEST_CASE("writes: an old grant is not taken for a newer one in its place") {
  Writes writes;
  std::set<std::uint64_t> seen;
  for (std::uint64_t i = 0; i < 100; ++i) {
    const auto granted = writes.offer(i, kBlock);
    REQUIRE(granted.state == OfferState::kGranted);
    CHECK(seen.insert(granted.grant).second);
    for (const std::uint64_t old : seen) {
      if (old == granted.grant) continue;
      REQUIRE(writes.commit(old, true) == CommitState::kNoGrant);
    }
    CHECK(writes.commit(granted.grant, true, wire::CommitRow::kAbort) == CommitState::kAborted);
  }
}

TEST_CASE("writes model: random offers, writes, ends and drops balance") {
  const std::uint64_t seed = test_seed();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  Writes writes({.capacity_bytes = 16u << 20, .segment_bytes = 1u << 20});
  struct Open {
    std::uint64_t grant, number, peer;
    std::uint32_t length;
  };
  std::vector<Open> open;
  std::set<std::uint64_t> pending, stored;
  for (int step = 0; step < 3000; ++step) {
    const std::uint64_t number = random() % 64;
    const auto at =
        open.empty() ? open.end() : open.begin() + static_cast<long>(random() % open.size());
    switch (random() % 5) {
      case 0:
      case 1: {
        const std::uint64_t peer = random() % 3;
        const auto length = static_cast<std::uint32_t>(1 + random() % (200 * kKiB));
        const auto row = writes.offer(number, length, peer);
        const bool known = pending.contains(number) || stored.contains(number);
        CHECK((row.state == OfferState::kStored) == known);
        if (row.state != OfferState::kGranted) break;
        writes.write_by_itself(row, number, length);
        open.push_back({row.grant, number, peer, length});
        pending.insert(number);
        break;
      }
      case 2:
      case 3: {
        if (at == open.end()) break;
        const bool abort = random() % 4 == 0;
        const auto state =
            writes.commit(at->grant, true, abort ? wire::CommitRow::kAbort : 0u, at->peer);
        CHECK(state == (abort ? CommitState::kAborted : CommitState::kStored));
        pending.erase(at->number);
        if (!abort) stored.insert(at->number);
        open.erase(at);
        break;
      }
      default: {
        if (random() % 20 == 0) {
          const std::uint64_t peer = random() % 3;
          writes.call([&](WriteAdmission& admission) { admission.on_peer_gone(peer); });
          std::erase_if(open, [&](const Open& one) {
            if (one.peer == peer) pending.erase(one.number);
            return one.peer == peer;
          });
        } else if (stored.contains(number)) {
          writes.call([&](WriteAdmission&) {
            const Entry entry = *writes.store().directory().find_valid(numbered_key(number));
            CHECK(writes.store().directory().drop(entry.key, entry.generation));
          });
          stored.erase(number);
        }
      }
    }
    REQUIRE(writes.stats().open == open.size());
  }
  writes.call([&](WriteAdmission& admission) {
    for (std::uint64_t peer = 0; peer < 3; ++peer) admission.on_peer_gone(peer);
    CHECK(writes.store().directory().objects() == stored.size());
    for (const std::uint64_t number : stored) {
      const Entry entry = *writes.store().directory().find_valid(numbered_key(number));
      CHECK(writes.store().directory().drop(entry.key, entry.generation));
    }
  });
  eventually([&] { return writes.store().device_stats().writes_in_flight == 0; });
  CHECK(writes.buffer_used() == 0);
  CHECK(writes.store().device_stats().live_bytes == 0);
}

}  // namespace
}  // namespace hymcache::testing
