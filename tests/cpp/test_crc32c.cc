// crc32c: the vectors of RFC 3720, and every kernel that this CPU runs against the definition.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "transport/csrc/crc32c.h"

namespace {

using hymcache::crc32c;
using hymcache::crc32c_combine;
using hymcache::crc32c_kernels;

// Bit by bit, as the polynomial is defined.
std::uint32_t crc32c_by_definition(std::uint32_t crc, const std::uint8_t* data, std::size_t bytes) {
  crc = ~crc;
  for (std::size_t i = 0; i < bytes; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78u : 0u);
  }
  return ~crc;
}

std::vector<std::uint8_t> random_bytes(std::mt19937_64& random, std::size_t bytes) {
  std::vector<std::uint8_t> data(bytes);
  for (std::uint8_t& byte : data) byte = static_cast<std::uint8_t>(random());
  return data;
}

}  // namespace

TEST_CASE("crc32c: vectors of RFC 3720, B.4, by every kernel") {
  std::vector<std::uint8_t> zeros(32, 0x00);
  std::vector<std::uint8_t> ones(32, 0xFF);
  std::vector<std::uint8_t> rising(32);
  std::vector<std::uint8_t> falling(32);
  for (std::size_t i = 0; i < 32; ++i) {
    rising[i] = static_cast<std::uint8_t>(i);
    falling[i] = static_cast<std::uint8_t>(31 - i);
  }
  const std::vector<std::uint8_t> scsi_read{
      0x01, 0xC0, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
      0x00, 0x00, 0x00, 0x00, 0x14, 0x00, 0x00, 0x00, 0x00, 0x00, 0x04, 0x00,
      0x00, 0x00, 0x00, 0x14, 0x00, 0x00, 0x00, 0x18, 0x28, 0x00, 0x00, 0x00,
      0x00, 0x00, 0x00, 0x00, 0x02, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00};
  for (const auto& kernel : crc32c_kernels()) {
    CAPTURE(kernel.name);
    CHECK(kernel.update(0, zeros.data(), zeros.size()) == 0x8A9136AA);
    CHECK(kernel.update(0, ones.data(), ones.size()) == 0x62A8AB43);
    CHECK(kernel.update(0, rising.data(), rising.size()) == 0x46DD794E);
    CHECK(kernel.update(0, falling.data(), falling.size()) == 0x113FDB5C);
    CHECK(kernel.update(0, scsi_read.data(), scsi_read.size()) == 0xD9963A56);
    CHECK(kernel.update(0, "123456789", 9) == 0xE3069283);
    CHECK(kernel.update(0x12345678, nullptr, 0) == 0x12345678);
  }
}

TEST_CASE("crc32c: every kernel is the definition, for all small lengths and alignments") {
  std::mt19937_64 random(1);
  const auto data = random_bytes(random, 1200);
  for (std::size_t bytes = 0; bytes <= 1100; ++bytes) {
    const std::size_t offset = bytes % 67;
    const auto before = static_cast<std::uint32_t>(random());
    const std::uint32_t expected = crc32c_by_definition(before, &data[offset], bytes);
    for (const auto& kernel : crc32c_kernels()) {
      CAPTURE(kernel.name);
      CAPTURE(bytes);
      REQUIRE(kernel.update(before, &data[offset], bytes) == expected);
    }
  }
}

TEST_CASE("crc32c: every kernel is the definition, for random lengths and alignments") {
  const std::uint64_t seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  const auto data = random_bytes(random, 1u << 17);
  for (int round = 0; round < 60; ++round) {
    const std::size_t offset = random() % 200;
    const std::size_t bytes = random() % (data.size() - offset);
    const auto before = static_cast<std::uint32_t>(random());
    const std::uint32_t expected = crc32c_by_definition(before, &data[offset], bytes);
    for (const auto& kernel : crc32c_kernels()) {
      CAPTURE(kernel.name);
      CAPTURE(bytes);
      CAPTURE(offset);
      REQUIRE(kernel.update(before, &data[offset], bytes) == expected);
    }
  }
}

TEST_CASE("crc32c: checksums of parts join to that of the whole") {
  const std::uint64_t seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  const auto data = random_bytes(random, 100'000);
  const std::uint32_t whole = crc32c(0, data.data(), data.size());
  for (int round = 0; round < 100; ++round) {
    const std::size_t cut = random() % (data.size() + 1);
    CAPTURE(cut);
    const std::uint32_t first = crc32c(0, data.data(), cut);
    const std::uint32_t second = crc32c(0, data.data() + cut, data.size() - cut);
    CHECK(crc32c(first, data.data() + cut, data.size() - cut) == whole);
    CHECK(crc32c_combine(first, second, data.size() - cut) == whole);
  }
}

TEST_CASE("crc32c: joining takes lengths beyond 2^61 bytes") {
  // a + (b + c) == (a + b) + c, where b stands for 2^63 bytes and c for 2^62.
  const std::uint64_t bytes_b = std::uint64_t{1} << 63;
  const std::uint64_t bytes_c = std::uint64_t{1} << 62;
  const std::uint32_t left = crc32c_combine(1, crc32c_combine(2, 3, bytes_c), bytes_b + bytes_c);
  CHECK(left == crc32c_combine(crc32c_combine(1, 2, bytes_b), 3, bytes_c));
}
