#include "transport/csrc/crc32c_instruction.h"

#ifdef HYMCACHE_HAVE_CRC32C_INSTRUCTION

#include <cstring>

#include "transport/csrc/crc32c_polynomial.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define HYMCACHE_TARGET __attribute__((target("sse4.2,pclmul")))
#else
#include <arm_acle.h>
#include <arm_neon.h>
#include <sys/auxv.h>
#define HYMCACHE_TARGET __attribute__((target("+crc+crypto")))
#endif

namespace hymcache::crc32c_instruction {
namespace {

// The instruction takes three cycles and one can start in each, so three lanes run side by side.
// 1 KiB: long against the cost of joining them, short against a 4 KiB page.
constexpr std::size_t kLaneBytes = 1024;

#if defined(__x86_64__)
HYMCACHE_TARGET inline std::uint32_t step(std::uint32_t crc, std::uint64_t word) noexcept {
  return static_cast<std::uint32_t>(_mm_crc32_u64(crc, word));
}
HYMCACHE_TARGET inline std::uint32_t step_byte(std::uint32_t crc, std::uint8_t byte) noexcept {
  return _mm_crc32_u8(crc, byte);
}
HYMCACHE_TARGET inline std::uint64_t carryless(std::uint32_t a, std::uint32_t b) noexcept {
  return static_cast<std::uint64_t>(
      _mm_cvtsi128_si64(_mm_clmulepi64_si128(_mm_cvtsi64_si128(a), _mm_cvtsi64_si128(b), 0)));
}
#else
HYMCACHE_TARGET inline std::uint32_t step(std::uint32_t crc, std::uint64_t word) noexcept {
  return __crc32cd(crc, word);
}
HYMCACHE_TARGET inline std::uint32_t step_byte(std::uint32_t crc, std::uint8_t byte) noexcept {
  return __crc32cb(crc, byte);
}
HYMCACHE_TARGET inline std::uint64_t carryless(std::uint32_t a, std::uint32_t b) noexcept {
  return static_cast<std::uint64_t>(vmull_p64(a, b));
}
#endif

inline std::uint64_t load_word(const std::uint8_t* data) noexcept {
  std::uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

// The crc as it stands after `kBytes` zero bytes. The product of two reflected polynomials has one
// factor x too many and step() multiplies by x^32, hence the 33.
template <std::uint64_t kBytes>
HYMCACHE_TARGET inline std::uint32_t shift(std::uint32_t crc) noexcept {
  constexpr std::uint32_t kFactor = crc32c_polynomial::power_of_x(8 * kBytes - 33);
  return step(0, carryless(crc, kFactor));
}

}  // namespace

bool supported() noexcept {
#if defined(__x86_64__)
  return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
#else
  constexpr unsigned long kPmull = 1ul << 4;  // HWCAP_PMULL, HWCAP_CRC32 of asm/hwcap.h
  constexpr unsigned long kCrc32 = 1ul << 7;
  constexpr unsigned long kBoth = kPmull | kCrc32;
  return (getauxval(AT_HWCAP) & kBoth) == kBoth;
#endif
}

HYMCACHE_TARGET std::uint32_t update(std::uint32_t crc, const void* data,
                                     std::size_t bytes) noexcept {
  const auto* from = static_cast<const std::uint8_t*>(data);
  crc = ~crc;
  for (; bytes >= 3 * kLaneBytes; bytes -= 3 * kLaneBytes, from += 3 * kLaneBytes) {
    std::uint32_t second = 0;
    std::uint32_t third = 0;
    for (std::size_t at = 0; at < kLaneBytes; at += 8) {
      crc = step(crc, load_word(from + at));
      second = step(second, load_word(from + kLaneBytes + at));
      third = step(third, load_word(from + 2 * kLaneBytes + at));
    }
    crc = shift<2 * kLaneBytes>(crc) ^ shift<kLaneBytes>(second) ^ third;
  }
  for (; bytes >= 8; bytes -= 8, from += 8) crc = step(crc, load_word(from));
  for (; bytes > 0; --bytes, ++from) crc = step_byte(crc, *from);
  return ~crc;
}

}  // namespace hymcache::crc32c_instruction

#endif  // HYMCACHE_HAVE_CRC32C_INSTRUCTION
