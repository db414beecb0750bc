// CRC-32C (Castagnoli; RFC 3720 appendix B.4), by the fastest means the CPU has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace hymcache {

// The checksum of data appended to bytes whose checksum is `crc` (0 for none):
// crc32c(crc32c(0, a), b) == crc32c(0, a + b).
std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t bytes) noexcept;

// The checksum of a + b from those of a and b, without their bytes; O(log bytes_b).
std::uint32_t crc32c_combine(std::uint32_t crc_a, std::uint32_t crc_b,
                             std::uint64_t bytes_b) noexcept;

// One way to compute it. crc32c() uses the first of those that this CPU can run.
struct Crc32cKernel {
  const char* name;
  std::uint32_t (*update)(std::uint32_t crc, const void* data, std::size_t bytes) noexcept;
};
std::span<const Crc32cKernel> crc32c_kernels() noexcept;  // fastest first; the last is portable

}  // namespace hymcache
