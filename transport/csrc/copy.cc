#include "transport/csrc/copy.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "transport/csrc/crc32c.h"
#include "transport/csrc/crc32c_instruction.h"
#include "transport/csrc/stream_avx512.h"
#include "transport/csrc/stream_x86.h"

namespace hymcache {
namespace {

// Through the caches. The checksum is taken from what was written, while it is in the cache.
void plain_copy(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  std::memcpy(to, from, bytes);
}

std::uint32_t plain_copy_crc32c(std::byte* to, const std::byte* from, std::size_t bytes,
                                std::uint32_t crc) noexcept {
  constexpr std::size_t kChunk = 16u << 10;
  while (bytes > 0) {
    const std::size_t chunk = std::min(bytes, kChunk);
    std::memcpy(to, from, chunk);
    crc = crc32c(crc, to, chunk);
    to += chunk;
    from += chunk;
    bytes -= chunk;
  }
  return crc;
}

// Ordinary stores are ordered by the caller's own release.
void no_fence() noexcept {}

constexpr CopyKernel kPlain{"memcpy", plain_copy, plain_copy_crc32c, no_fence};

class Kernels {
 public:
  Kernels() noexcept {
#ifdef HYMCACHE_HAVE_STREAM_AVX512
    if (stream_avx512::supported()) {
      add({"avx512", stream_avx512::stream, stream_avx512::stream_crc32c, stream_x86::fence});
    }
#endif
#ifdef HYMCACHE_HAVE_STREAM_X86
    // Where the checksum goes by table, it takes ten times as long as the copy, however done.
    const auto stream_crc32c =
        crc32c_instruction::supported() ? crc32c_instruction::stream : plain_copy_crc32c;
    if (__builtin_cpu_supports("avx2")) {
      add({"avx2", stream_x86::avx2, stream_crc32c, stream_x86::fence});
    }
    add({"sse2", stream_x86::sse2, stream_crc32c, stream_x86::fence});
#elif defined(HYMCACHE_HAVE_CRC32C_INSTRUCTION)
    if (crc32c_instruction::supported()) {
      add({"crc32-instruction", plain_copy, crc32c_instruction::stream, no_fence});
    }
#endif
    add(kPlain);
  }

  std::span<const CopyKernel> get() const noexcept { return {kernels_.data(), count_}; }

 private:
  void add(const CopyKernel& kernel) noexcept { kernels_[count_++] = kernel; }

  std::array<CopyKernel, 4> kernels_{};
  std::size_t count_ = 0;
};

const CopyKernel& kernel_for(std::size_t bytes, const CopyKernel& kernel) noexcept {
  return bytes >= kNonTemporalMin ? kernel : kPlain;
}

void copy_part(void* to, const void* from, std::size_t bytes, std::uint32_t* crc,
               const CopyKernel& kernel) noexcept {
  if (bytes == 0) return;  // then the pointers may be null
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
  if (crc == nullptr) {
    kernel.stream(target, source, bytes);
  } else {
    *crc = kernel.stream_crc32c(target, source, bytes, *crc);
  }
}

std::size_t total_bytes(std::span<const Segment> segments) noexcept {
  std::size_t total = 0;
  for (const Segment& segment : segments) total += segment.bytes;
  return total;
}

}  // namespace

std::span<const CopyKernel> copy_kernels() noexcept {
  static const Kernels kernels;
  return kernels.get();
}

const char* copy_implementation() noexcept { return copy_kernels().front().name; }

void copy_bytes(void* to, const void* from, std::size_t bytes, const CopyKernel& kernel) noexcept {
  const CopyKernel& chosen = kernel_for(bytes, kernel);
  copy_part(to, from, bytes, nullptr, chosen);
  chosen.fence();
}

std::uint32_t copy_crc32c(void* to, const void* from, std::size_t bytes, std::uint32_t crc,
                          const CopyKernel& kernel) noexcept {
  const CopyKernel& chosen = kernel_for(bytes, kernel);
  copy_part(to, from, bytes, &crc, chosen);
  chosen.fence();
  return crc;
}

void copy_scatter(std::span<const Segment> to, const void* from, std::uint32_t* crc,
                  const CopyKernel& kernel) noexcept {
  const CopyKernel& chosen = kernel_for(total_bytes(to), kernel);
  const auto* source = static_cast<const std::byte*>(from);
  for (const Segment& segment : to) {
    copy_part(segment.data, source, segment.bytes, crc, chosen);
    source += segment.bytes;
  }
  chosen.fence();
}

void copy_gather(void* to, std::span<const Segment> from, std::uint32_t* crc,
                 const CopyKernel& kernel) noexcept {
  const CopyKernel& chosen = kernel_for(total_bytes(from), kernel);
  auto* target = static_cast<std::byte*>(to);
  for (const Segment& segment : from) {
    copy_part(target, segment.data, segment.bytes, crc, chosen);
    target += segment.bytes;
  }
  chosen.fence();
}

}  // namespace hymcache
