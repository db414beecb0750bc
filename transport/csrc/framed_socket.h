// Frames over one non-blocking socket in an event loop; the same for both ends of a connection.
//
// Control frames are parsed out of one receive buffer. Bulk bytes are received straight into the
// memory that the delegate names, and sent straight from where they lie.
#pragma once

#include <sys/uio.h>

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transport/csrc/event_loop.h"
#include "transport/csrc/wire.h"

namespace hymcache {

class FramedSocket {
 public:
  class Delegate {
   public:
    virtual ~Delegate() = default;
    // May throw Error: the peer gets an ERROR frame (kUnexpected for wire::Unexpected, kMalformed
    // for others) and the connection is closed.
    // If header.bulk_bytes > 0 the delegate calls receive_bulk() in here, or they are discarded.
    virtual void on_frame(FramedSocket& socket, const wire::Header& header,
                          wire::Bytes payload) = 0;
    // Once, at the end of the round; the socket may be destroyed in here (and not in on_frame).
    virtual void on_closed(FramedSocket& socket, const std::string& reason) = 0;
  };
  using Done = std::function<void()>;

  FramedSocket(EventLoop& loop, UniqueFd fd, Delegate& delegate);
  ~FramedSocket();
  FramedSocket(const FramedSocket&) = delete;
  FramedSocket& operator=(const FramedSocket&) = delete;

  // Sends head and tail as one payload. `fd_to_pass` goes along (UNIX sockets only) and must stay
  // open as long as this socket.
  void send(wire::Type type, std::uint16_t flags, std::uint32_t request_id, wire::Bytes head,
            wire::Bytes tail = {}, int fd_to_pass = -1);
  // The same with bulk bytes, which must stay as they are until `sent` is called, exactly once:
  // when they have left, which may be before this returns, or when this socket is destroyed.
  void send_bulk(wire::Type type, std::uint16_t flags, std::uint32_t request_id, wire::Bytes head,
                 wire::Bytes tail, std::vector<iovec> bulk, Done sent);
  void send_error(std::uint32_t request_id, wire::ErrorCode code, std::string_view message);

  // Only in on_frame: where the bulk bytes of this frame go. `received` is called when all are
  // there; not at all if the connection ends before. It must not throw.
  void receive_bulk(std::vector<iovec> bulk, Done received);

  // Idempotent; on_closed follows in this round's end. With `flush`, what is queued goes first:
  // nothing more is sent or received, and a second close() without `flush` cuts it short.
  void close(const std::string& reason, bool flush = false);
  bool closing() const noexcept { return closing_ || close_after_flush_; }
  // The peer broke the protocol, which is why the connection ends.
  bool peer_at_fault() const noexcept { return peer_at_fault_; }
  std::uint64_t queued_bytes() const noexcept { return queued_bytes_; }
  // There is something to send, or a frame has begun to come, and nothing has moved for so long.
  bool stalled(TimePoint now, Clock::duration limit) const noexcept;
  // A tighter bound than wire::kPayloadBytesMax on what the peer may send.
  void set_payload_bytes_max(std::uint32_t bytes) noexcept { payload_bytes_max_ = bytes; }

 private:
  struct Outgoing {
    std::vector<std::byte> owned;  // header and payload, or what was left of them
    std::vector<iovec> parts;      // what remains to be sent, `owned` included
    std::size_t next = 0;          // first part not yet sent
    std::uint64_t bytes = 0;
    int fd_to_pass = -1;
    Done sent;
  };
  struct Incoming {
    std::vector<iovec> parts;
    std::size_t next = 0;
    std::uint64_t bytes = 0;  // still to come
    Done received;
  };

  void on_events(std::uint32_t events);
  bool receive_some();  // false: nothing more for now
  void parse_frames();
  void dispatch(const wire::Header& header, wire::Bytes payload);
  void take_buffered_bulk();
  bool receive_bulk_some();
  void discard_bulk(std::uint64_t bytes);
  void finish_bulk_if_complete();
  void set_low_water();
  void enqueue(Outgoing outgoing);
  void flush_queue();
  ssize_t send_parts(Outgoing& outgoing);
  void update_interest();
  void schedule_close();

  EventLoop& loop_;
  UniqueFd fd_;
  Delegate& delegate_;
  std::vector<std::byte> buffer_;
  std::size_t begin_ = 0;  // of what is buffered and not yet parsed
  std::size_t end_ = 0;
  Incoming incoming_;
  std::deque<Outgoing> out_;
  std::uint64_t queued_bytes_ = 0;
  std::uint32_t payload_bytes_max_ = wire::kPayloadBytesMax;
  std::uint32_t interest_ = 0;
  int low_water_bytes_ = 1;  // what has to have come before the loop is told
  bool closing_ = false;
  bool close_after_flush_ = false;
  bool peer_at_fault_ = false;
  std::string close_reason_;
  TimePoint last_sent_;
  TimePoint last_received_;
  std::shared_ptr<FramedSocket*> self_ =
      std::make_shared<FramedSocket*>(this);  // for deferred work
};

}  // namespace hymcache
