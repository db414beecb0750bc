#include "transport/csrc/frame_server.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>

namespace hymcache {

FrameServer::FrameServer(EventLoop& loop, Identity identity, FrameServerOptions options,
                         Handler& handler)
    : loop_(loop), identity_(std::move(identity)), options_(std::move(options)), handler_(handler) {
  for (Endpoint endpoint : options_.listen) {
    listeners_.push_back(listen_socket(endpoint, &endpoint.port));
    endpoints_.push_back(endpoint);
    const int fd = listeners_.back().get();
    loop_.watch(fd, EPOLLIN, [this, fd, is_unix = endpoint.is_unix](std::uint32_t) {
      accept_some(fd, is_unix);
    });
  }
  timer_ = loop_.after(std::chrono::seconds(1), [this] { check_timeouts(); });
}

FrameServer::~FrameServer() {
  loop_.cancel(timer_);
  for (const UniqueFd& listener : listeners_) loop_.unwatch(listener.get());
  for (const Endpoint& endpoint : endpoints_) {
    if (endpoint.is_unix) ::unlink(endpoint.host.c_str());
  }
}

FrameServerStats FrameServer::stats() const noexcept {
  FrameServerStats stats = stats_;
  stats.connections = static_cast<std::uint32_t>(peers_.size());
  return stats;
}

FrameServer::Peer* FrameServer::find(std::uint64_t peer_id) noexcept {
  const auto found = peers_by_id_.find(peer_id);
  return found == peers_by_id_.end() ? nullptr : found->second;
}

void FrameServer::accept_some(int listener, bool is_unix) {
  // A few at a time: a flood of connections must not keep those that are open waiting.
  for (int i = 0; i < 32; ++i) {
    UniqueFd fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EMFILE || errno == ENFILE) {
        // Out of descriptors: the listener stays readable, so look away for a moment.
        ++stats_.refused;
        loop_.rewatch(listener, 0);
        loop_.after(std::chrono::milliseconds(100),
                    [this, listener] { loop_.rewatch(listener, EPOLLIN); });
      }
      return;
    }
    if (peers_.size() >= options_.connections_max) {
      ++stats_.refused;
      continue;  // closed; the client sees it at once and tries elsewhere
    }
    tune_socket(fd.get());
    auto peer = std::make_unique<Peer>();
    peer->id_ = next_peer_id_++;
    peer->is_unix_ = is_unix;
    peer->accepted_at_ = loop_.now();
    peer->socket_ =
        std::make_unique<FramedSocket>(loop_, std::move(fd), static_cast<Delegate&>(*this));
    ++stats_.accepted;
    peers_by_id_.emplace(peer->id_, peer.get());
    FramedSocket* const socket = peer->socket_.get();
    peers_.emplace(socket, std::move(peer));
  }
}

void FrameServer::on_frame(FramedSocket& socket, const wire::Header& header, wire::Bytes payload) {
  Peer& peer = *peers_.at(&socket);
  ++stats_.frames;
  try {
    if (peer.state_ == Peer::State::kOpen) {
      handler_.on_frame(peer, header, payload);
      return;
    }
    // Nothing but the handshake, and no bulk bytes, from somebody unknown.
    if (header.bulk_bytes > 0) throw Error(ErrorKind::kProtocol, "bulk bytes before HELLO");
    if (peer.state_ == Peer::State::kHello && header.type == wire::Type::kHello) {
      on_hello(peer, header, payload);
    } else if (peer.state_ == Peer::State::kAuth && header.type == wire::Type::kAuth) {
      on_auth(peer, header, payload);
    } else {
      throw Error(ErrorKind::kProtocol,
                  std::string(wire::type_name(header.type)) + " before the handshake is over");
    }
  } catch (const Error&) {
    ++stats_.protocol_errors;
    throw;
  }
}

void FrameServer::on_hello(Peer& peer, const wire::Header& header, wire::Bytes payload) {
  wire::PayloadReader reader(payload, "HELLO");
  const auto hello = reader.take<wire::Hello>();
  wire::HelloReply reply;
  try {
    reply.version = agree_on_version(identity_, hello);
  } catch (const Error& error) {
    ++stats_.refused;
    peer.socket().send_error(header.request_id, wire::ErrorCode::kVersion, error.what());
    peer.socket().close(error.what(), /*flush=*/true);
    return;
  }
  peer.role_ = hello.role;
  peer.name_ = wire::from_text(hello.name);
  peer.client_nonce_ = hello.nonce;
  peer.server_nonce_ = random_nonce();
  reply.role = identity_.role;
  reply.auth_required = identity_.mac ? 1 : 0;
  reply.node = identity_.node;
  reply.features = identity_.features & hello.features;
  reply.incarnation = identity_.incarnation;
  reply.nonce = peer.server_nonce_;
  reply.name = wire::to_text<64>(std::string_view(identity_.name).substr(0, 63));
  peer.state_ = identity_.mac ? Peer::State::kAuth : Peer::State::kOpen;
  peer.reply(header, wire::as_bytes(reply));
}

void FrameServer::on_auth(Peer& peer, const wire::Header& header, wire::Bytes payload) {
  wire::PayloadReader reader(payload, "AUTH");
  const auto auth = reader.take<wire::Auth>();
  const wire::Mac expected =
      prove(identity_.mac, wire::Role::kClient, peer.client_nonce_, peer.server_nonce_);
  if (!equal_in_constant_time(auth.proof, expected)) {
    ++stats_.refused;
    const std::string message = identity_.name + " refuses the shared secret of " + peer.name_ +
                                ": set the same secret_file on both";
    peer.socket().send_error(header.request_id, wire::ErrorCode::kAuthentication, message);
    peer.socket().close(message, /*flush=*/true);
    return;
  }
  wire::Auth mine;
  mine.proof = prove(identity_.mac, wire::Role::kMaster, peer.client_nonce_, peer.server_nonce_);
  peer.state_ = Peer::State::kOpen;
  peer.reply(header, wire::as_bytes(mine));
}

void FrameServer::on_closed(FramedSocket& socket, const std::string&) {
  const auto found = peers_.find(&socket);
  const std::unique_ptr<Peer> peer = std::move(found->second);
  peers_.erase(found);
  peers_by_id_.erase(peer->id());
  if (peer->state_ == Peer::State::kOpen) handler_.on_peer_gone(*peer);
}

void FrameServer::check_timeouts() {
  const TimePoint now = loop_.now();
  for (const auto& [socket, peer] : peers_) {
    if (peer->state_ != Peer::State::kOpen &&
        now - peer->accepted_at_ > options_.handshake_timeout) {
      ++stats_.refused;
      socket->close("no handshake in time");
    } else if (socket->sending() && now - socket->last_progress() > options_.send_timeout) {
      socket->close("the peer takes no bytes");
    }
  }
  timer_ = loop_.after(std::chrono::seconds(1), [this] { check_timeouts(); });
}

}  // namespace hymcache
