// One batch of READs or WRITEs between blocks and a node's region, and the bounce memory that
// blocks pass through which lie in memory that is not registered.
#pragma once

#include <span>
#include <vector>

#include "transport/csrc/copy.h"
#include "transport/csrc/verbs.h"

namespace hymcache {

class VerbsBatch {
 public:
  // A part of a block in the bounce memory.
  struct Slice {
    std::uint32_t block = 0;
    std::uint64_t offset = 0;  // in the block
    std::size_t bounce_offset = 0;
    std::size_t bytes = 0;
  };

  explicit VerbsBatch(VerbsLink& link) : link_(link) {}

  bool empty() const noexcept { return pieces_.empty(); }
  std::span<const Slice> slices() const noexcept { return slices_; }
  // Adds all of a block's memory, if all of it is registered.
  bool add_direct(std::span<const Segment> place, std::uint64_t remote_address,
                  std::uint32_t remote_key);
  // Adds what has room of [offset, length) of a block; returns how many bytes.
  std::size_t add_bounced(const LocalMemory& bounce, std::uint32_t block, std::uint64_t offset,
                          std::uint64_t length, std::uint64_t remote_address,
                          std::uint32_t remote_key);
  void add_piece(const VerbsPiece& piece) { pieces_.push_back(piece); }
  // Moves it all and returns when it is done. Throws Unavailable. The slices stay until clear().
  void run(VerbsOpcode opcode, TimePoint deadline);
  void clear() noexcept;

 private:
  VerbsLink& link_;
  std::vector<VerbsPiece> pieces_;
  std::vector<Slice> slices_;
  std::size_t bounce_used_ = 0;
};

// [offset, offset + bytes) of a block's segments.
std::vector<Segment> slice_segments(std::span<const Segment> place, std::uint64_t offset,
                                    std::uint64_t bytes);

}  // namespace hymcache
