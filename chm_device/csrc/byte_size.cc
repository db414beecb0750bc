#include "chm_device/csrc/byte_size.h"

#include <array>
#include <cstdio>

namespace hymcache::chm {

std::string format_bytes(std::uint64_t bytes) {
  struct Unit {
    const char* name;
    std::uint64_t bytes;
  };
  static constexpr std::array<Unit, 4> kUnits{{{"TiB", std::uint64_t{1} << 40},
                                               {"GiB", std::uint64_t{1} << 30},
                                               {"MiB", std::uint64_t{1} << 20},
                                               {"KiB", std::uint64_t{1} << 10}}};
  for (const Unit& unit : kUnits) {
    if (bytes < unit.bytes) continue;
    const bool is_whole = bytes % unit.bytes == 0;
    // A size that one decimal cannot say is left in bytes when it is small enough to be read.
    if (!is_whole && bytes < 100'000) break;
    std::array<char, 48> text{};
    const double value = static_cast<double>(bytes) / static_cast<double>(unit.bytes);
    std::snprintf(text.data(), text.size(), is_whole ? "%.0f %s" : "%.1f %s", value, unit.name);
    return text.data();
  }
  return std::to_string(bytes) + " bytes";
}

}  // namespace hymcache::chm
