#include "transport/csrc/handshake.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>

namespace hymcache {
namespace {

std::string range_text(std::uint16_t low, std::uint16_t high) {
  return low == high ? std::to_string(low) : std::to_string(low) + " to " + std::to_string(high);
}

const char* role_text(wire::Role role) {
  switch (role) {
    case wire::Role::kClient:
      return "client";
    case wire::Role::kNode:
      return "node";
    case wire::Role::kMaster:
      return "master";
  }
  return "peer";
}

}  // namespace

wire::Nonce random_nonce() {
  wire::Nonce nonce;
  while (::getrandom(nonce.data(), nonce.size(), 0) != static_cast<ssize_t>(nonce.size())) {
    if (errno != EINTR) throw Error(ErrorKind::kDevice, "getrandom failed", errno);
  }
  return nonce;
}

wire::Mac prove(const MacFunction& mac, wire::Role role, const wire::Nonce& client,
                const wire::Nonce& server) {
  std::string message = role == wire::Role::kClient ? "client" : "server";
  message.append(client.begin(), client.end());
  message.append(server.begin(), server.end());
  return mac(message);
}

bool equal_in_constant_time(const wire::Mac& a, const wire::Mac& b) noexcept {
  std::uint8_t difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == 0;
}

wire::Hello make_hello(const Identity& identity) {
  wire::Hello hello;
  hello.version_min = identity.version_min;
  hello.version_max = identity.version_max;
  hello.role = identity.role;
  hello.features = identity.features;
  hello.nonce = random_nonce();
  hello.name = wire::to_text<64>(std::string_view(identity.name).substr(0, 63));
  return hello;
}

std::uint16_t agree_on_version(const Identity& mine, const wire::Hello& theirs) {
  const std::uint16_t version = std::min(mine.version_max, theirs.version_max);
  if (version < mine.version_min || version < theirs.version_min) {
    throw Error(ErrorKind::kProtocol, std::string("the ") + role_text(theirs.role) +
                                          " speaks protocol version " +
                                          range_text(theirs.version_min, theirs.version_max) +
                                          ", this " + role_text(mine.role) + " speaks " +
                                          range_text(mine.version_min, mine.version_max) +
                                          ": install the same release of hymcache on both");
  }
  return version;
}

}  // namespace hymcache
