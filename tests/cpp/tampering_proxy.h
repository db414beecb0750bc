// A TCP proxy between a client and a server that does to the stream what bad networks do: flips a
// bit, cuts the connection, or stops, at a chosen byte.
#pragma once

#include <doctest/doctest.h>
#include <sys/socket.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "hymcache/csrc/unique_fd.h"
#include "transport/csrc/endpoint.h"

namespace hymcache::testing {

struct Tampering {
  enum class Kind : std::uint8_t { kNone, kFlip, kCut, kStall };
  Kind kind = Kind::kNone;
  bool to_client = true;  // which way the bytes go
  std::uint64_t at = 0;   // of each connection's bytes in that direction
  std::uint8_t mask = 1;  // what is flipped
};

class TamperingProxy {
 public:
  TamperingProxy(const Endpoint& listen, Endpoint upstream)
      : upstream_(std::move(upstream)), listener_(listen_socket(listen, &port_)) {
    acceptor_ = std::thread([this] { accept_all(); });
  }
  ~TamperingProxy() {
    stopping_ = true;
    drop_connections();
    acceptor_.join();
    for (std::thread& thread : threads_) thread.join();
  }

  std::uint16_t port() const { return port_; }
  // For connections made from now on; those that there are end.
  void set(const Tampering& tampering) {
    {
      const std::lock_guard lock(mutex_);
      tampering_ = tampering;
    }
    drop_connections();
  }
  bool has_tampered() const { return has_tampered_; }
  // Of the last connection: so much can be tampered with.
  std::uint64_t bytes(bool to_client) const { return to_client ? to_client_ : to_server_; }

 private:
  struct Pair {
    UniqueFd client, server;
  };

  void accept_all() {
    while (!stopping_) {
      UniqueFd client(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!client) {
        ::usleep(1000);
        continue;
      }
      auto pair = std::make_shared<Pair>();
      try {
        pair->server = connect_socket(upstream_, Clock::now() + std::chrono::seconds(5));
      } catch (const Error&) {
        continue;
      }
      pair->client = std::move(client);
      const std::lock_guard lock(mutex_);
      pairs_.push_back(pair);
      to_client_ = to_server_ = 0;
      const Tampering tampering = tampering_;
      threads_.emplace_back([this, pair, tampering] { copy(*pair, true, tampering); });
      threads_.emplace_back([this, pair, tampering] { copy(*pair, false, tampering); });
    }
  }

  void copy(const Pair& pair, bool to_client, const Tampering& tampering) {
    const int from = to_client ? pair.server.get() : pair.client.get();
    const int to = to_client ? pair.client.get() : pair.server.get();
    std::atomic<std::uint64_t>& total = to_client ? to_client_ : to_server_;
    std::vector<std::uint8_t> buffer(16u << 10);
    std::uint64_t done = 0;
    for (;;) {
      const ssize_t got = ::recv(from, buffer.data(), buffer.size(), 0);
      if (got <= 0) break;
      auto bytes = static_cast<std::uint64_t>(got);
      total += bytes;
      const bool here = tampering.kind != Tampering::Kind::kNone &&
                        tampering.to_client == to_client && tampering.at >= done &&
                        tampering.at < done + bytes;
      if (here) {
        has_tampered_ = true;
        if (tampering.kind == Tampering::Kind::kFlip) {
          buffer[tampering.at - done] ^= tampering.mask;
        } else {
          bytes = tampering.at - done;
        }
      }
      for (std::uint64_t sent = 0; sent < bytes;) {
        const ssize_t n = ::send(to, buffer.data() + sent, bytes - sent, MSG_NOSIGNAL);
        if (n <= 0) break;
        sent += static_cast<std::uint64_t>(n);
      }
      done += bytes;
      if (here && tampering.kind == Tampering::Kind::kCut) break;
      if (here && tampering.kind == Tampering::Kind::kStall) return;  // the rest is never read
    }
    ::shutdown(from, SHUT_RDWR);
    ::shutdown(to, SHUT_RDWR);
  }

  void drop_connections() {
    const std::lock_guard lock(mutex_);
    for (const auto& pair : pairs_) {
      ::shutdown(pair->client.get(), SHUT_RDWR);
      ::shutdown(pair->server.get(), SHUT_RDWR);
    }
    pairs_.clear();
  }

  const Endpoint upstream_;
  std::uint16_t port_ = 0;
  UniqueFd listener_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> has_tampered_{false};
  std::atomic<std::uint64_t> to_client_{0};
  std::atomic<std::uint64_t> to_server_{0};
  std::mutex mutex_;  // guards what follows
  Tampering tampering_;
  std::vector<std::shared_ptr<Pair>> pairs_;
  std::vector<std::thread> threads_;  // grows in the acceptor only
  std::thread acceptor_;
};

}  // namespace hymcache::testing
