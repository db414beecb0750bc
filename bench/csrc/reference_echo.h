// A request and an answer of given sizes over TCP, answered by an epoll loop that does nothing
// else: what a lookup costs before anything is looked up.
#pragma once

#include <cstdint>
#include <vector>

#include "hymcache/csrc/unique_fd.h"

namespace hymcache::bench {

// Runs in a process of its own until its last client has gone.
void serve_echo(UniqueFd listener, std::uint32_t request_bytes, std::uint32_t response_bytes);

class EchoClient {
 public:
  EchoClient(UniqueFd socket, std::uint32_t request_bytes, std::uint32_t response_bytes);

  // Sends a request and receives the response. Throws Error (kUnavailable) when the server is gone.
  void round_trip();

 private:
  UniqueFd socket_;
  std::vector<char> request_;
  std::vector<char> response_;
};

}  // namespace hymcache::bench
