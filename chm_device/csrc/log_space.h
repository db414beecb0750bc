// A device's address space as a log.
//
// The space is cut into segments. Objects are appended to the one open segment; when the next does
// not fit, the segment is sealed and a free one is opened. Nothing is ever rewritten in place: a
// segment is free again only when all that was appended to it is dead. Eviction therefore works by
// whole segments, and a segment's directory describes one pass over it.
//
//   free -> open -> sealed -> free (its last live byte died)
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace hymcache::chm {

class LogSpace {
 public:
  enum class SegmentState : std::uint8_t { kFree, kOpen, kSealed };

  struct Segment {
    SegmentState state = SegmentState::kFree;
    std::uint64_t appended_bytes = 0;  // the next object goes here; dead ones included
    std::uint64_t live_bytes = 0;
  };

  // Segments are `segment_bytes` long, a multiple of the granule; what is left of `capacity_bytes`
  // after the last whole one is not used.
  LogSpace(std::uint64_t capacity_bytes, std::uint64_t segment_bytes);

  // Segments for a capacity: 1 GiB or a little less, at least eight of them, but none below 64 MiB
  // unless the whole device is.
  static std::uint64_t default_segment_bytes(std::uint64_t capacity_bytes);

  // Sizes are padded to granules. An object never crosses a segment's end.
  bool fits(std::uint32_t length) const;
  // None: the device is full.
  std::optional<std::uint64_t> allocate(std::uint32_t length);
  // The bytes are dead. Exactly once for what allocate() gave.
  void release(std::uint64_t address, std::uint32_t length);

  // Whether `length` bytes at `address` could be an object: aligned, in one segment, appended.
  bool contains(std::uint64_t address, std::uint32_t length) const;

  std::uint64_t capacity_bytes() const noexcept { return segments_.size() * segment_bytes_; }
  std::uint64_t segment_bytes() const noexcept { return segment_bytes_; }
  std::uint64_t live_bytes() const noexcept { return live_bytes_; }
  // Not free for the next object: live, dead, or the tail of a sealed segment.
  std::uint64_t used_bytes() const noexcept;
  const std::vector<Segment>& segments() const noexcept { return segments_; }

 private:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  std::uint64_t room_bytes() const;
  void seal_open();
  void push_free(std::uint32_t segment);

  std::uint64_t segment_bytes_;
  std::vector<Segment> segments_;
  // Free segments, first freed first opened, so that all of a device wears alike.
  std::vector<std::uint32_t> free_ring_;
  std::size_t free_first_ = 0;
  std::size_t free_count_ = 0;
  std::uint32_t open_ = kNone;
  std::uint64_t live_bytes_ = 0;
};

}  // namespace hymcache::chm
