#include "bench/csrc/reference_echo.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <string>

#include "hymcache/csrc/error.h"

namespace hymcache::bench {
namespace {

constexpr std::size_t kReceiveBytes = 64u << 10;
constexpr timeval kSilenceMax{.tv_sec = 30, .tv_usec = 0};

struct Connection {
  UniqueFd fd;
  std::uint64_t received = 0;  // bytes of the request that is arriving
};

[[noreturn]] void fail(const char* what) {
  throw Error(ErrorKind::kUnavailable, std::string("echo: ") + what + ": " + std::strerror(errno));
}

void watch(int epoll, int fd) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  if (::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0) fail("epoll_ctl");
}

}  // namespace

void serve_echo(UniqueFd listener, std::uint32_t request_bytes, std::uint32_t response_bytes) {
  const UniqueFd epoll(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll) fail("epoll_create1");
  watch(epoll.get(), listener.get());
  std::map<int, Connection> connections;
  const std::vector<char> response(response_bytes, 1);
  std::vector<char> buffer(kReceiveBytes);
  std::array<epoll_event, 64> events;
  for (bool served = false; !served || !connections.empty();) {
    const int ready = ::epoll_wait(epoll.get(), events.data(), events.size(), -1);
    if (ready < 0 && errno != EINTR) fail("epoll_wait");
    for (int i = 0; i < ready; ++i) {
      const int fd = events[static_cast<std::size_t>(i)].data.fd;
      if (fd == listener.get()) {
        UniqueFd client(::accept4(fd, nullptr, nullptr, SOCK_CLOEXEC));
        if (!client) fail("accept");
        const int one = 1;
        ::setsockopt(client.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        watch(epoll.get(), client.get());
        const int key = client.get();
        connections.try_emplace(key, Connection{.fd = std::move(client)});
        served = true;
        continue;
      }
      const ssize_t n = ::recv(fd, buffer.data(), buffer.size(), 0);
      if (n <= 0) {
        connections.erase(fd);
        continue;
      }
      Connection& connection = connections.at(fd);
      connection.received += static_cast<std::uint64_t>(n);
      for (; connection.received >= request_bytes; connection.received -= request_bytes) {
        if (::send(fd, response.data(), response.size(), MSG_NOSIGNAL) < 0) fail("send");
      }
    }
  }
}

EchoClient::EchoClient(UniqueFd socket, std::uint32_t request_bytes, std::uint32_t response_bytes)
    : socket_(std::move(socket)), request_(request_bytes, 1), response_(response_bytes) {
  ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &kSilenceMax, sizeof kSilenceMax);
}

void EchoClient::round_trip() {
  const auto sent = ::send(socket_.get(), request_.data(), request_.size(), MSG_NOSIGNAL);
  if (sent != static_cast<ssize_t>(request_.size())) fail("send");
  const auto received = ::recv(socket_.get(), response_.data(), response_.size(), MSG_WAITALL);
  if (received != static_cast<ssize_t>(response_.size())) fail("recv");
}

}  // namespace hymcache::bench
