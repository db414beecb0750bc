// Copies of blocks between shared memory and an engine's buffers.
//
// A plain memcpy of a block first reads every destination line that it is about to overwrite, and
// evicts what the engine had in its caches. From kNonTemporalMin bytes up these copies therefore
// stream past the caches; the checksum, when asked for, is taken from the same registers, so that
// a block crosses the memory bus once. When a copy returns, its stores are ordered before any
// later store of the caller, also those that hand the block over to another thread or process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace hymcache {

// Below this the destination is likely used at once, and the cache is the right place for it.
inline constexpr std::size_t kNonTemporalMin = 256u << 10;

struct Segment {
  void* data;
  std::size_t bytes;
};

// One way to stream; the copies use the first of those that this CPU can run.
struct CopyKernel {
  const char* name;
  void (*stream)(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;
  std::uint32_t (*stream_crc32c)(std::byte* to, const std::byte* from, std::size_t bytes,
                                 std::uint32_t crc) noexcept;
  void (*fence)() noexcept;  // orders the streamed stores before later ones
};
std::span<const CopyKernel> copy_kernels() noexcept;  // fastest first; the last is portable
const char* copy_implementation() noexcept;           // the name of the first

// Copies bytes that don't overlap.
void copy_bytes(void* to, const void* from, std::size_t bytes,
                const CopyKernel& kernel = copy_kernels().front()) noexcept;

// The same; returns crc32c(crc, from, bytes) of the bytes as they were copied, which is what
// counts when another process may be writing them.
std::uint32_t copy_crc32c(void* to, const void* from, std::size_t bytes, std::uint32_t crc,
                          const CopyKernel& kernel = copy_kernels().front()) noexcept;

// Copies contiguous bytes to segments in order (scatter), or segments in order to contiguous bytes
// (gather): as many bytes as the segments hold. Where crc is given, *crc is extended by the bytes.
// The sum of the segments, not each of them, decides whether the copy streams.
void copy_scatter(std::span<const Segment> to, const void* from, std::uint32_t* crc,
                  const CopyKernel& kernel = copy_kernels().front()) noexcept;
void copy_gather(void* to, std::span<const Segment> from, std::uint32_t* crc,
                 const CopyKernel& kernel = copy_kernels().front()) noexcept;

}  // namespace hymcache
