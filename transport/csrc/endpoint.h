// Where a peer listens: "host:port", "[v6]:port" or "unix:/path".
#pragma once

#include <cstdint>
#include <string>

#include "hymcache/csrc/unique_fd.h"
#include "transport/csrc/event_loop.h"

namespace hymcache {

struct Endpoint {
  std::string host;  // or the path of a UNIX socket
  std::uint16_t port = 0;
  bool is_unix = false;

  // Throws ConfigError that says what is wrong with `text`.
  static Endpoint parse(const std::string& text);
  std::string text() const;
  auto operator<=>(const Endpoint&) const = default;
};

// Until the deadline; 0 when it is over.
int remaining_ms(TimePoint deadline);
// A connected, blocking socket. Throws Unavailable (refused, no such host, out of time).
UniqueFd connect_socket(const Endpoint& endpoint, TimePoint deadline);
// A listening, non-blocking socket; `bound_port` gets the port (for port 0). Throws ConfigError
// naming the endpoint when it is in use or cannot be bound. A UNIX socket that a dead process has
// left behind is replaced.
UniqueFd listen_socket(const Endpoint& endpoint, std::uint16_t* bound_port);
// Large buffers, no delay and keep-alive, for a TCP socket; harmless for others.
void tune_socket(int fd);

}  // namespace hymcache
