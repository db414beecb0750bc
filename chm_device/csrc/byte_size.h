// Sizes in bytes: the granule that everything on a device is a multiple of, and how a size is said.
#pragma once

#include <cstdint>
#include <string>

namespace hymcache::chm {

// Addresses, extents and transfers are multiples of it: a page, and the largest logical block that
// O_DIRECT meets in practice.
inline constexpr std::uint64_t kGranuleBytes = 4096;

constexpr std::uint64_t align_down(std::uint64_t bytes, std::uint64_t alignment) {
  return bytes / alignment * alignment;
}

constexpr std::uint64_t align_up(std::uint64_t bytes, std::uint64_t alignment) {
  return align_down(bytes + alignment - 1, alignment);
}

// What an object of `length` bytes takes of a device.
constexpr std::uint64_t padded(std::uint32_t length) { return align_up(length, kGranuleBytes); }

// "16 MiB", "1.5 GiB", "4097 bytes".
std::string format_bytes(std::uint64_t bytes);

}  // namespace hymcache::chm
