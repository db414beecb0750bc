// Arithmetic of polynomials over GF(2) modulo the CRC-32C polynomial, for constants and for joining
// checksums. A polynomial is held as the checksum holds it: bit 31 is the coefficient of x^0.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace hymcache::crc32c_polynomial {

inline constexpr std::uint32_t kPolynomial = 0x82F63B78;  // RFC 3720, bits reflected
inline constexpr std::uint32_t kOne = 1u << 31;

constexpr std::uint32_t times_x(std::uint32_t a) noexcept {
  return (a >> 1) ^ (kPolynomial & (0u - (a & 1)));
}

constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) noexcept {
  std::uint32_t product = 0;
  for (; a != 0; a <<= 1) {
    product ^= b & (0u - (a >> 31));
    b = times_x(b);
  }
  return product;
}

// x^(2^k) for each bit k of an exponent.
inline constexpr std::array<std::uint32_t, 64> kSquares = [] {
  std::array<std::uint32_t, 64> squares{};
  std::uint32_t square = times_x(kOne);
  for (std::uint32_t& entry : squares) {
    entry = square;
    square = multiply(square, square);
  }
  return squares;
}();

// x^exponent.
constexpr std::uint32_t power_of_x(std::uint64_t exponent) noexcept {
  std::uint32_t power = kOne;
  for (std::size_t k = 0; exponent != 0; exponent >>= 1, ++k) {
    if ((exponent & 1) != 0) power = multiply(power, kSquares[k]);
  }
  return power;
}

}  // namespace hymcache::crc32c_polynomial
