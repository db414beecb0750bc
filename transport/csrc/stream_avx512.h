// Streaming copies and CRC-32C on 64-byte registers, for CPUs with AVX-512 and VPCLMULQDQ (Intel
// since Ice Lake, AMD since Zen 4). Older AVX-512 CPUs slow their clock down for such registers,
// and are better served by AVX2.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hymcache::stream_avx512 {

#if defined(__x86_64__)
#define HYMCACHE_HAVE_STREAM_AVX512 1
bool supported() noexcept;
// Only where supported(). As hymcache::crc32c, CopyKernel::stream and CopyKernel::stream_crc32c.
std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t bytes) noexcept;
void stream(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;
std::uint32_t stream_crc32c(std::byte* to, const std::byte* from, std::size_t bytes,
                            std::uint32_t crc) noexcept;
#endif

}  // namespace hymcache::stream_avx512
