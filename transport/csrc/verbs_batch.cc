#include "transport/csrc/verbs_batch.h"

#include <algorithm>

namespace hymcache {
namespace {

constexpr std::uint64_t kPieceBytesMax = 1u << 31;  // a work request's length has 32 bits

}  // namespace

bool VerbsBatch::add_direct(std::span<const Segment> place, std::uint64_t remote_address,
                            std::uint32_t remote_key) {
  const std::size_t before = pieces_.size();
  for (const Segment& segment : place) {
    const auto key = link_.local_key(segment.data, segment.bytes);
    if (!key) {
      pieces_.resize(before);
      return false;
    }
    const auto local = reinterpret_cast<std::uintptr_t>(segment.data);
    for (std::uint64_t at = 0; at < segment.bytes; at += kPieceBytesMax) {
      const std::uint64_t bytes = std::min<std::uint64_t>(kPieceBytesMax, segment.bytes - at);
      pieces_.push_back({.local_address = local + at,
                         .local_key = *key,
                         .remote_address = remote_address,
                         .remote_key = remote_key,
                         .bytes = static_cast<std::uint32_t>(bytes)});
      remote_address += bytes;
    }
  }
  return true;
}

std::size_t VerbsBatch::add_bounced(const LocalMemory& bounce, std::uint32_t block,
                                    std::uint64_t offset, std::uint64_t length,
                                    std::uint64_t remote_address, std::uint32_t remote_key) {
  const std::uint64_t bytes = std::min<std::uint64_t>(length - offset, bounce.bytes - bounce_used_);
  if (bytes == 0) return 0;
  pieces_.push_back({.local_address = reinterpret_cast<std::uintptr_t>(bounce.data) + bounce_used_,
                     .local_key = bounce.key,
                     .remote_address = remote_address + offset,
                     .remote_key = remote_key,
                     .bytes = static_cast<std::uint32_t>(bytes)});
  slices_.push_back(
      {.block = block, .offset = offset, .bounce_offset = bounce_used_, .bytes = bytes});
  bounce_used_ += bytes;
  return bytes;
}

void VerbsBatch::run(VerbsOpcode opcode, TimePoint deadline) {
  if (!pieces_.empty()) link_.transfer(opcode, pieces_, deadline);
}

void VerbsBatch::clear() noexcept {
  pieces_.clear();
  slices_.clear();
  bounce_used_ = 0;
}

std::vector<Segment> slice_segments(std::span<const Segment> place, std::uint64_t offset,
                                    std::uint64_t bytes) {
  std::vector<Segment> slice;
  for (const Segment& segment : place) {
    if (bytes == 0) break;
    if (offset >= segment.bytes) {
      offset -= segment.bytes;
      continue;
    }
    const std::uint64_t step = std::min<std::uint64_t>(bytes, segment.bytes - offset);
    slice.push_back({.data = static_cast<std::byte*>(segment.data) + offset, .bytes = step});
    bytes -= step;
    offset = 0;
  }
  return slice;
}

}  // namespace hymcache
