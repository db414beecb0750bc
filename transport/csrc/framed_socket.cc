#include "transport/csrc/framed_socket.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "transport/csrc/iovecs.h"

namespace hymcache {
namespace {

// Enough for any request but PREFETCH and PUBLISH, whose senders' buffers grow; it is what an idle
// connection costs.
constexpr std::size_t kBufferBytes = 16u << 10;
constexpr std::size_t kSinkBytes = 64u << 10;
// A peer that sends requests and never reads the answers is cut off, not buffered for.
constexpr std::uint64_t kQueuedControlBytesMax = 16u << 20;
// After this much in one go other connections get their turn.
constexpr std::uint64_t kBytesPerTurn = 8u << 20;
// Of a large bulk the loop is told only so much at a time: fewer wake-ups, longer copies.
constexpr int kLowWaterBytes = 256 << 10;

}  // namespace

FramedSocket::FramedSocket(EventLoop& loop, UniqueFd fd, Delegate& delegate)
    : loop_(loop),
      fd_(std::move(fd)),
      delegate_(delegate),
      buffer_(kBufferBytes),
      interest_(EPOLLIN),
      last_sent_(loop.now()),
      last_received_(loop.now()) {
  loop_.watch(fd_.get(), interest_, [this](std::uint32_t events) { on_events(events); });
}

FramedSocket::~FramedSocket() {
  if (fd_) loop_.unwatch(fd_.get());
  for (Outgoing& outgoing : out_) {
    if (outgoing.sent) outgoing.sent();
  }
}

void FramedSocket::send(wire::Type type, std::uint16_t flags, std::uint32_t request_id,
                        wire::Bytes head, wire::Bytes tail, int fd_to_pass) {
  if (closing()) return;
  const wire::Header header = wire::make_header(type, flags, request_id, head, tail, 0);
  const std::size_t bytes = sizeof header + head.size() + tail.size();
  std::size_t sent = 0;
  if (out_.empty() && fd_to_pass < 0) {
    // The usual case: it fits the socket buffer, and nothing is allocated.
    iovec parts[3] = {to_iovec(wire::as_bytes(header)), to_iovec(head), to_iovec(tail)};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 3;
    const ssize_t n = ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n == static_cast<ssize_t>(bytes)) return;
    if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
      close(std::string("send: ") + std::strerror(errno));
      return;
    }
    sent = n > 0 ? static_cast<std::size_t>(n) : 0;
  }
  Outgoing outgoing;
  outgoing.owned.reserve(bytes);
  for (const wire::Bytes piece : {wire::as_bytes(header), head, tail}) {
    outgoing.owned.insert(outgoing.owned.end(), piece.begin(), piece.end());
  }
  outgoing.parts = {{.iov_base = outgoing.owned.data() + sent, .iov_len = bytes - sent}};
  outgoing.bytes = bytes - sent;
  outgoing.fd_to_pass = fd_to_pass;
  if (queued_bytes_ + outgoing.bytes > kQueuedControlBytesMax && out_.size() > 64) {
    close("the peer does not read its answers");
    return;
  }
  enqueue(std::move(outgoing));
}

void FramedSocket::send_bulk(wire::Type type, std::uint16_t flags, std::uint32_t request_id,
                             wire::Bytes head, wire::Bytes tail, std::vector<iovec> bulk,
                             Done sent) {
  if (closing()) {
    if (sent) sent();
    return;
  }
  std::uint64_t bulk_bytes = 0;
  for (const iovec& part : bulk) bulk_bytes += part.iov_len;
  const wire::Header header = wire::make_header(type, flags, request_id, head, tail, bulk_bytes);
  Outgoing outgoing;
  outgoing.owned.reserve(sizeof header + head.size() + tail.size());
  for (const wire::Bytes piece : {wire::as_bytes(header), head, tail}) {
    outgoing.owned.insert(outgoing.owned.end(), piece.begin(), piece.end());
  }
  outgoing.parts.reserve(1 + bulk.size());
  outgoing.parts.push_back(to_iovec(outgoing.owned));
  outgoing.parts.insert(outgoing.parts.end(), bulk.begin(), bulk.end());
  outgoing.bytes = outgoing.owned.size() + bulk_bytes;
  outgoing.sent = std::move(sent);
  enqueue(std::move(outgoing));
}

void FramedSocket::send_error(std::uint32_t request_id, wire::ErrorCode code,
                              std::string_view message) {
  const wire::ErrorReply reply = wire::make_error(code, message);
  send(wire::Type::kError, wire::kFlagResponse, request_id, wire::as_bytes(reply));
}

void FramedSocket::enqueue(Outgoing outgoing) {
  queued_bytes_ += outgoing.bytes;
  const bool was_empty = out_.empty();
  out_.push_back(std::move(outgoing));
  if (was_empty) {
    last_sent_ = loop_.now();
    flush_queue();
  }
}

ssize_t FramedSocket::send_parts(Outgoing& outgoing) {
  msghdr message{};
  message.msg_iov = outgoing.parts.data() + outgoing.next;
  message.msg_iovlen = std::min(outgoing.parts.size() - outgoing.next, kIovecsPerCall);
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (outgoing.fd_to_pass >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* const rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &outgoing.fd_to_pass, sizeof(int));
  }
  return ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void FramedSocket::flush_queue() {
  std::uint64_t turn_bytes = 0;
  while (!out_.empty() && !closing_) {
    Outgoing& outgoing = out_.front();
    const ssize_t n = send_parts(outgoing);
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) break;
      close(std::string("send: ") + std::strerror(errno));
      return;
    }
    outgoing.fd_to_pass = -1;
    last_sent_ = loop_.now();
    turn_bytes += static_cast<std::uint64_t>(n);
    queued_bytes_ -= static_cast<std::uint64_t>(n);
    outgoing.bytes -= static_cast<std::uint64_t>(n);
    outgoing.next = advance(outgoing.parts, outgoing.next, static_cast<std::size_t>(n));
    if (outgoing.bytes == 0) {
      const Done sent = std::move(outgoing.sent);
      out_.pop_front();
      if (sent) sent();
    }
    if (turn_bytes >= kBytesPerTurn) break;
  }
  if (out_.empty() && close_after_flush_) {
    close_after_flush_ = false;
    schedule_close();
    return;
  }
  update_interest();
}

void FramedSocket::update_interest() {
  if (closing_) return;
  const std::uint32_t wanted = (close_after_flush_ ? 0u : EPOLLIN) | (out_.empty() ? 0u : EPOLLOUT);
  if (wanted == interest_) return;
  interest_ = wanted;
  loop_.rewatch(fd_.get(), wanted);
}

void FramedSocket::on_events(std::uint32_t events) {
  if ((events & EPOLLOUT) != 0) flush_queue();
  if (closing()) {
    if (!closing_ && (events & (EPOLLERR | EPOLLHUP)) != 0) close(close_reason_);
    return;
  }
  if ((events & (EPOLLIN | EPOLLERR | EPOLLHUP)) == 0) return;
  std::uint64_t turns = 0;
  while (!closing() && receive_some()) {
    if (++turns >= 16) break;  // level-triggered: the rest comes in the next round
  }
}

bool FramedSocket::receive_some() {
  if (incoming_.bytes > 0) return receive_bulk_some();
  if (begin_ == end_) {
    begin_ = end_ = 0;
  } else if (end_ == buffer_.size()) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  const ssize_t n = ::recv(fd_.get(), buffer_.data() + end_, buffer_.size() - end_, MSG_DONTWAIT);
  if (n == 0) {
    close("the peer closed the connection");
    return false;
  }
  if (n < 0) {
    if (errno == EINTR) return true;
    if (errno != EAGAIN && errno != EWOULDBLOCK) {
      close(std::string("recv: ") + std::strerror(errno));
    }
    return false;
  }
  const bool filled = end_ + static_cast<std::size_t>(n) == buffer_.size();
  end_ += static_cast<std::size_t>(n);
  last_received_ = loop_.now();
  parse_frames();
  // A short read has emptied the socket: asking again would be a call for nothing.
  return filled || incoming_.bytes > 0;
}

void FramedSocket::parse_frames() {
  while (!closing() && incoming_.bytes == 0 && end_ - begin_ >= sizeof(wire::Header)) {
    wire::Header header;
    wire::Bytes payload;
    try {
      header = wire::parse_header({buffer_.data() + begin_, end_ - begin_}, payload_bytes_max_);
      const std::size_t frame_bytes = sizeof header + header.payload_bytes;
      if (end_ - begin_ < frame_bytes) {
        // Room for the rest of it: compacted here so that the buffer stays as small as it can.
        if (buffer_.size() - begin_ < frame_bytes) {
          std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
          end_ -= begin_;
          begin_ = 0;
          if (buffer_.size() < frame_bytes) buffer_.resize(frame_bytes);
        }
        return;
      }
      payload = {buffer_.data() + begin_ + sizeof header, header.payload_bytes};
      wire::check_payload(header, payload);
      begin_ += frame_bytes;
      dispatch(header, payload);
    } catch (const Error& error) {
      const bool unexpected = dynamic_cast<const wire::Unexpected*>(&error) != nullptr;
      peer_at_fault_ = true;
      send_error(header.request_id,
                 unexpected ? wire::ErrorCode::kUnexpected : wire::ErrorCode::kMalformed,
                 error.what());
      close(error.what(), /*flush=*/true);
      return;
    }
  }
}

void FramedSocket::dispatch(const wire::Header& header, wire::Bytes payload) {
  incoming_ = {};
  delegate_.on_frame(*this, header, payload);
  if (closing()) incoming_ = {};  // the delegate has had enough of this peer
  if (header.bulk_bytes == 0 || closing()) return;
  std::uint64_t named = 0;
  for (const iovec& part : incoming_.parts) named += part.iov_len;
  if (named == 0) {
    discard_bulk(header.bulk_bytes);
  } else if (named != header.bulk_bytes) {
    throw Error(ErrorKind::kProtocol, std::string(wire::type_name(header.type)) + ": " +
                                          std::to_string(header.bulk_bytes) +
                                          " bulk bytes announced, " + std::to_string(named) +
                                          " expected");
  } else {
    incoming_.bytes = named;
    incoming_.next = advance(incoming_.parts, 0, 0);  // a call with nothing to fill means "closed"
  }
  take_buffered_bulk();
  set_low_water();
}

void FramedSocket::receive_bulk(std::vector<iovec> bulk, Done received) {
  incoming_ = {.parts = std::move(bulk), .next = 0, .bytes = 0, .received = std::move(received)};
}

void FramedSocket::discard_bulk(std::uint64_t bytes) {
  // Into one small buffer, again and again: the bytes are of no use to anyone.
  static thread_local std::vector<std::byte> sink(kSinkBytes);
  incoming_.parts.clear();
  incoming_.next = 0;
  incoming_.bytes = bytes;
  while (bytes > 0) {
    const std::size_t step = std::min<std::uint64_t>(bytes, sink.size());
    incoming_.parts.push_back({.iov_base = sink.data(), .iov_len = step});
    bytes -= step;
  }
}

void FramedSocket::take_buffered_bulk() {
  const std::size_t buffered = std::min<std::uint64_t>(end_ - begin_, incoming_.bytes);
  std::size_t left = buffered;
  while (left > 0) {
    iovec& part = incoming_.parts[incoming_.next];
    const std::size_t step = std::min(left, part.iov_len);
    std::memcpy(part.iov_base, buffer_.data() + begin_, step);
    begin_ += step;
    left -= step;
    incoming_.next = advance(incoming_.parts, incoming_.next, step);
  }
  incoming_.bytes -= buffered;
  finish_bulk_if_complete();
}

bool FramedSocket::receive_bulk_some() {
  msghdr message{};
  message.msg_iov = incoming_.parts.data() + incoming_.next;
  message.msg_iovlen = std::min(incoming_.parts.size() - incoming_.next, kIovecsPerCall);
  const ssize_t n = ::recvmsg(fd_.get(), &message, MSG_DONTWAIT);
  if (n == 0) {
    close("the peer closed the connection");
    return false;
  }
  if (n < 0) {
    if (errno == EINTR) return true;
    if (errno != EAGAIN && errno != EWOULDBLOCK) {
      close(std::string("recv: ") + std::strerror(errno));
    }
    return false;
  }
  last_received_ = loop_.now();
  incoming_.next = advance(incoming_.parts, incoming_.next, static_cast<std::size_t>(n));
  incoming_.bytes -= static_cast<std::uint64_t>(n);
  finish_bulk_if_complete();
  set_low_water();
  return true;
}

void FramedSocket::set_low_water() {
  if (closing()) return;
  const int wanted = incoming_.bytes >= kLowWaterBytes ? kLowWaterBytes : 1;
  if (wanted == std::exchange(low_water_bytes_, wanted)) return;
  ::setsockopt(fd_.get(), SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted);
}

void FramedSocket::finish_bulk_if_complete() {
  if (incoming_.bytes > 0) return;
  const Done received = std::move(incoming_.received);
  incoming_ = {};
  if (received) received();
}

void FramedSocket::close(const std::string& reason, bool flush) {
  if (closing_ || (close_after_flush_ && flush)) return;
  if (!close_after_flush_) close_reason_ = reason;  // the first one is the cause
  if (flush && !out_.empty()) {
    close_after_flush_ = true;
    update_interest();
    return;
  }
  schedule_close();
}

bool FramedSocket::stalled(TimePoint now, Clock::duration limit) const noexcept {
  const bool receiving = incoming_.bytes > 0 || begin_ != end_;
  return (!out_.empty() && now - last_sent_ > limit) || (receiving && now - last_received_ > limit);
}

void FramedSocket::schedule_close() {
  closing_ = true;
  loop_.unwatch(fd_.get());
  ::shutdown(fd_.get(), SHUT_RDWR);
  fd_.reset();
  loop_.defer([self = std::weak_ptr(self_)] {
    const auto alive = self.lock();
    if (!alive) return;
    FramedSocket& socket = **alive;
    const std::string reason = socket.close_reason_;  // the delegate may destroy the socket
    socket.delegate_.on_closed(socket, reason);
  });
}

}  // namespace hymcache
