// What the checksum of an object starts from: its key, generation and length. A writer that was
// held for dead and comes back may overwrite the entry of the slot's next owner, checksum and all;
// that its own was made for another generation is what gives it away.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "lookup/csrc/slot_word.h"
#include "transport/csrc/crc32c.h"

namespace hymcache::region {

inline std::uint32_t checksum_seed(KeyWords key, std::uint32_t generation,
                                   std::uint32_t length) noexcept {
  std::array<std::uint8_t, 24> bytes;
  std::memcpy(bytes.data(), &key, 16);
  std::memcpy(bytes.data() + 16, &generation, 4);
  std::memcpy(bytes.data() + 20, &length, 4);
  return crc32c(0, bytes.data(), bytes.size());
}

}  // namespace hymcache::region
