// The DRAM of an emulated device: one sealed memfd that clients of the same host map.
//
//   0                 staging_offset            read_write_offset             bytes
//   | generation words | staging window ... pad | write buffer ............... |
//   |<--------- clients map it for reading ---->|<- for reading and writing -->|
//
// Every part starts on a page, as O_DIRECT asks; the write buffer on 2 MiB, so that a huge page
// never holds both what clients may write and what they may not.
#pragma once

#include <cstdint>
#include <memory>

#include "chm_device/csrc/device.h"
#include "hymcache/csrc/unique_fd.h"

namespace hymcache::chm {

// Ends a mapping of so many bytes.
struct Unmap {
  std::uint64_t bytes = 0;
  void operator()(std::uint8_t* base) const noexcept;
};

class Arena {
 public:
  // Sizes are multiples of the granule. Throws kConfig when the machine has not the memory, kDevice
  // when the system refuses it.
  Arena(std::uint64_t staging_bytes, std::uint64_t write_buffer_bytes, std::uint32_t words);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  const DeviceRegion& region() const noexcept { return region_; }
  std::uint8_t* at(std::uint64_t offset) const noexcept { return region_.base + offset; }
  std::uint64_t staging_offset() const noexcept { return staging_offset_; }

  // Where generation word `word` lies in the region, and its value.
  static std::uint64_t word_offset(std::uint32_t word) noexcept;
  std::uint64_t generation(std::uint32_t word) const noexcept;
  // Tells clients that the bytes this word guards are about to change.
  void advance_generation(std::uint32_t word) noexcept;

 private:
  UniqueFd fd_;
  std::unique_ptr<std::uint8_t, Unmap> mapping_;
  DeviceRegion region_;
  std::uint64_t staging_offset_ = 0;
};

}  // namespace hymcache::chm
