#include "transport/csrc/stream_x86.h"

#ifdef HYMCACHE_HAVE_STREAM_X86

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "transport/csrc/crc32c.h"

namespace hymcache::stream_x86 {
namespace {

constexpr std::size_t kLine = 64;
// What is checksummed between two bursts of streaming; it stays in the first-level cache.
constexpr std::size_t kChunk = 8u << 10;

__attribute__((target("avx2"))) void avx2_lines(std::byte* to, const std::byte* from,
                                                std::size_t lines) noexcept {
  for (; lines > 0; --lines, from += kLine, to += kLine) {
    const __m256i value0 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i value1 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + 1);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), value0);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + 1, value1);
  }
}

void sse2_lines(std::byte* to, const std::byte* from, std::size_t lines) noexcept {
  for (; lines > 0; --lines, from += kLine, to += kLine) {
    const auto* source = reinterpret_cast<const __m128i*>(from);
    auto* target = reinterpret_cast<__m128i*>(to);
    const __m128i value0 = _mm_loadu_si128(source);
    const __m128i value1 = _mm_loadu_si128(source + 1);
    const __m128i value2 = _mm_loadu_si128(source + 2);
    const __m128i value3 = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, value0);
    _mm_stream_si128(target + 1, value1);
    _mm_stream_si128(target + 2, value2);
    _mm_stream_si128(target + 3, value3);
  }
}

using CopyLines = void (*)(std::byte* to, const std::byte* from, std::size_t lines) noexcept;

template <CopyLines kCopyLines>
void stream(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  // Streaming stores need an aligned destination.
  const std::size_t head = std::min((0 - reinterpret_cast<std::uintptr_t>(to)) % kLine, bytes);
  const std::size_t lines = (bytes - head) / kLine;
  const std::size_t done = head + lines * kLine;
  std::memcpy(to, from, head);
  kCopyLines(to + head, from + head, lines);
  std::memcpy(to + done, from + done, bytes - done);
}

// By way of a buffer in the cache, so that what is checksummed is what is copied even if another
// process is writing to `from`.
template <CopyLines kCopyLines>
std::uint32_t stream_crc32c(std::byte* to, const std::byte* from, std::size_t bytes,
                            std::uint32_t crc) noexcept {
  alignas(kLine) std::array<std::byte, kChunk> buffer;
  while (bytes > 0) {
    const std::size_t chunk = std::min(bytes, kChunk);
    std::memcpy(buffer.data(), from, chunk);
    crc = crc32c(crc, buffer.data(), chunk);
    stream<kCopyLines>(to, buffer.data(), chunk);
    to += chunk;
    from += chunk;
    bytes -= chunk;
  }
  return crc;
}

}  // namespace

void avx2_stream(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  stream<avx2_lines>(to, from, bytes);
}

std::uint32_t avx2_stream_crc32c(std::byte* to, const std::byte* from, std::size_t bytes,
                                 std::uint32_t crc) noexcept {
  return stream_crc32c<avx2_lines>(to, from, bytes, crc);
}

void sse2_stream(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  stream<sse2_lines>(to, from, bytes);
}

std::uint32_t sse2_stream_crc32c(std::byte* to, const std::byte* from, std::size_t bytes,
                                 std::uint32_t crc) noexcept {
  return stream_crc32c<sse2_lines>(to, from, bytes, crc);
}

void fence() noexcept { _mm_sfence(); }

}  // namespace hymcache::stream_x86

#endif  // HYMCACHE_HAVE_STREAM_X86
