// The streaming copies: what they write, what they leave alone, and the checksum they return.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string_view>
#include <vector>

#include "transport/csrc/copy.h"
#include "transport/csrc/crc32c.h"

namespace {

using hymcache::copy_kernels;
using hymcache::CopyKernel;
using hymcache::kNonTemporalMin;
using hymcache::Segment;

constexpr std::uint8_t kUntouched = 0xA5;
constexpr std::size_t kMargin = 256;  // watched on both sides of a destination

std::vector<std::uint8_t> random_bytes(std::mt19937_64& random, std::size_t bytes) {
  std::vector<std::uint8_t> data(bytes);
  for (std::size_t i = 0; i + 8 <= bytes; i += 8) {
    const std::uint64_t word = random();
    std::memcpy(&data[i], &word, sizeof word);
  }
  return data;
}

bool untouched(const std::uint8_t* from, const std::uint8_t* to) {
  for (; from < to; ++from) {
    if (*from != kUntouched) return false;
  }
  return true;
}

// Copies data[source, source + bytes) to a destination at `shift` past an alignment of 64 both
// ways, with and without a checksum, and looks at every byte in and around it.
void check_copy(const CopyKernel& kernel, const std::vector<std::uint8_t>& data, std::size_t source,
                std::size_t shift, std::size_t bytes) {
  CAPTURE(kernel.name);
  CAPTURE(source);
  CAPTURE(shift);
  CAPTURE(bytes);
  for (const bool with_crc : {false, true}) {
    std::vector<std::uint8_t> arena(bytes + 2 * kMargin + 64, kUntouched);
    auto* aligned = arena.data() + (0 - reinterpret_cast<std::uintptr_t>(arena.data())) % 64;
    std::uint8_t* to = aligned + kMargin / 2 + shift;
    const std::uint8_t* from = data.data() + source;
    if (with_crc) {
      REQUIRE(hymcache::copy_crc32c(to, from, bytes, 77, kernel) ==
              hymcache::crc32c(77, from, bytes));
    } else {
      hymcache::copy_bytes(to, from, bytes, kernel);
    }
    REQUIRE((bytes == 0 || std::memcmp(to, from, bytes) == 0));
    REQUIRE(untouched(arena.data(), to));
    REQUIRE(untouched(to + bytes, arena.data() + arena.size()));
  }
}

std::vector<Segment> random_segments(std::mt19937_64& random, std::vector<std::uint8_t>& arena,
                                     std::size_t bytes_each_max) {
  std::vector<Segment> segments;
  for (std::size_t at = random() % 100; at < arena.size();) {
    const std::size_t bytes = std::min(arena.size() - at, random() % (bytes_each_max + 1));
    segments.push_back({arena.data() + at, bytes});
    at += bytes + random() % 200;  // a hole that stays as it is
  }
  return segments;
}

}  // namespace

TEST_CASE("copy: the portable kernel is always there, and last") {
  CHECK(std::string_view(copy_kernels().back().name) == "memcpy");
  CHECK(std::string_view(copy_kernels().front().name) == hymcache::copy_implementation());
}

TEST_CASE("copy: kernels stream any length to any alignment") {
  std::mt19937_64 random(2);
  const auto data = random_bytes(random, 4096);
  for (const CopyKernel& kernel : copy_kernels()) {
    CAPTURE(kernel.name);
    for (std::size_t bytes = 0; bytes < 700; ++bytes) {
      CAPTURE(bytes);
      const std::size_t shift = (bytes * 7) % 64;
      std::vector<std::uint8_t> arena(bytes + 2 * kMargin, kUntouched);
      std::uint8_t* to = arena.data() + 64 + shift;
      const auto* from = data.data() + bytes % 61;
      const auto crc = kernel.stream_crc32c(reinterpret_cast<std::byte*>(to),
                                            reinterpret_cast<const std::byte*>(from), bytes, 5);
      kernel.fence();
      REQUIRE(crc == hymcache::crc32c(5, from, bytes));
      REQUIRE((bytes == 0 || std::memcmp(to, from, bytes) == 0));
      REQUIRE(untouched(arena.data(), to));
      REQUIRE(untouched(to + bytes, arena.data() + arena.size()));
      std::memset(to, 0, bytes);
      kernel.stream(reinterpret_cast<std::byte*>(to), reinterpret_cast<const std::byte*>(from),
                    bytes);
      kernel.fence();
      REQUIRE((bytes == 0 || std::memcmp(to, from, bytes) == 0));
      REQUIRE(untouched(to + bytes, arena.data() + arena.size()));
    }
  }
}

TEST_CASE("copy: around and above the length where streaming starts") {
  const std::uint64_t seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  const auto data = random_bytes(random, 2 * kNonTemporalMin);
  for (const CopyKernel& kernel : copy_kernels()) {
    for (std::size_t delta = 0; delta < 3; ++delta) {
      check_copy(kernel, data, 0, 0, kNonTemporalMin - 1 + delta);
      check_copy(kernel, data, 1, 63, kNonTemporalMin - 1 + delta);
    }
    for (int round = 0; round < 20; ++round) {
      const std::size_t source = random() % 100;
      check_copy(kernel, data, source, random() % 64, random() % (data.size() - source));
    }
  }
}

TEST_CASE("copy: scatter and gather are inverse, keep the holes and checksum the bytes in order") {
  const std::uint64_t seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  for (const CopyKernel& kernel : copy_kernels()) {
    CAPTURE(kernel.name);
    for (const std::size_t arena_bytes : {std::size_t{3000}, kNonTemporalMin + 100'000}) {
      for (const std::size_t bytes_each_max : {std::size_t{300}, std::size_t{70'000}}) {
        std::vector<std::uint8_t> arena(arena_bytes, kUntouched);
        const auto segments = random_segments(random, arena, bytes_each_max);
        std::size_t total = 0;
        for (const Segment& segment : segments) total += segment.bytes;
        const auto data = random_bytes(random, total);

        std::uint32_t crc = 9;
        hymcache::copy_scatter(segments, data.data(), &crc, kernel);
        CHECK(crc == hymcache::crc32c(9, data.data(), total));
        const std::uint8_t* hole = arena.data();
        std::size_t at = 0;
        for (const Segment& segment : segments) {
          auto* begin = static_cast<std::uint8_t*>(segment.data);
          REQUIRE(std::equal(begin, begin + segment.bytes, data.begin() + at));
          REQUIRE(untouched(hole, begin));
          hole = begin + segment.bytes;
          at += segment.bytes;
        }

        std::vector<std::uint8_t> back(total + 1, kUntouched);
        crc = 9;
        hymcache::copy_gather(back.data(), segments, &crc, kernel);
        CHECK(crc == hymcache::crc32c(9, data.data(), total));
        CHECK(std::equal(data.begin(), data.end(), back.begin()));
        CHECK(back.back() == kUntouched);

        std::vector<std::uint8_t> same(total);
        hymcache::copy_gather(same.data(), segments, nullptr, kernel);
        CHECK(same == data);
        std::fill(arena.begin(), arena.end(), kUntouched);
        hymcache::copy_scatter(segments, data.data(), nullptr, kernel);
        hymcache::copy_gather(same.data(), segments, nullptr, kernel);
        CHECK(same == data);
      }
    }
  }
}

TEST_CASE("copy: nothing to copy is nothing done") {
  hymcache::copy_bytes(nullptr, nullptr, 0);
  CHECK(hymcache::copy_crc32c(nullptr, nullptr, 0, 42) == 42);
  std::uint32_t crc = 42;
  hymcache::copy_scatter({}, nullptr, &crc);
  hymcache::copy_gather(nullptr, {}, &crc);
  CHECK(crc == 42);
}
