#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "chm_device/csrc/byte_size.h"
#include "chm_device/csrc/extent_allocator.h"
#include "tests/cpp/device_fixture.h"

namespace hymcache::chm {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;

TEST_CASE("extents: the whole region can be given out, and comes back in one piece") {
  ExtentAllocator allocator(16 * kMiB, 8);
  const auto whole = allocator.allocate(16 * kMiB);
  REQUIRE(whole);
  CHECK(allocator.offset_bytes(*whole) == 0);
  CHECK(allocator.free_bytes() == 0);
  CHECK_FALSE(allocator.allocate(1));
  allocator.release(*whole);

  std::vector<ExtentId> parts;
  for (int i = 0; i < 8; ++i) parts.push_back(allocator.allocate(2 * kMiB).value());
  for (const int i : {1, 3, 5, 7, 0, 2, 4, 6}) allocator.release(parts[static_cast<unsigned>(i)]);
  CHECK(allocator.allocate(16 * kMiB));
}

TEST_CASE("extents: sizes are rounded up to granules") {
  ExtentAllocator allocator(kMiB, 8);
  const auto extent = allocator.allocate(1);
  REQUIRE(extent);
  CHECK(allocator.size_bytes(*extent) == kGranuleBytes);
  CHECK(allocator.used_bytes() == kGranuleBytes);
}

TEST_CASE("extents: no more than asked for at the start") {
  ExtentAllocator allocator(kMiB, 2);
  const auto first = allocator.allocate(kGranuleBytes);
  REQUIRE(first);
  REQUIRE(allocator.allocate(kGranuleBytes));
  CHECK_FALSE(allocator.allocate(kGranuleBytes));
  allocator.release(*first);
  CHECK(allocator.allocate(kGranuleBytes));
}

TEST_CASE("extents: the last hole is found although its size is no bin's floor") {
  constexpr std::uint64_t kOdd = 1031 * kGranuleBytes;
  ExtentAllocator allocator(3 * kOdd, 8);
  std::vector<ExtentId> all;
  for (int i = 0; i < 3; ++i) all.push_back(allocator.allocate(kOdd).value());
  allocator.release(all[1]);
  CHECK(allocator.allocate(kOdd));
}

TEST_CASE("extents: misuse is an error") {
  ExtentAllocator allocator(kMiB, 4);
  CHECK_THROWS_AS(allocator.allocate(0), std::logic_error);
  CHECK_THROWS_AS(allocator.release(3), std::logic_error);
  const ExtentId extent = allocator.allocate(1).value();
  allocator.release(extent);
  CHECK_THROWS_AS(allocator.release(extent), std::logic_error);
  CHECK_THROWS_AS(ExtentAllocator(0, 4), std::logic_error);
  CHECK_THROWS_AS(ExtentAllocator(kGranuleBytes + 1, 4), std::logic_error);
  CHECK_THROWS_AS(ExtentAllocator(kGranuleBytes, 0), std::logic_error);
}

// A model that keeps what is allocated as a map of intervals, and looks for holes one by one.
class Model {
 public:
  explicit Model(std::uint64_t capacity) : capacity_(capacity) {}

  void add(std::uint64_t start, std::uint64_t size) {
    const auto next = used_.lower_bound(start);
    REQUIRE(start + size <= (next == used_.end() ? capacity_ : next->first));
    if (next != used_.begin()) {
      REQUIRE(std::prev(next)->first + std::prev(next)->second <= start);
    }
    used_[start] = size;
  }
  void remove(std::uint64_t start) { used_.erase(start); }

  std::uint64_t largest_hole() const {
    std::uint64_t largest = 0;
    std::uint64_t from = 0;
    for (const auto& [start, size] : used_) {
      largest = std::max(largest, start - from);
      from = start + size;
    }
    return std::max(largest, capacity_ - from);
  }

 private:
  std::uint64_t capacity_;
  std::map<std::uint64_t, std::uint64_t> used_;
};

TEST_CASE("extents: random use agrees with a model") {
  const std::uint64_t seed = testing::test_seed();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  constexpr std::uint64_t kCapacity = 512 * kMiB;
  const std::vector<std::uint64_t> block_sizes{kMiB / 2, kMiB, 16 * kMiB, 24 * kMiB};
  for (const bool odd_sizes : {false, true}) {
    ExtentAllocator allocator(kCapacity, 300);
    Model model(kCapacity);
    std::vector<ExtentId> held;
    for (int step = 0; step < 20'000; ++step) {
      if (!held.empty() && random() % 100 < 48) {
        std::swap(held[random() % held.size()], held.back());
        model.remove(allocator.offset_bytes(held.back()));
        allocator.release(held.back());
        held.pop_back();
        continue;
      }
      const std::uint64_t bytes =
          odd_sizes ? 1 + random() % (8 * kMiB) : block_sizes[random() % block_sizes.size()];
      const auto extent = allocator.allocate(bytes);
      if (!extent) {
        // Good fit: what it may overlook is a hole in the request's own bin, 1/16 wide.
        const std::uint64_t slack = odd_sizes ? bytes / 16 + kGranuleBytes : 0;
        REQUIRE((held.size() == 300 || model.largest_hole() < bytes + slack));
        continue;
      }
      REQUIRE(allocator.size_bytes(*extent) == align_up(bytes, kGranuleBytes));
      model.add(allocator.offset_bytes(*extent), allocator.size_bytes(*extent));
      held.push_back(*extent);
    }
    for (const ExtentId extent : held) allocator.release(extent);
    CHECK(allocator.used_bytes() == 0);
    CHECK(allocator.allocate(kCapacity));
  }
}

TEST_CASE("extents: mixed block sizes, oldest released first, leave a window well used") {
  const std::uint64_t seed = testing::test_seed();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  constexpr std::uint64_t kCapacity = 1024 * kMiB;
  const std::vector<std::uint64_t> sizes{kMiB / 2, kMiB, 16 * kMiB, 24 * kMiB};
  ExtentAllocator allocator(kCapacity, 4096);
  std::vector<ExtentId> held;
  std::size_t oldest = 0;
  double used_least = 1;
  for (int step = 0; step < 20'000; ++step) {
    const std::uint64_t bytes = sizes[random() % sizes.size()];
    auto extent = allocator.allocate(bytes);
    // What stays in use while the oldest make way is what a staging window really holds.
    while (!extent) {
      used_least = std::min(used_least, static_cast<double>(allocator.used_bytes()) / kCapacity);
      allocator.release(held[oldest++]);
      extent = allocator.allocate(bytes);
    }
    held.push_back(*extent);
  }
  CHECK(used_least > 0.75);
}

}  // namespace
}  // namespace hymcache::chm
