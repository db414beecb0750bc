#include "chm_device/csrc/log_space.h"

#include <algorithm>
#include <stdexcept>

#include "chm_device/csrc/byte_size.h"

namespace hymcache::chm {

LogSpace::LogSpace(std::uint64_t capacity_bytes, std::uint64_t segment_bytes)
    : segment_bytes_(segment_bytes) {
  if (segment_bytes == 0 || segment_bytes % kGranuleBytes != 0 || capacity_bytes < segment_bytes ||
      capacity_bytes / segment_bytes >= kNone) {
    throw std::logic_error("LogSpace: size out of range");
  }
  segments_.resize(capacity_bytes / segment_bytes);
  free_ring_.resize(segments_.size());
  for (std::uint32_t segment = 0; segment < segments_.size(); ++segment) push_free(segment);
}

std::uint64_t LogSpace::default_segment_bytes(std::uint64_t capacity_bytes) {
  constexpr std::uint64_t kSegmentBytesMax = std::uint64_t{1} << 30;
  constexpr std::uint64_t kSegmentBytesMin = std::uint64_t{64} << 20;
  constexpr std::uint64_t kSegmentsMin = 8;
  constexpr std::uint64_t kAlignment = std::uint64_t{2} << 20;
  const std::uint64_t whole = align_down(capacity_bytes, kGranuleBytes);
  const std::uint64_t count =
      std::max(kSegmentsMin, align_up(whole, kSegmentBytesMax) / kSegmentBytesMax);
  return std::max(align_down(whole / count, kAlignment), std::min(kSegmentBytesMin, whole));
}

std::uint64_t LogSpace::room_bytes() const {
  return open_ == kNone ? 0 : segment_bytes_ - segments_[open_].appended_bytes;
}

bool LogSpace::fits(std::uint32_t length) const {
  const std::uint64_t bytes = padded(length);
  if (bytes > segment_bytes_) return false;
  // An open segment without a live byte is as good as a free one: it is sealed and opened again.
  return bytes <= room_bytes() || free_count_ > 0 ||
         (open_ != kNone && segments_[open_].live_bytes == 0);
}

std::optional<std::uint64_t> LogSpace::allocate(std::uint32_t length) {
  const std::uint64_t bytes = padded(length);
  if (bytes == 0) throw std::logic_error("LogSpace: an object of 0 bytes");
  if (!fits(length)) return {};
  if (bytes > room_bytes()) {
    seal_open();
    open_ = free_ring_[free_first_];
    free_first_ = (free_first_ + 1) % free_ring_.size();
    --free_count_;
    segments_[open_].state = SegmentState::kOpen;
  }
  Segment& segment = segments_[open_];
  const std::uint64_t address = open_ * segment_bytes_ + segment.appended_bytes;
  segment.appended_bytes += bytes;
  segment.live_bytes += bytes;
  live_bytes_ += bytes;
  return address;
}

bool LogSpace::contains(std::uint64_t address, std::uint32_t length) const {
  if (length == 0 || address % kGranuleBytes != 0 || address >= capacity_bytes()) return false;
  return address % segment_bytes_ + padded(length) <=
         segments_[address / segment_bytes_].appended_bytes;
}

void LogSpace::release(std::uint64_t address, std::uint32_t length) {
  if (!contains(address, length)) throw std::logic_error("LogSpace: not an address in use");
  const auto index = static_cast<std::uint32_t>(address / segment_bytes_);
  const std::uint64_t bytes = padded(length);
  Segment& segment = segments_[index];
  if (bytes > segment.live_bytes) throw std::logic_error("LogSpace: an address released twice");
  segment.live_bytes -= bytes;
  live_bytes_ -= bytes;
  if (segment.live_bytes == 0 && segment.state == SegmentState::kSealed) push_free(index);
}

std::uint64_t LogSpace::used_bytes() const noexcept {
  return capacity_bytes() - free_count_ * segment_bytes_ - room_bytes();
}

void LogSpace::seal_open() {
  if (open_ == kNone) return;
  segments_[open_].state = SegmentState::kSealed;
  if (segments_[open_].live_bytes == 0) push_free(open_);
  open_ = kNone;
}

void LogSpace::push_free(std::uint32_t segment) {
  segments_[segment] = Segment{};
  free_ring_[(free_first_ + free_count_) % free_ring_.size()] = segment;
  ++free_count_;
}

}  // namespace hymcache::chm
