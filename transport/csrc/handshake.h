// Who speaks to whom: versions, roles and, where a secret is set, proof of it by both sides.
//
//   client                                   server
//     HELLO(versions, role, nonce_c)  ------>
//     <------  HELLO reply(version, role, incarnation, nonce_s, auth_required)
//     AUTH(HMAC(secret, "client" nonce_c nonce_s))  ------>      only if auth_required
//     <------  AUTH reply(HMAC(secret, "server" nonce_c nonce_s))
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "transport/csrc/wire.h"

namespace hymcache {

// HMAC-SHA256 of the message under the shared secret. It comes in from outside (Python's hmac), so
// that the core holds neither the secret nor an implementation of its own. Empty: no secret set.
using MacFunction = std::function<wire::Mac(std::string_view message)>;

struct Identity {
  wire::Role role = wire::Role::kClient;
  std::string name;               // shown to the other side
  NodeId node = 0;                // of a node
  std::uint64_t incarnation = 0;  // of a server; differs after every restart
  std::uint64_t features = 0;
  MacFunction mac;
  std::uint16_t version_min = wire::kVersionMin;
  std::uint16_t version_max = wire::kVersionMax;
};

wire::Nonce random_nonce();  // from the kernel
wire::Mac prove(const MacFunction& mac, wire::Role role, const wire::Nonce& client,
                const wire::Nonce& server);
bool equal_in_constant_time(const wire::Mac& a, const wire::Mac& b) noexcept;

wire::Hello make_hello(const Identity& identity);
// The highest version both speak. Throws ProtocolError that names both ranges.
std::uint16_t agree_on_version(const Identity& mine, const wire::Hello& theirs);

}  // namespace hymcache
