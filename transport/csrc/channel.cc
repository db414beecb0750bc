#include "transport/csrc/channel.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/csrc/iovecs.h"

namespace hymcache {
namespace {

constexpr std::size_t kBufferBytes = 64u << 10;
// Where spinning keeps failing it is tried once in so many receives.
constexpr std::uint32_t kSpinSkipsLog2Max = 8;

}  // namespace

Channel::Channel(Endpoint endpoint, UniqueFd fd)
    : endpoint_(std::move(endpoint)), fd_(std::move(fd)), buffer_(kBufferBytes) {}

std::unique_ptr<Channel> Channel::connect(const Endpoint& endpoint, const Identity& identity,
                                          wire::Role expected, TimePoint deadline) {
  std::unique_ptr<Channel> channel(new Channel(endpoint, connect_socket(endpoint, deadline)));
  channel->shake_hands(identity, expected, deadline);
  return channel;
}

void Channel::shake_hands(const Identity& identity, wire::Role expected, TimePoint deadline) {
  const wire::Hello hello = make_hello(identity);
  const Frame frame = call(wire::Type::kHello, wire::as_bytes(hello), {}, deadline);
  server_ = wire::PayloadReader(frame.payload, "HELLO reply").take<wire::HelloReply>();
  if (server_.role != expected) {
    const char* const found = server_.role == wire::Role::kMaster ? "master" : "storage node";
    const char* const wanted = expected == wire::Role::kMaster ? "master" : "storage node";
    fail(ErrorKind::kConfig,
         endpoint_.text() + " is a " + found + ", not a " + wanted + ": check the address");
  }
  if (server_.version < identity.version_min || server_.version > identity.version_max) {
    fail(ErrorKind::kProtocol, endpoint_.text() + " chose protocol version " +
                                   std::to_string(server_.version) + ", which was not offered");
  }
  if (server_.auth_required == 0) {
    if (!identity.mac) return;
    // Whoever has a secret insists on it: an impostor would claim to need none.
    fail(ErrorKind::kConfig, endpoint_.text() +
                                 " has no shared secret, but one is set here: set the same "
                                 "secret_file on both");
  }
  if (!identity.mac) {
    fail(ErrorKind::kConfig, endpoint_.text() + " requires a shared secret: set secret_file");
  }
  wire::Auth mine;
  mine.proof = prove(identity.mac, wire::Role::kClient, hello.nonce, server_.nonce);
  const Frame reply = call(wire::Type::kAuth, wire::as_bytes(mine), {}, deadline);
  const auto theirs = wire::read_all<wire::Auth>(reply.payload, "AUTH reply");
  const wire::Mac wanted = prove(identity.mac, wire::Role::kMaster, hello.nonce, server_.nonce);
  if (!equal_in_constant_time(theirs.proof, wanted)) {
    fail(ErrorKind::kConfig, endpoint_.text() + " does not know the shared secret");
  }
}

bool Channel::stale() const noexcept {
  if (!fd_ || begin_ != end_ || !posted_.empty()) return true;
  pollfd waiting{.fd = fd_.get(), .events = POLLIN, .revents = 0};
  return ::poll(&waiting, 1, 0) != 0;
}

void Channel::fail(ErrorKind kind, const std::string& message, int error_number) {
  close();
  throw Error(kind, message, error_number);
}

void Channel::fail_io(const char* call, int error_number) {
  if (error_number == EAGAIN || error_number == EWOULDBLOCK) {
    fail(ErrorKind::kUnavailable, endpoint_.text() + " did not answer in time", ETIMEDOUT);
  }
  fail(ErrorKind::kUnavailable, endpoint_.text() + ": " + call + ": " + std::strerror(error_number),
       error_number);
}

// What is left of it; throws where nothing is, or where there is no connection.
std::int64_t Channel::left_us(TimePoint deadline) {
  if (!fd_) throw Error(ErrorKind::kUnavailable, endpoint_.text() + ": the connection is closed");
  const auto left =
      std::chrono::duration_cast<std::chrono::microseconds>(deadline - Clock::now()).count();
  if (left <= 0) {
    fail(ErrorKind::kUnavailable, endpoint_.text() + " did not answer in time", ETIMEDOUT);
  }
  return left;
}

void Channel::set_timeout(int option, TimePoint deadline) {
  const std::int64_t left = left_us(deadline);
  // The kernel's clock ticks in milliseconds, so a nearly equal value is left as it is.
  std::int64_t& current = timeout_us_[option == SO_RCVTIMEO ? 0 : 1];
  if (current > 0 && std::abs(current - left) * 64 < left) return;
  const timeval timeout{.tv_sec = left / 1'000'000, .tv_usec = left % 1'000'000};
  ::setsockopt(fd_.get(), SOL_SOCKET, option, &timeout, sizeof timeout);
  current = left;
}

// False when the time is over.
bool Channel::wait_writable(TimePoint deadline) {
  pollfd waiting{.fd = fd_.get(), .events = POLLOUT, .revents = 0};
  return ::poll(&waiting, 1, remaining_ms(deadline)) != 0;
}

// A peer that refuses what it is sent says why and closes; the words are there to be read although
// sending fails. Returns if there are none.
void Channel::throw_last_words(TimePoint deadline) {
  wire::ErrorReply error;
  try {
    wire::Header header;
    wire::Bytes payload;
    do {
      fill(sizeof header, deadline);
      header = wire::parse_header({buffer_.data() + begin_, sizeof header});
      fill(sizeof header + header.payload_bytes, deadline);
      payload = {buffer_.data() + begin_ + sizeof header, header.payload_bytes};
      begin_ += sizeof header + header.payload_bytes;
      if (header.bulk_bytes > 0) return;
    } while (header.type != wire::Type::kError);
    wire::check_payload(header, payload);
    error = wire::PayloadReader(payload, "ERROR").take<wire::ErrorReply>();
  } catch (const Error&) {
    return;
  }
  close();
  wire::throw_error(error);
}

void Channel::post(wire::Type type, wire::Bytes head, wire::Bytes tail) {
  const wire::Header header = wire::make_header(type, 0, next_request_id_++, head, tail, 0);
  for (const wire::Bytes piece : {wire::as_bytes(header), head, tail}) {
    posted_.insert(posted_.end(), piece.begin(), piece.end());
  }
}

void Channel::flush(TimePoint deadline) {
  if (posted_.empty()) return;
  parts_.clear();
  send_parts(deadline);
}

void Channel::send_parts(TimePoint deadline) {
  if (!posted_.empty()) parts_.insert(parts_.begin(), to_iovec(posted_));
  // A UNIX socket starts its time-out anew for every piece that it takes, so time is kept here.
  const int flags = MSG_NOSIGNAL | (endpoint_.is_unix ? MSG_DONTWAIT : 0);
  for (std::size_t next = 0; next < parts_.size();) {
    if (endpoint_.is_unix) {
      left_us(deadline);
    } else {
      set_timeout(SO_SNDTIMEO, deadline);
    }
    msghdr message{};
    message.msg_iov = parts_.data() + next;
    message.msg_iovlen = std::min(parts_.size() - next, kIovecsPerCall);
    const ssize_t n = ::sendmsg(fd_.get(), &message, flags);
    if (n < 0) {
      const int error = errno;
      if (error == EINTR) continue;
      if (error == EAGAIN && endpoint_.is_unix && wait_writable(deadline)) continue;
      if (error == EPIPE || error == ECONNRESET) throw_last_words(deadline);
      fail_io("send", error);
    }
    next = advance(parts_, next, static_cast<std::size_t>(n));
  }
  posted_.clear();
}

std::uint32_t Channel::send(wire::Type type, wire::Bytes head, wire::Bytes tail, TimePoint deadline,
                            std::span<const iovec> bulk) {
  std::uint64_t bulk_bytes = 0;
  for (const iovec& part : bulk) bulk_bytes += part.iov_len;
  const std::uint32_t request_id = next_request_id_++;
  const wire::Header header = wire::make_header(type, 0, request_id, head, tail, bulk_bytes);
  parts_.clear();
  parts_.push_back(to_iovec(wire::as_bytes(header)));
  if (!head.empty()) parts_.push_back(to_iovec(head));
  if (!tail.empty()) parts_.push_back(to_iovec(tail));
  parts_.insert(parts_.end(), bulk.begin(), bulk.end());
  send_parts(deadline);
  return request_id;
}

std::uint32_t Channel::begin_bulk(wire::Type type, wire::Bytes head, wire::Bytes tail,
                                  std::uint64_t bulk_bytes, TimePoint deadline) {
  const std::uint32_t request_id = next_request_id_++;
  const wire::Header header = wire::make_header(type, 0, request_id, head, tail, bulk_bytes);
  parts_ = {to_iovec(wire::as_bytes(header)), to_iovec(head), to_iovec(tail)};
  send_parts(deadline);
  return request_id;
}

void Channel::send_bulk(std::span<const iovec> parts, TimePoint deadline) {
  parts_.assign(parts.begin(), parts.end());
  send_parts(deadline);
}

// What one look finds, after the spin a blocking one.
ssize_t Channel::receive_some(TimePoint deadline, msghdr& message) {
  ssize_t received = -1;
  if (spin_receive(deadline, message, &received)) return received;
  set_timeout(SO_RCVTIMEO, deadline);
  return ::recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC);
}

// The peer, if it is on this host, ran where its last bytes were taken in: to spin there would only
// keep it waiting.
bool Channel::peer_shares_processor() const noexcept {
  int processor = -1;
  socklen_t length = sizeof processor;
  ::getsockopt(fd_.get(), SOL_SOCKET, SO_INCOMING_CPU, &processor, &length);
  return processor == ::sched_getcpu();
}

// False: nothing came, or it does not pay here (the peer is far away, or slow).
bool Channel::spin_receive(TimePoint deadline, msghdr& message, ssize_t* received) {
  if (spin_ <= Clock::duration::zero() || !fd_) return false;
  const std::uint32_t skips = (1u << std::min(spins_failed_, kSpinSkipsLog2Max)) - 1;
  if (spins_skipped_ < skips) {
    ++spins_skipped_;
    return false;
  }
  if (!endpoint_.is_unix && peer_shares_processor()) return false;
  spins_skipped_ = 0;
  const std::size_t control_bytes = message.msg_controllen;
  const TimePoint until = std::min(Clock::now() + spin_, deadline);
  do {
    message.msg_controllen = control_bytes;
    *received = ::recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (*received >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) {
      if (spins_failed_ > 0) --spins_failed_;
      return true;
    }
  } while (Clock::now() < until);
  message.msg_controllen = control_bytes;
  ++spins_failed_;
  return false;
}

void Channel::fill(std::size_t bytes, TimePoint deadline) {
  if (end_ - begin_ >= bytes) return;
  if (begin_ == end_) begin_ = end_ = 0;
  if (buffer_.size() - begin_ < bytes) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
    if (buffer_.size() < bytes) buffer_.resize(bytes);
  }
  while (end_ - begin_ < bytes) {
    iovec part{.iov_base = buffer_.data() + end_, .iov_len = buffer_.size() - end_};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = CMSG_LEN(sizeof(int));  // CMSG_SPACE has room for two, unasked
    const ssize_t n = receive_some(deadline, message);
    if (n == 0) {
      fail(ErrorKind::kUnavailable, endpoint_.text() + " closed the connection", ECONNRESET);
    }
    if (n < 0) {
      if (errno == EINTR) continue;
      fail_io("recv", errno);
    }
    const cmsghdr* const rights = CMSG_FIRSTHDR(&message);
    if (rights != nullptr && rights->cmsg_level == SOL_SOCKET && rights->cmsg_type == SCM_RIGHTS) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(rights), sizeof fd);
      passed_fd_.reset(fd);
    }
    end_ += static_cast<std::size_t>(n);
  }
}

Channel::Frame Channel::receive(wire::Type type, std::uint32_t request_id, TimePoint deadline) {
  try {
    for (;;) {
      fill(sizeof(wire::Header), deadline);
      Frame frame;
      frame.header = wire::parse_header({buffer_.data() + begin_, sizeof(wire::Header)});
      fill(sizeof(wire::Header) + frame.header.payload_bytes, deadline);
      frame.payload = {buffer_.data() + begin_ + sizeof(wire::Header), frame.header.payload_bytes};
      begin_ += sizeof(wire::Header) + frame.header.payload_bytes;
      wire::check_payload(frame.header, frame.payload);
      if (frame.header.type == wire::Type::kError) {
        const auto error = wire::PayloadReader(frame.payload, "ERROR").take<wire::ErrorReply>();
        const bool recoverable = wire::is_recoverable(error.code) && frame.header.request_id != 0;
        // About a message that has no response of its own: nobody waits for it.
        if (recoverable && frame.header.request_id != request_id) continue;
        if (!recoverable) close();
        wire::throw_error(error);
      }
      if (frame.header.type != type || frame.header.request_id != request_id ||
          !frame.header.is_response()) {
        fail(ErrorKind::kProtocol, endpoint_.text() + ": a " + wire::type_name(frame.header.type) +
                                       " frame came where the response to " +
                                       wire::type_name(type) + " was due");
      }
      return frame;
    }
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kProtocol) close();
    throw;
  }
}

void Channel::receive_bulk(std::span<const iovec> parts, TimePoint deadline) {
  parts_.assign(parts.begin(), parts.end());
  std::size_t next = advance(parts_, 0, 0);
  // What came along with the frame first.
  while (next < parts_.size() && begin_ != end_) {
    const std::size_t step = std::min(parts_[next].iov_len, end_ - begin_);
    std::memcpy(parts_[next].iov_base, buffer_.data() + begin_, step);
    begin_ += step;
    next = advance(parts_, next, step);
  }
  while (next < parts_.size()) {
    set_timeout(SO_RCVTIMEO, deadline);
    msghdr message{};
    message.msg_iov = parts_.data() + next;
    message.msg_iovlen = std::min(parts_.size() - next, kIovecsPerCall);
    const ssize_t n = ::recvmsg(fd_.get(), &message, MSG_WAITALL);
    if (n == 0) {
      fail(ErrorKind::kUnavailable, endpoint_.text() + " closed the connection", ECONNRESET);
    }
    if (n < 0) {
      if (errno == EINTR) continue;
      fail_io("recv", errno);
    }
    next = advance(parts_, next, static_cast<std::size_t>(n));
  }
}

}  // namespace hymcache
