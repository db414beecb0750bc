#include "transport/csrc/frame_server.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>

namespace hymcache {
namespace {

constexpr auto kTick = std::chrono::seconds(1);
constexpr int kAcceptsPerTurn = 32;

}  // namespace

FrameServer::FrameServer(EventLoop& loop, Identity identity, FrameServerOptions options,
                         Handler& handler)
    : loop_(loop), identity_(std::move(identity)), options_(std::move(options)), handler_(handler) {
  for (Endpoint endpoint : options_.listen) {
    listeners_.push_back(
        {.fd = listen_socket(endpoint, &endpoint.port), .is_unix = endpoint.is_unix, .pause = {}});
    endpoints_.push_back(endpoint);
  }
  for (std::size_t i = 0; i < listeners_.size(); ++i) {
    loop_.watch(listeners_[i].fd.get(), EPOLLIN, [this, i](std::uint32_t) { accept_some(i); });
  }
  timer_ = loop_.after(kTick, [this] { check_timeouts(); });
}

FrameServer::~FrameServer() {
  loop_.cancel(timer_);
  for (const Listener& listener : listeners_) {
    loop_.cancel(listener.pause);
    loop_.unwatch(listener.fd.get());
  }
  for (const Endpoint& endpoint : endpoints_) {
    if (endpoint.is_unix) ::unlink(endpoint.host.c_str());
  }
  // What was being sent is called back for, and may ask for its peer: there is none any more.
  peers_by_id_.clear();
  peers_.clear();
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

void FrameServer::accept_some(std::size_t listener) {
  // A few at a time: a flood of connections must not keep those that are open waiting.
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    UniqueFd fd(
        ::accept4(listeners_[listener].fd.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) pause(listener);
      return;
    }
    if (peers_.size() >= options_.connections_max) {
      refuse_busy(fd.get());
      continue;
    }
    tune_socket(fd.get());
    auto peer = std::make_unique<Peer>();
    peer->id_ = next_peer_id_++;
    peer->is_unix_ = listeners_[listener].is_unix;
    peer->accepted_at_ = loop_.now();
    try {
      peer->socket_ =
          std::make_unique<FramedSocket>(loop_, std::move(fd), static_cast<Delegate&>(*this));
    } catch (const Error&) {  // the kernel watches no more descriptors for this user
      ++stats_.refused;
      continue;
    }
    peer->socket_->set_payload_bytes_max(wire::kHandshakePayloadBytesMax);
    ++stats_.accepted;
    peers_by_id_.emplace(peer->id_, peer.get());
    FramedSocket* const socket = peer->socket_.get();
    peers_.emplace(socket, std::move(peer));
  }
}

// Out of descriptors or memory: the listener stays readable, so look away for a moment.
void FrameServer::pause(std::size_t listener) {
  ++stats_.refused;
  loop_.rewatch(listeners_[listener].fd.get(), 0);
  listeners_[listener].pause = loop_.after(std::chrono::milliseconds(100), [this, listener] {
    loop_.rewatch(listeners_[listener].fd.get(), EPOLLIN);
  });
}

void FrameServer::refuse_busy(int fd) {
  ++stats_.refused;
  const wire::ErrorReply reply = wire::make_error(
      wire::ErrorCode::kBusy, identity_.name + " has as many connections as it takes (" +
                                  std::to_string(options_.connections_max) + ")");
  const wire::Header header =
      wire::make_header(wire::Type::kError, wire::kFlagResponse, 0, wire::as_bytes(reply), 0);
  std::array<std::byte, sizeof header + sizeof reply> frame;
  std::memcpy(frame.data(), &header, sizeof header);
  std::memcpy(frame.data() + sizeof header, &reply, sizeof reply);
  // It fits any socket buffer; if not, the connection's end says enough.
  [[maybe_unused]] const ssize_t n =
      ::send(fd, frame.data(), frame.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

void FrameServer::on_frame(FramedSocket& socket, const wire::Header& header, wire::Bytes payload) {
  Peer& peer = *peers_.at(&socket);
  ++stats_.frames;
  const char* const type = wire::type_name(header.type);
  if (header.is_response()) {
    throw wire::Unexpected(std::string("a response (") + type + ") where only requests may come");
  }
  const bool hello = header.type == wire::Type::kHello;
  const bool auth = header.type == wire::Type::kAuth;
  if (peer.state_ == Peer::State::kOpen) {
    if (hello || auth) throw wire::Unexpected(std::string(type) + " after the handshake");
    handler_.on_frame(peer, header, payload);
    return;
  }
  // Nothing but the handshake, and no bulk bytes, from somebody unknown.
  if (!(peer.state_ == Peer::State::kHello ? hello : auth)) {
    throw wire::Unexpected(std::string(type) + " before the handshake is over");
  }
  if (header.bulk_bytes > 0) throw wire::Unexpected(std::string(type) + " with bulk bytes");
  if (hello) {
    on_hello(peer, header, payload);
  } else {
    on_auth(peer, header, payload);
  }
  if (peer.state_ == Peer::State::kOpen) socket.set_payload_bytes_max(wire::kPayloadBytesMax);
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
  if (!wire::is_known(hello.role)) {
    throw Error(ErrorKind::kProtocol,
                "HELLO: there is no role " + std::to_string(static_cast<int>(hello.role)));
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
  const auto auth = wire::read_all<wire::Auth>(payload, "AUTH");
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
  if (socket.peer_at_fault()) ++stats_.protocol_errors;
  if (peer->state_ == Peer::State::kOpen) handler_.on_peer_gone(*peer);
}

void FrameServer::check_timeouts() {
  const TimePoint now = loop_.now();
  for (const auto& [socket, peer] : peers_) {
    if (peer->state_ != Peer::State::kOpen &&
        now - peer->accepted_at_ > options_.handshake_timeout) {
      if (!socket->closing()) ++stats_.refused;
      socket->close("no handshake in time");
    } else if (socket->stalled(now, options_.stall_timeout)) {
      socket->close("the peer has stalled");
    }
  }
  timer_ = loop_.after(kTick, [this] { check_timeouts(); });
}

}  // namespace hymcache
