// Divides a region into extents of any size, in constant time and without touching the heap.
//
// Free extents stand in bins by size; a bin's width is at most 1/16 of its sizes, so 512 KiB, 1, 16
// and 24 MiB each have a bin whose floor they are. An extent knows its neighbours in the region,
// so what is released coalesces at once: two free extents are never adjacent.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

namespace hymcache::chm {

using ExtentId = std::uint32_t;

class ExtentAllocator {
 public:
  // `capacity_bytes` is a multiple of the granule, not 0, below 16 TiB. At most `extents_max`
  // extents are allocated at a time.
  ExtentAllocator(std::uint64_t capacity_bytes, std::uint32_t extents_max);

  // Rounds up to whole granules. None when no free extent is long enough, or extents_max are out.
  std::optional<ExtentId> allocate(std::uint64_t bytes);
  void release(ExtentId extent);

  std::uint64_t offset_bytes(ExtentId extent) const;
  std::uint64_t size_bytes(ExtentId extent) const;
  std::uint64_t used_bytes() const noexcept;
  std::uint64_t free_bytes() const noexcept;
  std::uint32_t allocated() const noexcept { return allocated_; }

 private:
  static constexpr ExtentId kNone = ~ExtentId{0};
  static constexpr unsigned kSplitBits = 4;  // bins a power of two: 16
  static constexpr unsigned kBins = 512;
  // Extents of its own bin that a request looks at before it takes a longer one.
  static constexpr unsigned kProbesMax = 16;

  struct Extent {
    std::uint32_t start = 0;  // granules
    std::uint32_t size = 0;   // granules
    ExtentId left = kNone;    // neighbours in the region
    ExtentId right = kNone;
    ExtentId previous = kNone;  // in its bin, while free; `next` also chains unused records
    ExtentId next = kNone;
    bool is_free = false;
  };

  static unsigned bin_of(std::uint32_t granules);
  ExtentId find_free(std::uint32_t granules) const;
  void push_bin(ExtentId id);
  void unlink_bin(ExtentId id);
  void split(ExtentId id, std::uint32_t granules);
  void absorb_right(ExtentId id);
  ExtentId take_record();
  void give_record(ExtentId id);
  const Extent& allocated_extent(ExtentId id) const;

  std::vector<Extent> extents_;
  std::array<ExtentId, kBins> bins_{};
  std::array<std::uint64_t, kBins / 64> nonempty_{};  // a bit a bin
  ExtentId unused_ = kNone;
  std::uint32_t extents_max_ = 0;
  std::uint32_t allocated_ = 0;
  std::uint64_t capacity_granules_ = 0;
  std::uint64_t used_granules_ = 0;
};

}  // namespace hymcache::chm
