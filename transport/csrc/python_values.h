// What several rooms' bindings take from Python, as the core has it.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "hymcache/csrc/entry.h"
#include "hymcache/csrc/error.h"
#include "transport/csrc/event_loop.h"

namespace hymcache {

inline Clock::duration to_duration(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(std::clamp(seconds, 0.0, 1e6)));
}

// Keys one after another in one bytes object. Throws kConfig where it is cut short.
inline std::vector<ObjectKey> to_keys(const pybind11::bytes& raw) {
  const std::string_view bytes(raw);
  if (bytes.size() % sizeof(ObjectKey) != 0) {
    throw Error(ErrorKind::kConfig, "keys are 16 bytes each, " + std::to_string(bytes.size()) +
                                        " bytes are not a whole number of them");
  }
  std::vector<ObjectKey> keys(bytes.size() / sizeof(ObjectKey));
  std::memcpy(keys.data(), bytes.data(), bytes.size());
  return keys;
}

}  // namespace hymcache
