// Objects by number: the keys of tests.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "hymcache/csrc/entry.h"

namespace hymcache::testing {

inline constexpr std::uint32_t kKiB = 1u << 10;

inline ObjectKey numbered_key(std::uint64_t number) {
  ObjectKey key{};
  std::memcpy(key.data(), &number, sizeof number);
  key[15] = 1;
  return key;
}

inline std::vector<ObjectKey> numbered_keys(std::uint64_t first, std::uint64_t count) {
  std::vector<ObjectKey> keys;
  for (std::uint64_t i = 0; i < count; ++i) keys.push_back(numbered_key(first + i));
  return keys;
}

}  // namespace hymcache::testing
