// Accepts connections, shakes hands, and hands frames of known peers to its handler.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/csrc/endpoint.h"
#include "transport/csrc/framed_socket.h"
#include "transport/csrc/handshake.h"

namespace hymcache {

struct FrameServerOptions {
  std::vector<Endpoint> listen;
  std::uint32_t connections_max = 4096;
  Clock::duration handshake_timeout = std::chrono::seconds(5);
  // A connection that takes no byte of what it is sent, or stops in the middle of a frame, for so
  // long is closed.
  Clock::duration stall_timeout = std::chrono::seconds(30);
};

struct FrameServerStats {
  std::uint64_t accepted = 0;
  std::uint64_t refused = 0;          // over the limit, or the handshake failed
  std::uint64_t protocol_errors = 0;  // connections ended for what they sent
  std::uint64_t frames = 0;
  std::uint32_t connections = 0;
};

class FrameServer : private FramedSocket::Delegate {
 public:
  class Peer {
   public:
    FramedSocket& socket() noexcept { return *socket_; }
    std::uint64_t id() const noexcept { return id_; }
    bool is_unix() const noexcept { return is_unix_; }
    wire::Role role() const noexcept { return role_; }
    const std::string& name() const noexcept { return name_; }
    // Answers the request `header` with one payload in two pieces.
    void reply(const wire::Header& header, wire::Bytes head, wire::Bytes tail = {},
               int fd_to_pass = -1) {
      socket_->send(header.type, wire::kFlagResponse, header.request_id, head, tail, fd_to_pass);
    }

   private:
    friend class FrameServer;
    enum class State { kHello, kAuth, kOpen };
    std::unique_ptr<FramedSocket> socket_;
    std::uint64_t id_ = 0;
    bool is_unix_ = false;
    wire::Role role_ = wire::Role::kClient;
    std::string name_;
    State state_ = State::kHello;
    TimePoint accepted_at_{};
    wire::Nonce client_nonce_{};
    wire::Nonce server_nonce_{};
  };

  class Handler {
   public:
    virtual ~Handler() = default;
    // As FramedSocket::Delegate::on_frame, for requests of peers that have shaken hands.
    virtual void on_frame(Peer& peer, const wire::Header& header, wire::Bytes payload) = 0;
    virtual void on_peer_gone(Peer& peer) = 0;  // only for peers that had shaken hands
  };

  // Listens at once; throws ConfigError where it cannot. Serves when `loop` runs.
  FrameServer(EventLoop& loop, Identity identity, FrameServerOptions options, Handler& handler);
  ~FrameServer() override;

  // The endpoints as bound (port 0 replaced).
  const std::vector<Endpoint>& endpoints() const noexcept { return endpoints_; }
  FrameServerStats stats() const noexcept;
  Peer* find(std::uint64_t peer_id) noexcept;

 private:
  struct Listener {
    UniqueFd fd;
    bool is_unix = false;
    EventLoop::TimerId pause;  // until it is looked at again
  };

  void accept_some(std::size_t listener);
  void pause(std::size_t listener);
  void refuse_busy(int fd);
  void on_frame(FramedSocket& socket, const wire::Header& header, wire::Bytes payload) override;
  void on_closed(FramedSocket& socket, const std::string& reason) override;
  void on_hello(Peer& peer, const wire::Header& header, wire::Bytes payload);
  void on_auth(Peer& peer, const wire::Header& header, wire::Bytes payload);
  void check_timeouts();

  EventLoop& loop_;
  const Identity identity_;
  const FrameServerOptions options_;
  Handler& handler_;
  std::vector<Endpoint> endpoints_;
  std::vector<Listener> listeners_;
  std::unordered_map<FramedSocket*, std::unique_ptr<Peer>> peers_;
  std::unordered_map<std::uint64_t, Peer*> peers_by_id_;
  std::uint64_t next_peer_id_ = 1;
  EventLoop::TimerId timer_;
  FrameServerStats stats_;
};

}  // namespace hymcache
