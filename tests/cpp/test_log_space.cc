#include <doctest/doctest.h>

#include <random>
#include <vector>

#include "chm_device/csrc/byte_size.h"
#include "chm_device/csrc/log_space.h"
#include "tests/cpp/device_fixture.h"

namespace hymcache::chm {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;
constexpr std::uint64_t kGiB = 1 << 30;
constexpr std::uint32_t k256K = 256 << 10;

using State = LogSpace::SegmentState;

TEST_CASE("log: objects follow each other and never cross a segment's end") {
  LogSpace log(2 * kMiB, kMiB);
  CHECK(log.allocate(1) == 0);
  CHECK(log.allocate(4097) == kGranuleBytes);
  CHECK(log.allocate(900 << 10) == 3 * kGranuleBytes);
  // 112 KiB are left: this one opens the second segment.
  CHECK(log.allocate(k256K) == kMiB);
  CHECK(log.segments()[0].state == State::kSealed);
  CHECK(log.segments()[1].state == State::kOpen);
  CHECK(log.used_bytes() == kMiB + k256K);
  CHECK(log.live_bytes() == 3 * kGranuleBytes + (900 << 10) + k256K);
}

TEST_CASE("log: a segment is free again when its last live byte died") {
  LogSpace log(2 * kMiB, kMiB);
  std::vector<std::uint64_t> addresses;
  for (int i = 0; i < 8; ++i) addresses.push_back(log.allocate(k256K).value());
  CHECK_FALSE(log.fits(1));
  CHECK_FALSE(log.allocate(1));
  for (int i = 0; i < 3; ++i) log.release(addresses[static_cast<unsigned>(i)], k256K);
  CHECK_FALSE(log.allocate(1));  // dead bytes are not free bytes
  log.release(addresses[3], k256K);
  CHECK(log.used_bytes() == kMiB);
  CHECK(log.allocate(k256K) == 0);
}

TEST_CASE("log: an open segment without a live byte is as good as a free one") {
  LogSpace log(kMiB, kMiB);
  const std::uint64_t address = log.allocate(1 << 20).value();
  CHECK_FALSE(log.fits(1));
  log.release(address, 1 << 20);
  CHECK(log.fits(1));
  CHECK(log.allocate(1) == 0);
}

TEST_CASE("log: free segments take turns") {
  LogSpace log(4 * kMiB, kMiB);
  std::vector<std::uint64_t> segments;
  for (int i = 0; i < 8; ++i) {
    const std::uint64_t address = log.allocate(1 << 20).value();
    segments.push_back(address / kMiB);
    log.release(address, 1 << 20);
  }
  CHECK(segments == std::vector<std::uint64_t>{0, 1, 2, 3, 0, 1, 2, 3});
}

TEST_CASE("log: misuse is an error") {
  LogSpace log(2 * kMiB, kMiB);
  CHECK_FALSE(log.fits(kMiB + 1));
  CHECK_THROWS_AS(log.allocate(0), std::logic_error);
  CHECK_THROWS_AS(log.release(0, 4096), std::logic_error);
  const std::uint64_t address = log.allocate(4096).value();
  CHECK_THROWS_AS(log.release(address + 1, 4095), std::logic_error);
  CHECK_THROWS_AS(log.release(address, 4097), std::logic_error);
  CHECK_THROWS_AS(log.release(~std::uint64_t{0} - 4095, 4096), std::logic_error);
  log.release(address, 4096);
  CHECK_THROWS_AS(log.release(address, 4096), std::logic_error);
  CHECK_THROWS_AS(LogSpace(kMiB, 2 * kMiB), std::logic_error);
  CHECK_THROWS_AS(LogSpace(kMiB, 100), std::logic_error);
}

TEST_CASE("log: segments suit the capacity") {
  CHECK(LogSpace::default_segment_bytes(kMiB) == kMiB);
  CHECK(LogSpace::default_segment_bytes(64 * kMiB) == 64 * kMiB);
  CHECK(LogSpace::default_segment_bytes(256 * kMiB) == 64 * kMiB);
  CHECK(LogSpace::default_segment_bytes(kGiB) == 128 * kMiB);
  CHECK(LogSpace::default_segment_bytes(8 * kGiB) == kGiB);
  CHECK(LogSpace::default_segment_bytes(100 * kGiB) == kGiB);
  for (std::uint64_t capacity = 512 * kMiB; capacity < 40 * kGiB; capacity += 1234567 * 4096ull) {
    const std::uint64_t segment = LogSpace::default_segment_bytes(capacity);
    CAPTURE(capacity);
    CHECK(segment <= kGiB);
    CHECK(segment % (2 * kMiB) == 0);
    CHECK(capacity % segment < capacity / 20);
  }
}

TEST_CASE("log: random use agrees with a model") {
  const std::uint64_t seed = testing::test_seed();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  constexpr std::uint64_t kSegment = 256 << 10;
  constexpr std::uint64_t kSegments = 16;
  struct Object {
    std::uint64_t address;
    std::uint32_t length;
  };
  LogSpace log(kSegments * kSegment, kSegment);
  std::vector<Object> live;
  std::vector<bool> taken(kSegments * kSegment / kGranuleBytes);  // by live objects
  std::uint64_t live_bytes = 0;
  const auto mark = [&](const Object& object, bool is_taken) {
    const std::uint64_t first = object.address / kGranuleBytes;
    for (std::uint64_t i = first; i < first + padded(object.length) / kGranuleBytes; ++i) {
      REQUIRE(taken[i] != is_taken);
      taken[i] = is_taken;
    }
  };
  std::uint64_t refused = 0;
  for (int step = 0; step < 50'000; ++step) {
    if (!live.empty() && random() % 100 < 49) {
      std::swap(live[random() % live.size()], live.back());
      mark(live.back(), false);
      live_bytes -= padded(live.back().length);
      log.release(live.back().address, live.back().length);
      live.pop_back();
    } else {
      const auto length = static_cast<std::uint32_t>(1 + random() % (96 << 10));
      const bool fits = log.fits(length);
      const auto address = log.allocate(length);
      REQUIRE(address.has_value() == fits);
      if (!address) {
        ++refused;
        continue;
      }
      REQUIRE(*address / kSegment == (*address + padded(length) - 1) / kSegment);
      REQUIRE(log.contains(*address, length));
      live.push_back({*address, length});
      mark(live.back(), true);
      live_bytes += padded(length);
    }
    REQUIRE(log.live_bytes() == live_bytes);
    REQUIRE(log.used_bytes() >= live_bytes);
    REQUIRE(log.used_bytes() <= log.capacity_bytes());
  }
  CHECK(refused > 0);
  for (const Object& object : live) log.release(object.address, object.length);
  CHECK(log.live_bytes() == 0);
  CHECK(log.used_bytes() <= kSegment);
}

}  // namespace
}  // namespace hymcache::chm
