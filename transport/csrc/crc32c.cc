#include "transport/csrc/crc32c.h"

#include <array>
#include <cstring>

#include "transport/csrc/crc32c_instruction.h"
#include "transport/csrc/crc32c_polynomial.h"
#include "transport/csrc/stream_avx512.h"

namespace hymcache {
namespace {

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

// kTables[k][b] is the effect of byte b followed by k zero bytes ("slicing by 8").
constexpr Tables kTables = [] {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (auto& table : tables) {
      for (int bit = 0; bit < 8; ++bit) crc = crc32c_polynomial::times_x(crc);
      table[byte] = crc;
    }
  }
  return tables;
}();

std::uint32_t update_by_table(std::uint32_t crc, const void* data, std::size_t bytes) noexcept {
  const auto* from = static_cast<const std::uint8_t*>(data);
  crc = ~crc;
  for (; bytes >= 8; bytes -= 8, from += 8) {
    std::uint64_t word;
    std::memcpy(&word, from, sizeof word);
    word ^= crc;
    crc = 0;
    for (std::size_t k = 0; k < 8; ++k) crc ^= kTables[7 - k][(word >> (8 * k)) & 0xFF];
  }
  for (; bytes > 0; --bytes, ++from) crc = (crc >> 8) ^ kTables[0][(crc ^ *from) & 0xFF];
  return ~crc;
}

class Kernels {
 public:
  Kernels() noexcept {
#ifdef HYMCACHE_HAVE_STREAM_AVX512
    if (stream_avx512::supported()) add({"avx512-vpclmulqdq", stream_avx512::crc32c});
#endif
#ifdef HYMCACHE_HAVE_CRC32C_INSTRUCTION
    if (crc32c_instruction::supported()) add({"crc32-instruction", crc32c_instruction::update});
#endif
    add({"table", update_by_table});
  }

  std::span<const Crc32cKernel> get() const noexcept { return {kernels_.data(), count_}; }

 private:
  void add(const Crc32cKernel& kernel) noexcept { kernels_[count_++] = kernel; }

  std::array<Crc32cKernel, 3> kernels_{};
  std::size_t count_ = 0;
};

}  // namespace

std::span<const Crc32cKernel> crc32c_kernels() noexcept {
  static const Kernels kernels;
  return kernels.get();
}

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t bytes) noexcept {
  static const auto update = crc32c_kernels().front().update;
  return update(crc, data, bytes);
}

std::uint32_t crc32c_combine(std::uint32_t crc_a, std::uint32_t crc_b,
                             std::uint64_t bytes_b) noexcept {
  // 8 * bytes_b without overflow: x^(8 * bytes_b) = (x^bytes_b)^8.
  std::uint32_t power = crc32c_polynomial::power_of_x(bytes_b);
  for (int doubling = 0; doubling < 3; ++doubling) {
    power = crc32c_polynomial::multiply(power, power);
  }
  return crc32c_polynomial::multiply(crc_a, power) ^ crc_b;
}

}  // namespace hymcache
