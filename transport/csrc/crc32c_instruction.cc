#include "transport/csrc/crc32c_instruction.h"

#ifdef HYMCACHE_HAVE_CRC32C_INSTRUCTION

#include <algorithm>
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
// 1 KiB: long against the cost of joining them, short against a 4 KiB segment of a copy.
constexpr std::size_t kLaneBytes = 1024;
constexpr std::size_t kLanesBytes = 3 * kLaneBytes;
constexpr std::size_t kLine = 64;
constexpr std::size_t kWord = sizeof(std::uint64_t);
// Three streams within a page or two are more than some prefetchers follow. Measured on Zen 5:
// with two rounds ahead the copy takes 0.85 of the time of memcpy, without 1.4.
constexpr std::size_t kPrefetchBytes = 2 * kLanesBytes;

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
inline void stream_word(std::byte* to, std::uint64_t word) noexcept {
  _mm_stream_si64(reinterpret_cast<long long*>(to), static_cast<long long>(word));
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
// An ordinary store: these cores see by themselves that whole lines are written, and then don't
// read them first.
inline void stream_word(std::byte* to, std::uint64_t word) noexcept {
  std::memcpy(to, &word, sizeof word);
}
#endif

inline std::uint64_t load_word(const std::byte* data) noexcept {
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

// The bytes still to be read; what is read is streamed to `to` as well where kCopy.
template <bool kCopy>
struct Source {
  std::byte* to;
  const std::byte* from;
  std::size_t left;

  HYMCACHE_TARGET std::uint64_t word(std::size_t at) const noexcept {
    const std::uint64_t word = load_word(from + at);
    if constexpr (kCopy) stream_word(to + at, word);
    return word;
  }
  std::uint8_t byte() const noexcept {
    if constexpr (kCopy) *to = *from;
    return std::to_integer<std::uint8_t>(*from);
  }
  void advance(std::size_t bytes) noexcept {
    if constexpr (kCopy) to += bytes;
    from += bytes;
    left -= bytes;
  }
};

// The checksum of all that is left, without the inversions at either end.
template <bool kCopy>
HYMCACHE_TARGET std::uint32_t take_all(Source<kCopy> source, std::uint32_t crc) noexcept {
  for (; source.left >= kLanesBytes; source.advance(kLanesBytes)) {
    std::uint32_t second = 0;
    std::uint32_t third = 0;
    for (std::size_t line = 0; line < kLaneBytes; line += kLine) {
      for (std::size_t lane = 0; lane < kLanesBytes; lane += kLaneBytes) {
        __builtin_prefetch(source.from + kPrefetchBytes + lane + line);  // harmless beyond the end
      }
      for (std::size_t at = line; at < line + kLine; at += kWord) {
        crc = step(crc, source.word(at));
        second = step(second, source.word(kLaneBytes + at));
        third = step(third, source.word(2 * kLaneBytes + at));
      }
    }
    crc = shift<2 * kLaneBytes>(crc) ^ shift<kLaneBytes>(second) ^ third;
  }
  for (; source.left >= kWord; source.advance(kWord)) crc = step(crc, source.word(0));
  for (; source.left > 0; source.advance(1)) crc = step_byte(crc, source.byte());
  return crc;
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
  return ~take_all(Source<false>{nullptr, static_cast<const std::byte*>(data), bytes}, ~crc);
}

HYMCACHE_TARGET std::uint32_t stream(std::byte* to, const std::byte* from, std::size_t bytes,
                                     std::uint32_t crc) noexcept {
  // Whole lines leave the write-combining buffers at once, hence the lanes start on lines.
  const std::size_t head = std::min((0 - reinterpret_cast<std::uintptr_t>(to)) % kLine, bytes);
  std::memcpy(to, from, head);
  crc = update(crc, to, head);
  return ~take_all(Source<true>{to + head, from + head, bytes - head}, ~crc);
}

}  // namespace hymcache::crc32c_instruction

#endif  // HYMCACHE_HAVE_CRC32C_INSTRUCTION
