#include "chm_device/csrc/extent_allocator.h"

#include <bit>
#include <stdexcept>

#include "chm_device/csrc/byte_size.h"

namespace hymcache::chm {

ExtentAllocator::ExtentAllocator(std::uint64_t capacity_bytes, std::uint32_t extents_max)
    : extents_max_(extents_max), capacity_granules_(capacity_bytes / kGranuleBytes) {
  if (capacity_granules_ == 0 || capacity_bytes % kGranuleBytes != 0 ||
      capacity_granules_ > UINT32_MAX || extents_max == 0 || extents_max > UINT32_MAX / 4) {
    throw std::logic_error("ExtentAllocator: size out of range");
  }
  // Free extents are never adjacent, so there is at most one more of them than allocated ones.
  const std::uint32_t records = 2 * extents_max + 1;
  extents_.resize(records);
  for (ExtentId id = records; id-- > 0;) give_record(id);
  bins_.fill(kNone);

  const ExtentId whole = take_record();
  extents_[whole].size = static_cast<std::uint32_t>(capacity_granules_);
  push_bin(whole);
}

unsigned ExtentAllocator::bin_of(std::uint32_t granules) {
  constexpr std::uint32_t kLinear = 1u << kSplitBits;
  if (granules < kLinear) return granules;
  const unsigned exponent = static_cast<unsigned>(std::bit_width(granules)) - 1;
  const unsigned part = (granules >> (exponent - kSplitBits)) & (kLinear - 1);
  return (exponent - kSplitBits + 1) * kLinear + part;
}

ExtentId ExtentAllocator::find_free(std::uint32_t granules) const {
  const unsigned bin = bin_of(granules);
  ExtentId id = bins_[bin];
  for (unsigned probe = 0; id != kNone && probe < kProbesMax; ++probe, id = extents_[id].next) {
    if (extents_[id].size >= granules) return id;
  }
  // Whatever stands in a higher bin is long enough.
  const unsigned from = bin + 1;
  for (unsigned word = from / 64; word < nonempty_.size(); ++word) {
    std::uint64_t bits = nonempty_[word];
    if (word == from / 64) bits &= ~std::uint64_t{0} << (from % 64);
    if (bits != 0) return bins_[word * 64 + static_cast<unsigned>(std::countr_zero(bits))];
  }
  return kNone;
}

std::optional<ExtentId> ExtentAllocator::allocate(std::uint64_t bytes) {
  const std::uint64_t granules = align_up(bytes, kGranuleBytes) / kGranuleBytes;
  if (granules == 0) throw std::logic_error("ExtentAllocator: an extent of 0 bytes");
  if (allocated_ == extents_max_ || granules > capacity_granules_ - used_granules_) return {};
  const ExtentId id = find_free(static_cast<std::uint32_t>(granules));
  if (id == kNone) return {};
  unlink_bin(id);
  split(id, static_cast<std::uint32_t>(granules));
  ++allocated_;
  used_granules_ += granules;
  return id;
}

void ExtentAllocator::release(ExtentId extent) {
  ExtentId id = extent;
  used_granules_ -= allocated_extent(id).size;
  --allocated_;
  const ExtentId right = extents_[id].right;
  if (right != kNone && extents_[right].is_free) {
    unlink_bin(right);
    absorb_right(id);
  }
  const ExtentId left = extents_[id].left;
  if (left != kNone && extents_[left].is_free) {
    unlink_bin(left);
    id = left;
    absorb_right(id);
  }
  push_bin(id);
}

std::uint64_t ExtentAllocator::offset_bytes(ExtentId extent) const {
  return allocated_extent(extent).start * kGranuleBytes;
}

std::uint64_t ExtentAllocator::size_bytes(ExtentId extent) const {
  return allocated_extent(extent).size * kGranuleBytes;
}

std::uint64_t ExtentAllocator::used_bytes() const noexcept {
  return used_granules_ * kGranuleBytes;
}

std::uint64_t ExtentAllocator::free_bytes() const noexcept {
  return (capacity_granules_ - used_granules_) * kGranuleBytes;
}

const ExtentAllocator::Extent& ExtentAllocator::allocated_extent(ExtentId id) const {
  if (id >= extents_.size() || extents_[id].is_free || extents_[id].size == 0) {
    throw std::logic_error("ExtentAllocator: not an allocated extent");
  }
  return extents_[id];
}

void ExtentAllocator::push_bin(ExtentId id) {
  Extent& extent = extents_[id];
  const unsigned bin = bin_of(extent.size);
  extent.is_free = true;
  extent.previous = kNone;
  extent.next = bins_[bin];
  if (extent.next != kNone) extents_[extent.next].previous = id;
  bins_[bin] = id;
  nonempty_[bin / 64] |= std::uint64_t{1} << (bin % 64);
}

void ExtentAllocator::unlink_bin(ExtentId id) {
  Extent& extent = extents_[id];
  const unsigned bin = bin_of(extent.size);
  if (extent.next != kNone) extents_[extent.next].previous = extent.previous;
  if (extent.previous != kNone) {
    extents_[extent.previous].next = extent.next;
  } else {
    bins_[bin] = extent.next;
    if (extent.next == kNone) nonempty_[bin / 64] &= ~(std::uint64_t{1} << (bin % 64));
  }
  extent.is_free = false;
}

// Cuts `id` down to `granules`; the rest becomes a free extent at its right.
void ExtentAllocator::split(ExtentId id, std::uint32_t granules) {
  if (extents_[id].size == granules) return;
  const ExtentId rest_id = take_record();
  Extent& extent = extents_[id];
  Extent& rest = extents_[rest_id];
  rest.start = extent.start + granules;
  rest.size = extent.size - granules;
  rest.left = id;
  rest.right = extent.right;
  if (rest.right != kNone) extents_[rest.right].left = rest_id;
  extent.right = rest_id;
  extent.size = granules;
  push_bin(rest_id);
}

void ExtentAllocator::absorb_right(ExtentId id) {
  Extent& extent = extents_[id];
  const ExtentId right = extent.right;
  extent.size += extents_[right].size;
  extent.right = extents_[right].right;
  if (extent.right != kNone) extents_[extent.right].left = id;
  give_record(right);
}

ExtentId ExtentAllocator::take_record() {
  const ExtentId id = unused_;
  if (id == kNone) throw std::logic_error("ExtentAllocator: more free extents than can be");
  unused_ = extents_[id].next;
  extents_[id] = Extent{};
  return id;
}

void ExtentAllocator::give_record(ExtentId id) {
  extents_[id] = Extent{};
  extents_[id].next = unused_;
  unused_ = id;
}

}  // namespace hymcache::chm
