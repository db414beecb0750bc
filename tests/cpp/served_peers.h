// Servers for tests: a real FrameServer whose handler is a function, and scripted ones that do what
// no correct server does.
#pragma once

#include <doctest/doctest.h>
#include <poll.h>
#include <stdlib.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/raw_peer.h"
#include "transport/csrc/frame_server.h"

namespace hymcache::wire_testing {

class TemporaryFolder {
 public:
  TemporaryFolder() { REQUIRE(::mkdtemp(path_.data()) != nullptr); }
  ~TemporaryFolder() {
    for (const std::string& file : files_) ::unlink(file.c_str());
    ::rmdir(path_.c_str());
  }
  // A path in it, removed with it.
  std::string file(const std::string& name) {
    files_.push_back(path_ + "/" + name);
    return files_.back();
  }
  Endpoint unix_endpoint(const std::string& name) {
    return {.host = file(name), .port = 0, .is_unix = true};
  }

 private:
  std::string path_ = "/tmp/hymcache-test-XXXXXX";
  std::vector<std::string> files_;
};

inline const Endpoint& loopback() {
  static const Endpoint endpoint{.host = "127.0.0.1", .port = 0, .is_unix = false};
  return endpoint;
}

// In the place of HMAC, which comes in from outside: some function of secret and message.
inline MacFunction mac_of(std::string secret) {
  return [secret = std::move(secret)](std::string_view message) {
    wire::Mac mac{};
    std::uint64_t state = 0xCBF29CE484222325;
    for (std::size_t i = 0; i < mac.size(); ++i) {
      for (const char c : secret + std::string(message)) {
        state = (state ^ static_cast<unsigned char>(c)) * 0x100000001B3;
      }
      mac[i] = static_cast<std::uint8_t>(state >> 32);
    }
    return mac;
  };
}

class TestServer : private FrameServer::Handler {
 public:
  using OnFrame = std::function<void(FrameServer::Peer&, const wire::Header&, wire::Bytes)>;

  // By default each request is answered with its own payload.
  explicit TestServer(FrameServerOptions options = {},
                      Identity identity = {.role = wire::Role::kNode,
                                           .name = "node-1",
                                           .mac = nullptr},
                      OnFrame on_frame = echo)
      : on_frame_(std::move(on_frame)), thread_("server") {
    if (options.listen.empty()) options.listen = {loopback()};
    call([&] {
      server_ =
          std::make_unique<FrameServer>(thread_.loop(), std::move(identity), std::move(options),
                                        static_cast<FrameServer::Handler&>(*this));
      endpoints_ = server_->endpoints();
    });
  }
  ~TestServer() override {
    call([this] { server_.reset(); });
    thread_.stop();
  }

  template <class F>
  void call(F task) {
    thread_.loop().call(task);
  }
  const Endpoint& endpoint(std::size_t i = 0) const { return endpoints_.at(i); }
  FrameServer& server() { return *server_; }  // in call() only
  void destroy_server() {
    call([this] { server_.reset(); });
  }
  FrameServerStats stats() {
    FrameServerStats stats;
    call([&] { stats = server_->stats(); });
    return stats;
  }
  int peers_gone() const { return peers_gone_; }

  static void echo(FrameServer::Peer& peer, const wire::Header& header, wire::Bytes payload) {
    peer.reply(header, payload);
  }

 private:
  void on_frame(FrameServer::Peer& peer, const wire::Header& header, wire::Bytes payload) override {
    on_frame_(peer, header, payload);
  }
  void on_peer_gone(FrameServer::Peer&) override { ++peers_gone_; }

  OnFrame on_frame_;
  std::atomic<int> peers_gone_ = 0;
  std::vector<Endpoint> endpoints_;
  std::unique_ptr<FrameServer> server_;
  LoopThread thread_;
};

// Accepts connections one after the other and gives each to the script.
class ScriptedServer {
 public:
  using Script = std::function<void(RawPeer&)>;

  explicit ScriptedServer(Script script, Endpoint endpoint = loopback())
      : endpoint_(std::move(endpoint)),
        listener_(listen_socket(endpoint_, &endpoint_.port)),
        thread_([this, script = std::move(script)] { serve(script); }) {}
  ~ScriptedServer() {
    ::shutdown(listener_.get(), SHUT_RDWR);
    thread_.join();
  }
  const Endpoint& endpoint() const { return endpoint_; }

 private:
  void serve(const Script& script) {
    for (;;) {
      pollfd waiting{.fd = listener_.get(), .events = POLLIN, .revents = 0};
      ::poll(&waiting, 1, -1);
      UniqueFd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!fd) return;
      RawPeer peer(std::move(fd));
      script(peer);
    }
  }

  Endpoint endpoint_;
  UniqueFd listener_;
  std::thread thread_;
};

inline wire::Hello hello_of(const char* name) {
  wire::Hello hello;
  hello.name = wire::to_text<64>(name);
  return hello;
}

// The client's part of a handshake without a secret.
inline wire::HelloReply say_hello(RawPeer& peer, const wire::Hello& hello = hello_of("raw")) {
  REQUIRE(peer.write(frame_bytes(wire::Type::kHello, 0, 1, wire::as_bytes(hello))));
  const auto frame = peer.read_frame();
  REQUIRE(frame.has_value());
  REQUIRE(frame->header.type == wire::Type::kHello);
  REQUIRE(frame->header.is_response());
  REQUIRE(frame->header.request_id == 1);
  return wire::PayloadReader(frame->payload, "HELLO reply").take<wire::HelloReply>();
}

// The server's part, without a secret.
inline wire::Hello answer_hello(RawPeer& peer, wire::HelloReply reply = {
                                                   .version = 1, .role = wire::Role::kNode}) {
  const auto frame = peer.read_frame();
  REQUIRE(frame.has_value());
  peer.write(frame_bytes(wire::Type::kHello, wire::kFlagResponse, frame->header.request_id,
                         wire::as_bytes(reply)));
  return wire::PayloadReader(frame->payload, "HELLO").take<wire::Hello>();
}

// The kind and the text of what `action` throws.
struct Thrown {
  ErrorKind kind;
  std::string text;
  int error_number;
};
template <class Action>
Thrown thrown_by(Action action) {
  try {
    action();
  } catch (const Error& error) {
    return {error.kind(), error.what(), error.error_number()};
  }
  FAIL("nothing is thrown");
  return {ErrorKind::kDevice, "", 0};
}

}  // namespace hymcache::wire_testing
