// Where the bytes of an engine's blocks lie.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "transport/csrc/copy.h"

namespace hymcache {

// Block b is the concatenation, for each piece i in order, of the `bytes` bytes at
// base + b * stride. One piece a layer in the usual layouts; a single one where blocks are
// contiguous; one a head and layer where heads come first.
class BlockLayout {
 public:
  struct Piece {
    std::byte* base = nullptr;
    std::int64_t stride = 0;
    std::uint64_t bytes = 0;
  };

  // Throws ConfigError: no pieces, or more than 4 GiB a block.
  BlockLayout(std::vector<Piece> pieces, std::int64_t blocks);

  std::int64_t blocks() const noexcept { return blocks_; }
  std::uint64_t block_bytes() const noexcept { return block_bytes_; }
  // Fills `segments`, which keeps its memory from call to call.
  void locate(std::int64_t block, std::vector<Segment>& segments) const;

 private:
  std::vector<Piece> pieces_;
  std::int64_t blocks_;
  std::uint64_t block_bytes_ = 0;
};

}  // namespace hymcache
