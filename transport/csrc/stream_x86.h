// Streaming copies on the registers that older x86-64 CPUs have: AVX2, and SSE2 which all have.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hymcache::stream_x86 {

#if defined(__x86_64__)
#define HYMCACHE_HAVE_STREAM_X86 1
// As CopyKernel::stream, stream_crc32c and fence; the avx2_* only on CPUs with AVX2.
void avx2_stream(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;
std::uint32_t avx2_stream_crc32c(std::byte* to, const std::byte* from, std::size_t bytes,
                                 std::uint32_t crc) noexcept;
void sse2_stream(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;
std::uint32_t sse2_stream_crc32c(std::byte* to, const std::byte* from, std::size_t bytes,
                                 std::uint32_t crc) noexcept;
void fence() noexcept;
#endif

}  // namespace hymcache::stream_x86
