// A FramedSocket in a loop of its own that keeps what it gets, for tests that drive the other end.
#pragma once

#include <linux/sockios.h>
#include <sys/ioctl.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/cpp/raw_peer.h"
#include "transport/csrc/framed_socket.h"

namespace hymcache::wire_testing {

class RecordingSocket : private FramedSocket::Delegate {
 public:
  struct Frame {
    wire::Header header;
    ByteVector payload;
    ByteVector bulk;
    bool bulk_complete = false;
  };
  // Where the bulk bytes of a frame go: pieces of `bulk`, which has the size of the frame's. None:
  // they are discarded.
  using Cut = std::function<std::vector<iovec>(ByteVector& bulk)>;
  using OnFrame = std::function<void(FramedSocket&, const wire::Header&, wire::Bytes)>;

  explicit RecordingSocket(UniqueFd fd, OnFrame on_frame = {})
      : on_frame_(std::move(on_frame)), thread_("recorder") {
    call([&](auto&) {
      socket_ = std::make_unique<FramedSocket>(thread_.loop(), std::move(fd),
                                               static_cast<FramedSocket::Delegate&>(*this));
    });
  }
  ~RecordingSocket() override {
    destroy();
    thread_.stop();
  }

  // Everything below is done in the loop's thread.
  template <class F>
  void call(F task) {
    thread_.loop().call([&] { task(socket_); });
  }
  void cut_bulk(Cut cut) {
    call([&](auto&) { cut_ = std::move(cut); });
  }
  void destroy() {
    call([](auto& socket) { socket.reset(); });
  }
  void destroy_when_closed() {
    call([this](auto&) { destroy_when_closed_ = true; });
  }
  std::vector<Frame> frames() {
    std::vector<Frame> copy;
    call([&](auto&) {
      for (const auto& frame : frames_) copy.push_back(*frame);
    });
    return copy;
  }
  std::vector<std::string> closed() {
    std::vector<std::string> copy;
    call([&](auto&) { copy = closed_; });
    return copy;
  }
  std::string wait_closed() {
    eventually([this] { return !closed().empty(); });
    return closed().front();
  }
  std::vector<Frame> wait_frames(std::size_t count) {
    eventually([&] {
      const auto now = frames();
      return now.size() >= count && now[count - 1].bulk_complete;
    });
    return frames();
  }

 private:
  void on_frame(FramedSocket& socket, const wire::Header& header, wire::Bytes payload) override {
    frames_.push_back(std::make_unique<Frame>());
    Frame& frame = *frames_.back();
    frame.header = header;
    frame.payload = to_vector(payload);
    frame.bulk_complete = header.bulk_bytes == 0;
    if (header.bulk_bytes > 0 && cut_) {
      frame.bulk.resize(header.bulk_bytes);
      socket.receive_bulk(cut_(frame.bulk), [&frame] { frame.bulk_complete = true; });
    }
    if (on_frame_) on_frame_(socket, header, payload);
  }
  void on_closed(FramedSocket&, const std::string& reason) override {
    closed_.push_back(reason);
    if (destroy_when_closed_) socket_.reset();
  }

  OnFrame on_frame_;
  Cut cut_ = [](ByteVector& bulk) {
    return std::vector<iovec>{{.iov_base = bulk.data(), .iov_len = bulk.size()}};
  };
  bool destroy_when_closed_ = false;
  std::vector<std::unique_ptr<Frame>> frames_;  // their memory stays where it is
  std::vector<std::string> closed_;
  std::unique_ptr<FramedSocket> socket_;
  LoopThread thread_;
};

// Until the other end of a UNIX socket pair has taken all that was written to this one.
inline void wait_drained(int fd) {
  eventually([fd] {
    int bytes = 0;
    REQUIRE(::ioctl(fd, SIOCOUTQ, &bytes) == 0);
    return bytes == 0;
  });
}

}  // namespace hymcache::wire_testing
