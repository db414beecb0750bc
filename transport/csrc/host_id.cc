#include "transport/csrc/host_id.h"

#include <charconv>
#include <fstream>

namespace hymcache {

wire::HostId this_host() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string text;
  std::getline(file, text);
  std::erase(text, '-');
  wire::HostId host{};
  if (text.size() != 2 * host.size()) return host;
  for (std::size_t i = 0; i < host.size(); ++i) {
    const char* const digits = text.data() + 2 * i;
    if (std::from_chars(digits, digits + 2, host[i], 16).ptr != digits + 2) return {};
  }
  return host;
}

}  // namespace hymcache
