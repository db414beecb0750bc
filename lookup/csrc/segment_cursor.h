// Segments of memory, taken a step at a time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "transport/csrc/copy.h"

namespace hymcache::region {

inline std::uint64_t bytes_of(std::span<const Segment> segments) noexcept {
  std::uint64_t bytes = 0;
  for (const Segment& segment : segments) bytes += segment.bytes;
  return bytes;
}

class SegmentCursor {
 public:
  explicit SegmentCursor(std::span<const Segment> segments) : segments_(segments) {}

  // The next bytes_max bytes, or what is left; empty at the end. Valid until the next call.
  std::span<const Segment> take(std::size_t bytes_max) {
    taken_.clear();
    while (bytes_max > 0 && index_ < segments_.size()) {
      const Segment& segment = segments_[index_];
      const std::size_t bytes = std::min(bytes_max, segment.bytes - at_);
      if (bytes > 0) taken_.push_back({static_cast<std::byte*>(segment.data) + at_, bytes});
      bytes_max -= bytes;
      at_ += bytes;
      if (at_ == segment.bytes) {
        ++index_;
        at_ = 0;
      }
    }
    return taken_;
  }

 private:
  std::span<const Segment> segments_;
  std::vector<Segment> taken_;
  std::size_t index_ = 0;
  std::size_t at_ = 0;
};

}  // namespace hymcache::region
