// A client's connection: blocking calls, each with a deadline. For one thread at a time.
//
// A call that fails or runs out of time leaves the stream in an unknown state, so the channel is
// closed with it; its owner connects anew.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transport/csrc/endpoint.h"
#include "transport/csrc/handshake.h"
#include "transport/csrc/wire.h"

namespace hymcache {

class Channel {
 public:
  // Connects and shakes hands. Throws Unavailable, ProtocolError (other version) or ConfigError
  // (wrong secret, or a secret on one side only, or the peer is not a `expected`).
  static std::unique_ptr<Channel> connect(const Endpoint& endpoint, const Identity& identity,
                                          wire::Role expected, TimePoint deadline);

  const Endpoint& endpoint() const noexcept { return endpoint_; }
  const wire::HelloReply& server() const noexcept { return server_; }
  bool open() const noexcept { return static_cast<bool>(fd_); }
  // True if the peer has closed the connection, or sent something unasked: not to be used again.
  bool stale() const noexcept;

  struct Frame {
    wire::Header header;
    wire::Bytes payload;  // valid until the next receive
  };

  // Sends a frame; returns its request id. `bulk` is sent from where it lies.
  std::uint32_t send(wire::Type type, wire::Bytes head, wire::Bytes tail, TimePoint deadline,
                     std::span<const iovec> bulk = {});
  // Queues a message that has no response; it leaves with the next frame, or with flush(). What
  // belongs together then costs one system call, and the peer one wake-up.
  void post(wire::Type type, wire::Bytes head, wire::Bytes tail);
  void flush(TimePoint deadline);
  // As send(), but announces `bulk_bytes` that the caller then gives to send_bulk() piece by piece.
  std::uint32_t begin_bulk(wire::Type type, wire::Bytes head, wire::Bytes tail,
                           std::uint64_t bulk_bytes, TimePoint deadline);
  void send_bulk(std::span<const iovec> parts, TimePoint deadline);
  // The response to `request_id`. An ERROR frame is thrown as what it says (wire::throw_error).
  Frame receive(wire::Type type, std::uint32_t request_id, TimePoint deadline);
  Frame call(wire::Type type, wire::Bytes head, wire::Bytes tail, TimePoint deadline) {
    return receive(type, send(type, head, tail, deadline), deadline);
  }
  // Looks for a response again and again for so long before it sleeps: an answer that comes within
  // microseconds then costs neither end a wake-up. Given up for a while where it does not pay.
  void set_spin(Clock::duration spin) noexcept { spin_ = spin; }
  // The bulk bytes of the frame just received, in pieces as the caller wants them.
  void receive_bulk(std::span<const iovec> parts, TimePoint deadline);
  // A descriptor that came with what was received (SCM_RIGHTS); none: an empty one.
  UniqueFd take_fd() noexcept { return std::move(passed_fd_); }

  void close() noexcept { fd_.reset(); }
  // Gives the connected socket away, to an event loop for instance. Nothing may be in flight.
  UniqueFd release() noexcept { return std::move(fd_); }

 private:
  Channel(Endpoint endpoint, UniqueFd fd);
  void shake_hands(const Identity& identity, wire::Role expected, TimePoint deadline);
  void fill(std::size_t bytes, TimePoint deadline);  // at least so many are buffered
  ssize_t receive_some(TimePoint deadline, msghdr& message);
  bool peer_shares_processor() const noexcept;
  bool spin_receive(TimePoint deadline, msghdr& message, ssize_t* received);
  void send_parts(TimePoint deadline);  // what stands in parts_
  bool wait_writable(TimePoint deadline);
  void throw_last_words(TimePoint deadline);
  std::int64_t left_us(TimePoint deadline);
  void set_timeout(int option, TimePoint deadline);
  [[noreturn]] void fail(ErrorKind kind, const std::string& message, int error_number = 0);
  [[noreturn]] void fail_io(const char* call, int error_number);

  Endpoint endpoint_;
  UniqueFd fd_;
  UniqueFd passed_fd_;
  wire::HelloReply server_;
  std::uint32_t next_request_id_ = 1;
  std::vector<std::byte> buffer_;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
  std::vector<std::byte> posted_;
  std::vector<iovec> parts_;  // kept between calls, which then allocate nothing
  std::int64_t timeout_us_[2] = {-1, -1};
  Clock::duration spin_{};
  std::uint32_t spins_failed_ = 0;   // more than succeeded
  std::uint32_t spins_skipped_ = 0;  // since the last one
};

}  // namespace hymcache
