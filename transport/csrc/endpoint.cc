#include "transport/csrc/endpoint.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <fstream>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "hymcache/csrc/error.h"

namespace hymcache {
namespace {

constexpr int kSocketBufferBytes = 4 << 20;
constexpr int kBacklog = 1024;
constexpr auto kRetry = std::chrono::milliseconds(2);

sockaddr_un unix_address(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) {
    throw Error(ErrorKind::kConfig, "the UNIX socket path is longer than " +
                                        std::to_string(sizeof address.sun_path - 1) +
                                        " bytes: " + path);
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

AddressList resolve(const Endpoint& endpoint, int flags, ErrorKind kind) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  const int rc = ::getaddrinfo(endpoint.host.empty() ? nullptr : endpoint.host.c_str(),
                               std::to_string(endpoint.port).c_str(), &hints, &found);
  if (rc != 0) {
    throw Error(kind, "cannot resolve " + endpoint.text() + ": " + ::gai_strerror(rc));
  }
  return {found, &::freeaddrinfo};
}

// What a thread finds out for somebody who may have gone by then.
struct Resolution {
  std::mutex mutex;
  std::condition_variable is_over;
  AddressList found{nullptr, &::freeaddrinfo};
  std::exception_ptr error;
  bool over = false;
};

// getaddrinfo(3) knows no deadline, and a name server that is away costs it half a minute: names
// are looked up by a thread that is left to itself when time is up. Addresses need none.
AddressList resolve_until(const Endpoint& endpoint, TimePoint deadline) {
  try {
    return resolve(endpoint, AI_NUMERICHOST, ErrorKind::kUnavailable);
  } catch (const Error&) {
    // It is a name.
  }
  const auto resolution = std::make_shared<Resolution>();
  auto look_up = [resolution, endpoint] {
    AddressList found{nullptr, &::freeaddrinfo};
    std::exception_ptr error;
    try {
      found = resolve(endpoint, 0, ErrorKind::kUnavailable);
    } catch (const Error&) {
      error = std::current_exception();
    }
    const std::lock_guard lock(resolution->mutex);
    resolution->found = std::move(found);
    resolution->error = error;
    resolution->over = true;
    resolution->is_over.notify_one();
  };
  try {
    std::thread(look_up).detach();
  } catch (const std::system_error& failure) {
    throw Error(ErrorKind::kUnavailable,
                "cannot resolve " + endpoint.text() + ": " + failure.what());
  }
  std::unique_lock lock(resolution->mutex);
  if (!resolution->is_over.wait_until(lock, deadline, [&] { return resolution->over; })) {
    throw Error(ErrorKind::kUnavailable,
                "cannot resolve " + endpoint.text() + ": the name server does not answer in time");
  }
  if (resolution->error) std::rethrow_exception(resolution->error);
  return std::move(resolution->found);
}

// Connects within the deadline; returns errno, 0 when connected.
int connect_within(int fd, const sockaddr* address, socklen_t length, TimePoint deadline) {
  const int flags = ::fcntl(fd, F_GETFL);
  ::fcntl(fd, F_SETFL, flags | O_NONBLOCK);
  int error = ::connect(fd, address, length) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    pollfd waiting{.fd = fd, .events = POLLOUT, .revents = 0};
    int ready = 0;
    do {
      ready = ::poll(&waiting, 1, remaining_ms(deadline));
    } while (ready < 0 && errno == EINTR);
    socklen_t size = sizeof error;
    if (ready <= 0) {
      error = ready == 0 ? ETIMEDOUT : errno;
    } else if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0) {
      error = errno;
    }
  }
  ::fcntl(fd, F_SETFL, flags);
  return error;
}

// A connection to a port where nobody listens may end up with itself, if the kernel picks that very
// port for this end; it would then keep the server from coming back.
bool is_connected_to_itself(int fd) {
  sockaddr_storage here{};
  sockaddr_storage there{};
  socklen_t here_bytes = sizeof here;
  socklen_t there_bytes = sizeof there;
  return ::getsockname(fd, reinterpret_cast<sockaddr*>(&here), &here_bytes) == 0 &&
         ::getpeername(fd, reinterpret_cast<sockaddr*>(&there), &there_bytes) == 0 &&
         here_bytes == there_bytes && std::memcmp(&here, &there, here_bytes) == 0;
}

// Where the system allows less than we want, the kernel's own tuning does better than the most that
// could be asked for, and asking would switch it off.
bool may_set_buffers() {
  static const bool may = [] {
    for (const char* const path : {"/proc/sys/net/core/rmem_max", "/proc/sys/net/core/wmem_max"}) {
      std::ifstream file(path);
      long bytes = 0;
      if (!(file >> bytes) || bytes < kSocketBufferBytes) return false;
    }
    return true;
  }();
  return may;
}

[[noreturn]] void cannot_listen(const Endpoint& endpoint, const char* call) {
  const int error = errno;
  std::string hint;
  if (error == EADDRINUSE) {
    hint = endpoint.is_unix ? ": something is there already; choose another path"
                            : ": another process listens there; choose another port";
  }
  if (error == EADDRNOTAVAIL) hint = ": no interface of this machine has that address";
  if (error == EACCES) hint = ": not permitted; choose a port above 1023 or another path";
  if (error == ENOENT) hint = ": the folder is not there; make it or choose another path";
  throw Error(ErrorKind::kConfig,
              "cannot listen on " + endpoint.text() + " (" + call + ": " + std::strerror(error) +
                  ")" + hint,
              error);
}

UniqueFd listen_unix(const Endpoint& endpoint) {
  const sockaddr_un address = unix_address(endpoint.host);
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) cannot_listen(endpoint, "socket");
  struct stat found{};
  if (::lstat(endpoint.host.c_str(), &found) == 0 && S_ISSOCK(found.st_mode)) {
    // Left behind by a process that died, or in use (EAGAIN: by one with a full backlog): only the
    // former may be removed.
    const UniqueFd probe(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int rc =
        ::connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
    if (rc == 0 || errno == EAGAIN) errno = EADDRINUSE;
    if (errno != ECONNREFUSED) cannot_listen(endpoint, "connect");
    ::unlink(endpoint.host.c_str());
  }
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    cannot_listen(endpoint, "bind");
  }
  // Whoever may connect may map the region: the owner and the group. Nobody connects yet.
  if (::chmod(endpoint.host.c_str(), 0660) != 0) cannot_listen(endpoint, "chmod");
  if (::listen(fd.get(), kBacklog) != 0) cannot_listen(endpoint, "listen");
  return fd;
}

}  // namespace

Endpoint Endpoint::parse(const std::string& text) {
  const auto bad = [&](const char* why) {
    return Error(ErrorKind::kConfig, "'" + text + "' is not an endpoint: " + why +
                                         " (expected host:port, [ipv6]:port or unix:/path)");
  };
  Endpoint endpoint;
  if (text.starts_with("unix:")) {
    endpoint.is_unix = true;
    endpoint.host = text.substr(5);
    if (endpoint.host.empty() || endpoint.host.front() != '/')
      throw bad("the path must be absolute");
    return endpoint;
  }
  const std::size_t colon = text.rfind(':');
  if (colon == std::string::npos) throw bad("the port is missing");
  endpoint.host = text.substr(0, colon);
  if (endpoint.host.starts_with('[') && endpoint.host.ends_with(']')) {
    endpoint.host = endpoint.host.substr(1, endpoint.host.size() - 2);
    if (endpoint.host.find(':') == std::string::npos) throw bad("brackets are for IPv6 addresses");
  } else if (endpoint.host.find(':') != std::string::npos) {
    throw bad("an IPv6 address needs brackets");
  }
  const char* const first = text.data() + colon + 1;
  const char* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(first, last, endpoint.port);
  if (error != std::errc{} || end != last) throw bad("the port must be a number up to 65535");
  return endpoint;
}

std::string Endpoint::text() const {
  if (is_unix) return "unix:" + host;
  const bool v6 = host.find(':') != std::string::npos;
  return (v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

void tune_socket(int fd) {
  const int one = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  if (may_set_buffers()) {
    ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &kSocketBufferBytes, sizeof kSocketBufferBytes);
    ::setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &kSocketBufferBytes, sizeof kSocketBufferBytes);
  }
  // A host that vanished without a word is noticed in about a minute.
  const int idle_s = 30, interval_s = 10, probes = 3;
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

int remaining_ms(TimePoint deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 3'600'000));
}

UniqueFd connect_socket(const Endpoint& endpoint, TimePoint deadline) {
  const auto unavailable = [&](int error) {
    return Error(ErrorKind::kUnavailable,
                 "cannot connect to " + endpoint.text() + ": " + std::strerror(error), error);
  };
  if (endpoint.is_unix) {
    const sockaddr_un address = unix_address(endpoint.host);
    UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!fd) throw unavailable(errno);
    for (;;) {
      const int error = connect_within(fd.get(), reinterpret_cast<const sockaddr*>(&address),
                                       sizeof address, deadline);
      if (error == 0) return fd;
      // A full backlog: the server is there and accepts in a moment.
      if (error != EAGAIN || Clock::now() >= deadline) throw unavailable(error);
      std::this_thread::sleep_for(kRetry);
    }
  }
  const AddressList addresses = resolve_until(endpoint, deadline);
  int error = EHOSTUNREACH;
  for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
    UniqueFd fd(::socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!fd) {
      error = errno;
      continue;
    }
    tune_socket(fd.get());
    error = connect_within(fd.get(), a->ai_addr, a->ai_addrlen, deadline);
    if (error == 0 && is_connected_to_itself(fd.get())) error = ECONNREFUSED;
    if (error == 0) return fd;
  }
  throw unavailable(error);
}

UniqueFd listen_socket(const Endpoint& endpoint, std::uint16_t* bound_port) {
  if (endpoint.is_unix) return listen_unix(endpoint);
  const AddressList addresses = resolve(endpoint, AI_PASSIVE, ErrorKind::kConfig);
  const addrinfo* const a = addresses.get();
  UniqueFd fd(::socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) cannot_listen(endpoint, "socket");
  const int one = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  tune_socket(fd.get());  // accepted sockets inherit the buffers, and the window scale they need
  if (::bind(fd.get(), a->ai_addr, a->ai_addrlen) != 0) cannot_listen(endpoint, "bind");
  if (::listen(fd.get(), kBacklog) != 0) cannot_listen(endpoint, "listen");
  if (bound_port != nullptr) {
    sockaddr_storage bound{};
    socklen_t size = sizeof bound;
    ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound), &size);
    *bound_port =
        ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(bound).sin6_port
                                          : reinterpret_cast<const sockaddr_in&>(bound).sin_port);
  }
  return fd;
}

}  // namespace hymcache
