// CRC-32C by the CPU's own instruction: SSE4.2 and PCLMULQDQ, or the CRC32 and PMULL of AArch64.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hymcache::crc32c_instruction {

// Clang before 16 has AArch64's intrinsics only where the whole build is for such CPUs.
#if defined(__x86_64__) || (defined(__aarch64__) && (!defined(__clang__) || __clang_major__ >= 16))
#define HYMCACHE_HAVE_CRC32C_INSTRUCTION 1
bool supported() noexcept;
// Only where supported(). As hymcache::crc32c, and as CopyKernel::stream_crc32c through the general
// registers that the instruction takes.
std::uint32_t update(std::uint32_t crc, const void* data, std::size_t bytes) noexcept;
std::uint32_t stream(std::byte* to, const std::byte* from, std::size_t bytes,
                     std::uint32_t crc) noexcept;
#endif

}  // namespace hymcache::crc32c_instruction
