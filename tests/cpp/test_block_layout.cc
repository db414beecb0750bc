// Where the bytes of an engine's blocks lie.
#include <doctest/doctest.h>

#include <vector>

#include "connector/csrc/block_layout.h"
#include "hymcache/csrc/error.h"

namespace hymcache::testing {
namespace {

using Piece = BlockLayout::Piece;

bool is_refused(std::vector<Piece> pieces, std::int64_t blocks) {
  try {
    const BlockLayout layout(std::move(pieces), blocks);
  } catch (const Error& error) {
    return error.kind() == ErrorKind::kConfig;
  }
  return false;
}

TEST_CASE("block layout: pieces follow each other in their order, each at its stride") {
  std::vector<std::byte> memory(1000);
  std::byte* const base = memory.data();
  const BlockLayout layout({{base + 500, 10, 4}, {base, 20, 8}, {base + 900, -30, 2}}, 5);
  CHECK(layout.blocks() == 5);
  CHECK(layout.block_bytes() == 14);
  std::vector<Segment> segments(17);  // what was in there goes
  layout.locate(3, segments);
  REQUIRE(segments.size() == 3);
  CHECK(segments[0].data == base + 530);
  CHECK(segments[0].bytes == 4);
  CHECK(segments[1].data == base + 60);
  CHECK(segments[1].bytes == 8);
  CHECK(segments[2].data == base + 810);
  CHECK(segments[2].bytes == 2);
}

TEST_CASE("block layout: pieces that touch are one segment") {
  std::vector<std::byte> memory(1000);
  std::byte* const base = memory.data();
  const BlockLayout layout({{base, 100, 25},
                            {base + 25, 100, 25},
                            {base + 50, 100, 0},
                            {base + 50, 100, 50},
                            {base + 99, 100, 1}},
                           10);
  std::vector<Segment> segments;
  layout.locate(2, segments);
  REQUIRE(segments.size() == 2);
  CHECK(segments[0].data == base + 200);
  CHECK(segments[0].bytes == 100);
  CHECK(segments[1].data == base + 299);
}

TEST_CASE("block layout: what cannot be served is refused") {
  std::byte memory[8];
  CHECK(is_refused({}, 1));
  CHECK(is_refused({{memory, 8, 0}}, 1));
  CHECK(is_refused({{memory, 8, 8}}, 0));
  CHECK(is_refused({{memory, 8, 8}}, -1));
  CHECK(is_refused({{memory, 8, 1ull << 32}}, 1));
  CHECK(is_refused({{memory, 8, 1ull << 31}, {memory, 8, 1ull << 31}}, 1));
  CHECK_FALSE(is_refused({{memory, 8, (1ull << 32) - 1}}, 1));
}

}  // namespace
}  // namespace hymcache::testing
