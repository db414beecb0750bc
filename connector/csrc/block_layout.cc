#include "connector/csrc/block_layout.h"

#include <limits>
#include <string>

#include "hymcache/csrc/error.h"

namespace hymcache {

BlockLayout::BlockLayout(std::vector<Piece> pieces, std::int64_t blocks)
    : pieces_(std::move(pieces)), blocks_(blocks) {
  for (const Piece& piece : pieces_) block_bytes_ += piece.bytes;
  if (pieces_.empty() || block_bytes_ == 0 || blocks_ <= 0 ||
      block_bytes_ > std::numeric_limits<std::uint32_t>::max()) {
    throw Error(ErrorKind::kConfig, "a block layout of " + std::to_string(pieces_.size()) +
                                        " pieces, " + std::to_string(block_bytes_) +
                                        " bytes a block and " + std::to_string(blocks_) +
                                        " blocks cannot be served");
  }
}

void BlockLayout::locate(std::int64_t block, std::vector<Segment>& segments) const {
  segments.clear();
  for (const Piece& piece : pieces_) {
    std::byte* const data = piece.base + block * piece.stride;
    // Pieces that follow each other are one, so that a copy of them is one, too.
    if (!segments.empty() &&
        static_cast<std::byte*>(segments.back().data) + segments.back().bytes == data) {
      segments.back().bytes += piece.bytes;
    } else {
      segments.push_back({.data = data, .bytes = piece.bytes});
    }
  }
}

}  // namespace hymcache
