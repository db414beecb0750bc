// Endpoints: their text, and sockets that listen and connect where they can.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <thread>

#include "tests/cpp/served_peers.h"
#include "transport/csrc/endpoint.h"

namespace hymcache::wire_testing {
namespace {

std::string refusal(const std::string& text) {
  const Thrown thrown = thrown_by([&] { Endpoint::parse(text); });
  CHECK(thrown.kind == ErrorKind::kConfig);
  CHECK(thrown.text.find("'" + text + "' is not an endpoint: ") == 0);
  CHECK(thrown.text.ends_with("(expected host:port, [ipv6]:port or unix:/path)"));
  return thrown.text;
}

UniqueFd listen_at(Endpoint endpoint) { return listen_socket(endpoint, &endpoint.port); }

bool is_socket(const Endpoint& endpoint) {
  struct stat found{};
  return ::lstat(endpoint.host.c_str(), &found) == 0 && S_ISSOCK(found.st_mode);
}

}  // namespace

TEST_CASE("endpoint: what is written is what is meant") {
  struct Case {
    const char* text;
    Endpoint endpoint;
  };
  const Case cases[] = {
      {"node-1:7400", {.host = "node-1", .port = 7400, .is_unix = false}},
      {"10.0.0.1:0", {.host = "10.0.0.1", .port = 0, .is_unix = false}},
      {"[::1]:65535", {.host = "::1", .port = 65535, .is_unix = false}},
      {"[fe80::1%eth0]:1", {.host = "fe80::1%eth0", .port = 1, .is_unix = false}},
      {":7400", {.host = "", .port = 7400, .is_unix = false}},
      {"unix:/run/a b:c/s.sock", {.host = "/run/a b:c/s.sock", .port = 0, .is_unix = true}},
  };
  for (const Case& one : cases) {
    CAPTURE(one.text);
    CHECK(Endpoint::parse(one.text) == one.endpoint);
    CHECK(one.endpoint.text() == one.text);
  }
}

TEST_CASE("endpoint: what cannot be meant is refused with the reason") {
  CHECK(refusal("").find("the port is missing") != std::string::npos);
  CHECK(refusal("node-1").find("the port is missing") != std::string::npos);
  for (const char* const text : {"node-1:", "node-1:x", "node-1:70000", "node-1:-1", "node-1:+1",
                                 "node-1: 1", "node-1:1 ", "node-1:1.5", "[::1]:"}) {
    CHECK(refusal(text).find("the port must be a number up to 65535") != std::string::npos);
  }
  CHECK(refusal("::1:7400").find("an IPv6 address needs brackets") != std::string::npos);
  CHECK(refusal("[]:1").find("brackets are for IPv6 addresses") != std::string::npos);
  CHECK(refusal("[node-1]:1").find("brackets are for IPv6 addresses") != std::string::npos);
  CHECK(refusal("unix:").find("the path must be absolute") != std::string::npos);
  CHECK(refusal("unix:run/s").find("the path must be absolute") != std::string::npos);
}

TEST_CASE("endpoint: port 0 becomes a port, and a port in use is named") {
  Endpoint endpoint = loopback();
  const UniqueFd first = listen_socket(endpoint, &endpoint.port);
  CHECK(endpoint.port != 0);
  CHECK((::fcntl(first.get(), F_GETFL) & O_NONBLOCK) != 0);
  CHECK(connect_socket(endpoint, Clock::now() + kPatience));
  const Thrown thrown = thrown_by([&] { listen_at(endpoint); });
  CHECK(thrown.kind == ErrorKind::kConfig);
  CHECK(thrown.error_number == EADDRINUSE);
  CHECK(thrown.text.find("cannot listen on " + endpoint.text()) == 0);
  CHECK(thrown.text.find("another process listens there; choose another port") !=
        std::string::npos);
  const Thrown elsewhere = thrown_by([] { listen_at(Endpoint::parse("192.0.2.1:0")); });
  CHECK(elsewhere.kind == ErrorKind::kConfig);
  CHECK(elsewhere.text.find("no interface of this machine has that address") != std::string::npos);
}

TEST_CASE("endpoint: a host that is not there is unavailable, and cannot be listened on") {
  const Endpoint endpoint = Endpoint::parse("no-such-host.invalid:1");
  CHECK(thrown_by([&] { connect_socket(endpoint, Clock::now() + kPatience); }).kind ==
        ErrorKind::kUnavailable);
  const Thrown thrown = thrown_by([&] { listen_at(endpoint); });
  CHECK(thrown.kind == ErrorKind::kConfig);
  CHECK(thrown.text.find("cannot resolve no-such-host.invalid:1") == 0);
}

TEST_CASE("endpoint: a server that is too busy to take connections runs into the deadline") {
  TemporaryFolder folder;
  for (Endpoint endpoint : {loopback(), folder.unix_endpoint("busy")}) {
    CAPTURE(endpoint.text());
    const UniqueFd listener = listen_socket(endpoint, &endpoint.port);
    REQUIRE(::listen(listener.get(), 0) == 0);  // nobody accepts, and the backlog is the smallest
    const auto limit = std::chrono::milliseconds(100);
    std::vector<UniqueFd> waiting;
    const Thrown thrown = thrown_by([&] {
      for (int i = 0; i < 10; ++i)
        waiting.push_back(connect_socket(endpoint, Clock::now() + limit));
    });
    CHECK(thrown.kind == ErrorKind::kUnavailable);
    CHECK(thrown.text.find("cannot connect to " + endpoint.text()) == 0);
    CHECK(waiting.size() < 5);
  }
}

TEST_CASE("endpoint: a full backlog is waited for") {
  TemporaryFolder folder;
  Endpoint endpoint = folder.unix_endpoint("busy");
  const UniqueFd listener = listen_socket(endpoint, nullptr);
  REQUIRE(::listen(listener.get(), 0) == 0);
  const UniqueFd first = connect_socket(endpoint, Clock::now() + kPatience);
  std::thread later([&] {
    ::usleep(20'000);
    const UniqueFd accepted(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    ::usleep(20'000);
  });
  CHECK(connect_socket(endpoint, Clock::now() + kPatience));
  later.join();
}

TEST_CASE("endpoint: the socket of a dead process is replaced") {
  TemporaryFolder folder;
  const Endpoint endpoint = folder.unix_endpoint("node");
  listen_at(endpoint);  // and at once nobody holds it any more, as after a crash
  REQUIRE(is_socket(endpoint));
  CHECK(thrown_by([&] { connect_socket(endpoint, Clock::now() + kPatience); }).error_number ==
        ECONNREFUSED);
  const UniqueFd second = listen_at(endpoint);
  CHECK(connect_socket(endpoint, Clock::now() + kPatience));
}

TEST_CASE("endpoint: the socket of a live process stays its own") {
  TemporaryFolder folder;
  const Endpoint endpoint = folder.unix_endpoint("node");
  const UniqueFd owner = listen_at(endpoint);
  std::vector<UniqueFd> waiting;
  for (const bool full : {false, true}) {
    CAPTURE(full);
    if (full) {
      // One that does not come to accept is alive all the same.
      REQUIRE(::listen(owner.get(), 0) == 0);
      thrown_by([&] {
        for (;;) {
          waiting.push_back(connect_socket(endpoint, Clock::now() + std::chrono::milliseconds(20)));
        }
      });
    }
    const Thrown thrown = thrown_by([&] { listen_at(endpoint); });
    CHECK(thrown.kind == ErrorKind::kConfig);
    CHECK(thrown.error_number == EADDRINUSE);
    CHECK(is_socket(endpoint));
  }
}

TEST_CASE("endpoint: what is no listening stream socket is left alone") {
  TemporaryFolder folder;
  const Endpoint file = folder.unix_endpoint("file");
  {
    const UniqueFd made(::open(file.host.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
  }
  CHECK(thrown_by([&] { listen_at(file); }).kind == ErrorKind::kConfig);
  CHECK(::access(file.host.c_str(), F_OK) == 0);

  const Endpoint datagrams = folder.unix_endpoint("datagrams");
  const UniqueFd owner(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, datagrams.host.data(), datagrams.host.size());
  REQUIRE(::bind(owner.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  CHECK(thrown_by([&] { listen_at(datagrams); }).error_number == EPROTOTYPE);
  CHECK(is_socket(datagrams));
}

TEST_CASE("endpoint: a UNIX socket is for its owner and the group") {
  TemporaryFolder folder;
  const Endpoint endpoint = folder.unix_endpoint("node");
  const UniqueFd listener = listen_at(endpoint);
  struct stat found{};
  REQUIRE(::lstat(endpoint.host.c_str(), &found) == 0);
  CHECK((found.st_mode & 0777) == 0660);
}

TEST_CASE("endpoint: a path that cannot be, is refused with the reason") {
  TemporaryFolder folder;
  Endpoint endpoint = folder.unix_endpoint("x");
  endpoint.host = "/tmp/" + std::string(120, 'x');
  for (const Thrown& thrown : {thrown_by([&] { listen_at(endpoint); }), thrown_by([&] {
                                 connect_socket(endpoint, Clock::now() + kPatience);
                               })}) {
    CHECK(thrown.kind == ErrorKind::kConfig);
    CHECK(thrown.text.find("longer than 107 bytes") != std::string::npos);
  }
  endpoint.host = folder.file("no-folder") + "/node.sock";
  CHECK(thrown_by([&] { listen_at(endpoint); }).text.find("the folder is not there") !=
        std::string::npos);
  CHECK(thrown_by([&] { connect_socket(endpoint, Clock::now() + kPatience); }).error_number ==
        ENOENT);
}

TEST_CASE("endpoint: the time that is left is never negative, and bounded") {
  CHECK(remaining_ms(Clock::now() - std::chrono::seconds(5)) == 0);
  const int some = remaining_ms(Clock::now() + std::chrono::milliseconds(50));
  CHECK(some > 0);
  CHECK(some <= 50);
  CHECK(remaining_ms(Clock::now() + std::chrono::hours(10'000)) == 3'600'000);
}

}  // namespace hymcache::wire_testing
