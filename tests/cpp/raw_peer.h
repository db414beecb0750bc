// The other end of a connection, byte by byte: blocking, with a bound on every wait, and with none
// of the code under test but the structs of wire.h.
#pragma once

#include <doctest/doctest.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hymcache/csrc/unique_fd.h"
#include "transport/csrc/endpoint.h"
#include "transport/csrc/wire.h"

namespace hymcache::wire_testing {

using ByteVector = std::vector<std::byte>;

inline constexpr auto kPatience = std::chrono::seconds(20);  // sanitizers are slow

inline ByteVector to_vector(wire::Bytes bytes) { return {bytes.begin(), bytes.end()}; }

inline ByteVector pattern(std::size_t bytes, unsigned seed) {
  ByteVector data(bytes);
  unsigned state = seed * 2654435761u + 1;
  for (std::byte& byte : data) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<std::byte>(state >> 24);
  }
  return data;
}

inline ByteVector join(std::initializer_list<wire::Bytes> pieces) {
  ByteVector all;
  for (const wire::Bytes piece : pieces) all.insert(all.end(), piece.begin(), piece.end());
  return all;
}

// A whole frame as it travels.
inline ByteVector frame_bytes(wire::Type type, std::uint16_t flags, std::uint32_t request_id,
                              wire::Bytes payload, wire::Bytes bulk = {}) {
  const wire::Header header = wire::make_header(type, flags, request_id, payload, bulk.size());
  return join({wire::as_bytes(header), payload, bulk});
}

inline std::pair<UniqueFd, UniqueFd> socket_pair() {
  int fds[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

inline void set_buffer_bytes(int fd, int option, int bytes) {
  REQUIRE(::setsockopt(fd, SOL_SOCKET, option, &bytes, sizeof bytes) == 0);
}

class RawPeer {
 public:
  struct Frame {
    wire::Header header;
    ByteVector payload;
    ByteVector bulk;

    wire::ErrorReply error() const {
      REQUIRE(header.type == wire::Type::kError);
      REQUIRE(header.is_response());
      return wire::PayloadReader(payload, "ERROR").take<wire::ErrorReply>();
    }
  };

  explicit RawPeer(UniqueFd fd) : fd_(std::move(fd)) {
    const timeval limit{.tv_sec = std::chrono::seconds(kPatience).count(), .tv_usec = 0};
    ::setsockopt(fd_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    ::setsockopt(fd_.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  }
  static RawPeer connect(const Endpoint& endpoint) {
    return RawPeer(connect_socket(endpoint, Clock::now() + kPatience));
  }

  int fd() const noexcept { return fd_.get(); }
  void close() noexcept { fd_.reset(); }
  void end_writing() noexcept { ::shutdown(fd_.get(), SHUT_WR); }

  // False when the other end is gone.
  bool write(wire::Bytes bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return false;
      bytes = bytes.subspan(static_cast<std::size_t>(n));
    }
    return true;
  }

  // Fewer than asked for only at the end of the stream.
  ByteVector read(std::size_t bytes) {
    ByteVector data(bytes);
    std::size_t got = 0;
    while (got < bytes) {
      const ssize_t n = ::recv(fd_.get(), data.data() + got, bytes - got, 0);
      if (n < 0 && errno == EINTR) continue;  // completions of io_uring do that, without a signal
      REQUIRE_MESSAGE(!(n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)), "nothing comes");
      if (n <= 0) break;
      got += static_cast<std::size_t>(n);
    }
    data.resize(got);
    return data;
  }

  // None at the end of the stream; a frame cut short or damaged fails the test.
  std::optional<Frame> read_frame() {
    const ByteVector raw = read(sizeof(wire::Header));
    if (raw.empty()) return std::nullopt;
    REQUIRE(raw.size() == sizeof(wire::Header));
    Frame frame;
    frame.header = wire::parse_header(raw);
    frame.payload = read(frame.header.payload_bytes);
    REQUIRE(frame.payload.size() == frame.header.payload_bytes);
    wire::check_payload(frame.header, frame.payload);
    frame.bulk = read(frame.header.bulk_bytes);
    REQUIRE(frame.bulk.size() == frame.header.bulk_bytes);
    return frame;
  }

  bool at_end() { return read(1).empty(); }

 private:
  UniqueFd fd_;
};

// Repeats `done` until it is true; fails the test when that takes too long.
template <class Done>
void eventually(Done done) {
  const TimePoint limit = Clock::now() + kPatience;
  while (!done()) {
    REQUIRE(Clock::now() < limit);
    ::usleep(200);
  }
}

}  // namespace hymcache::wire_testing
