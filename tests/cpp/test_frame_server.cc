// FrameServer: many peers, rude peers, and no more descriptors.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/resource.h>

#include <random>

#include "tests/cpp/served_peers.h"
#include "transport/csrc/channel.h"
#include "transport/csrc/frame_server.h"

namespace hymcache::wire_testing {
namespace {

using wire::ErrorCode;
using wire::Type;

const Identity kNode{.role = wire::Role::kNode, .name = "node-1", .mac = nullptr};

std::unique_ptr<Channel> connect(const Endpoint& endpoint) {
  return Channel::connect(endpoint, {.name = "engine-1", .mac = nullptr}, wire::Role::kNode,
                          Clock::now() + kPatience);
}

bool answers(Channel& channel) {
  const ByteVector question = pattern(50, 1);
  const auto frame = channel.call(Type::kMembers, question, {}, Clock::now() + kPatience);
  return to_vector(frame.payload) == question;
}

// Until destroyed, the process can open no descriptor more than it has.
class NoMoreDescriptors {
 public:
  NoMoreDescriptors() {
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &before_) == 0);
    const int lowest_free = ::fcntl(0, F_DUPFD_CLOEXEC, 0);
    REQUIRE(lowest_free >= 0);
    ::close(lowest_free);
    rlimit now = before_;
    now.rlim_cur = static_cast<rlim_t>(lowest_free);
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &now) == 0);
  }
  ~NoMoreDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

// Descriptors that are there before they run out, to be connected then.
UniqueFd unconnected_socket() {
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  REQUIRE(fd);
  return fd;
}

void connect_to(int fd, const Endpoint& endpoint) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(endpoint.port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  REQUIRE(::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
}

}  // namespace

TEST_CASE("frame server: a thousand connections come, talk and go") {
  rlimit limit{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, std::max<rlim_t>(limit.rlim_cur, 4096));
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &limit) == 0);
  constexpr std::size_t kPeers = 1000;
  TemporaryFolder folder;
  TestServer server({.listen = {loopback(), folder.unix_endpoint("server")}}, kNode);
  std::vector<RawPeer> peers;
  for (std::size_t i = 0; i < kPeers; ++i) {
    peers.push_back(RawPeer::connect(server.endpoint(i % 2)));
    peers.back().write(frame_bytes(Type::kHello, 0, 1, wire::as_bytes(hello_of("raw"))));
  }
  for (RawPeer& peer : peers) CHECK(peer.read_frame()->header.type == Type::kHello);
  CHECK(server.stats().connections == kPeers);
  for (RawPeer& peer : peers) peer.write(frame_bytes(Type::kMembers, 0, 2, {}));
  for (RawPeer& peer : peers) CHECK(peer.read_frame()->header.request_id == 2);
  peers.clear();
  eventually([&] { return server.peers_gone() == static_cast<int>(kPeers); });
  const FrameServerStats stats = server.stats();
  CHECK(stats.connections == 0);
  CHECK(stats.accepted == kPeers);
  CHECK(stats.refused == 0);
  CHECK(stats.protocol_errors == 0);
  CHECK(stats.frames == 2 * kPeers);
}

TEST_CASE("frame server: connections over the limit are told so, and one that leaves makes room") {
  TemporaryFolder folder;
  TestServer server({.listen = {loopback(), folder.unix_endpoint("server")}, .connections_max = 3},
                    kNode);
  for (const std::size_t listener : {0u, 1u}) {
    CAPTURE(listener);
    std::vector<std::unique_ptr<Channel>> channels;
    eventually([&] { return server.stats().connections == 0; });
    for (int i = 0; i < 3; ++i) channels.push_back(connect(server.endpoint(listener)));
    for (int i = 0; i < 20; ++i) {
      const Thrown thrown = thrown_by([&] { connect(server.endpoint(listener)); });
      CHECK(thrown.kind == ErrorKind::kUnavailable);
      CHECK(thrown.text == "node-1 has as many connections as it takes (3)");
    }
    for (const auto& channel : channels) CHECK(answers(*channel));
    channels.pop_back();
    eventually([&] { return server.stats().connections == 2; });
    channels.push_back(connect(server.endpoint(listener)));
    CHECK(answers(*channels.back()));
  }
  CHECK(server.stats().refused == 40);
}

TEST_CASE("frame server: who does not shake hands in time is shown out") {
  Identity secured = kNode;
  secured.mac = mac_of("secret");
  TestServer server({.listen = {}, .handshake_timeout = std::chrono::milliseconds(50)}, secured);
  TestServer open({.listen = {}, .handshake_timeout = std::chrono::milliseconds(50)}, kNode);
  const auto channel = connect(open.endpoint());
  RawPeer silent = RawPeer::connect(server.endpoint());
  RawPeer half = RawPeer::connect(server.endpoint());
  half.write(wire::Bytes(frame_bytes(Type::kHello, 0, 1, ByteVector(96))).first(50));
  RawPeer unproven = RawPeer::connect(server.endpoint());
  say_hello(unproven);
  CHECK(silent.at_end());
  CHECK(half.at_end());
  CHECK(unproven.at_end());
  eventually([&] { return server.stats().connections == 0; });
  CHECK(server.stats().refused == 3);
  CHECK(server.peers_gone() == 0);  // the handler never knew of them
  CHECK(answers(*channel));
}

TEST_CASE("frame server: who stalls in the middle is shown out, who is idle is not") {
  ByteVector large(40u << 20);  // more than any socket takes that nobody reads from
  TestServer server({.listen = {}, .stall_timeout = std::chrono::milliseconds(50)}, kNode,
                    [&](FrameServer::Peer& peer, const wire::Header& header, wire::Bytes payload) {
                      if (header.type != Type::kWait) return peer.reply(header, payload);
                      peer.socket().send_bulk(
                          header.type, wire::kFlagResponse, header.request_id, {}, {},
                          {{.iov_base = large.data(), .iov_len = large.size()}}, [] {});
                    });
  RawPeer idle = RawPeer::connect(server.endpoint());
  RawPeer half_frame = RawPeer::connect(server.endpoint());
  RawPeer half_bulk = RawPeer::connect(server.endpoint());
  RawPeer deaf = RawPeer::connect(server.endpoint());
  for (RawPeer* peer : {&idle, &half_frame, &half_bulk, &deaf}) say_hello(*peer);
  const ByteVector write = frame_bytes(Type::kWrite, 0, 2, pattern(8, 1), pattern(1000, 2));
  half_frame.write(wire::Bytes(write).first(20));
  half_bulk.write(wire::Bytes(write).first(500));
  deaf.write(frame_bytes(Type::kWait, 0, 2, {}));
  eventually([&] { return server.peers_gone() == 3; });
  CHECK(half_frame.at_end());
  half_bulk.read_frame();  // the echo of what came before the bulk bytes
  CHECK(half_bulk.at_end());
  idle.write(frame_bytes(Type::kLookup, 0, 3, pattern(5, 1)));
  CHECK(idle.read_frame()->payload == pattern(5, 1));
}

TEST_CASE("frame server: out of descriptors, those that are open go on, the others wait") {
  TestServer server({}, kNode);
  const auto channel = connect(server.endpoint());
  UniqueFd waiting = unconnected_socket();
  {
    const NoMoreDescriptors none;
    connect_to(waiting.get(), server.endpoint());  // into the backlog
    eventually([&] { return server.stats().refused > 0; });
    CHECK(answers(*channel));
    CHECK(server.stats().connections == 1);
  }
  RawPeer peer(std::move(waiting));
  CHECK(say_hello(peer).version == 1);
  CHECK(server.stats().connections == 2);
}

TEST_CASE("frame server: it may be destroyed while it is out of descriptors") {
  TestServer server({}, kNode);
  UniqueFd waiting = unconnected_socket();
  {
    const NoMoreDescriptors none;
    connect_to(waiting.get(), server.endpoint());
    eventually([&] { return server.stats().refused > 0; });
    server.destroy_server();
  }
  // The time at which it would have looked again passes; the loop lives.
  ::usleep(150'000);
  bool alive = false;
  server.call([&] { alive = true; });
  CHECK(alive);
}

TEST_CASE("frame server: what breaks the protocol is counted, and ends that connection alone") {
  TestServer server({}, kNode,
                    [](FrameServer::Peer& peer, const wire::Header& header, wire::Bytes payload) {
                      if (header.type == Type::kOffer) throw Error(ErrorKind::kProtocol, "bad");
                      peer.reply(header, payload);
                    });
  const auto channel = connect(server.endpoint());
  const ByteVector good = frame_bytes(Type::kMembers, 0, 9, pattern(16, 1));
  ByteVector damaged = good;
  damaged[40] ^= std::byte{1};
  const std::pair<ByteVector, ErrorCode> faults[] = {
      {damaged, ErrorCode::kMalformed},
      {pattern(64, 3), ErrorCode::kMalformed},
      {frame_bytes(Type::kOffer, 0, 9, {}), ErrorCode::kMalformed},
      {frame_bytes(Type::kMembers, wire::kFlagResponse, 9, {}), ErrorCode::kUnexpected},
      {frame_bytes(Type::kHello, 0, 9, {}), ErrorCode::kUnexpected},
  };
  std::uint64_t expected = 0;
  for (const auto& [bytes, code] : faults) {
    RawPeer peer = RawPeer::connect(server.endpoint());
    say_hello(peer);
    peer.write(bytes);
    CHECK(peer.read_frame()->error().code == code);
    CHECK(peer.at_end());
    ++expected;
    eventually([&] { return server.stats().protocol_errors == expected; });
    CHECK(answers(*channel));
  }
  CHECK(server.peers_gone() == static_cast<int>(expected));
}

TEST_CASE("frame server: it lives through garbage") {
  const std::uint64_t seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  TestServer server({}, kNode);
  const auto channel = connect(server.endpoint());
  const ByteVector good = frame_bytes(Type::kWrite, 0, 5, pattern(100, 1), pattern(300, 2));
  for (int round = 0; round < 200; ++round) {
    RawPeer peer = RawPeer::connect(server.endpoint());
    const bool known = random() % 2 == 0;
    if (known) say_hello(peer);
    ByteVector bytes;
    for (std::size_t frames = random() % 4; frames > 0; --frames) {
      bytes.insert(bytes.end(), good.begin(), good.end());
    }
    for (std::size_t damage = random() % 4; damage > 0 && !bytes.empty(); --damage) {
      bytes[random() % bytes.size()] ^= static_cast<std::byte>(1 + random() % 255);
    }
    const ByteVector tail = pattern(random() % 200, static_cast<unsigned>(random()));
    bytes.insert(bytes.end(), tail.begin(), tail.end());
    peer.write(bytes);
    peer.end_writing();
    // Echoes of what was whole, perhaps an ERROR, and then always the end.
    while (const auto frame = peer.read_frame()) {
      if (frame->header.type == Type::kError) {
        CHECK(peer.at_end());
        break;
      }
    }
  }
  CHECK(answers(*channel));
  eventually([&] { return server.stats().connections == 1; });
}

TEST_CASE("frame server: a peer is found by its id as long as it is there, and not after") {
  std::atomic<std::uint64_t> id = 0;
  TestServer server({}, kNode,
                    [&](FrameServer::Peer& peer, const wire::Header& header, wire::Bytes payload) {
                      id = peer.id();
                      CHECK(peer.name() == "engine-1");
                      CHECK_FALSE(peer.is_unix());
                      CHECK(peer.role() == wire::Role::kClient);
                      peer.reply(header, payload);
                    });
  auto channel = connect(server.endpoint());
  CHECK(answers(*channel));
  server.call([&] { CHECK(server.server().find(id)->id() == id); });
  channel->close();
  eventually([&] { return server.peers_gone() == 1; });
  server.call([&] { CHECK(server.server().find(id) == nullptr); });
}

TEST_CASE("frame server: what is on its way at the end is called back, and finds no peer") {
  int sent = 0;
  ByteVector bulk(30u << 20);
  FrameServer* self = nullptr;
  TestServer server(
      {}, kNode, [&](FrameServer::Peer& peer, const wire::Header& header, wire::Bytes) {
        const std::uint64_t id = peer.id();
        peer.socket().send_bulk(header.type, wire::kFlagResponse, header.request_id, {}, {},
                                {{.iov_base = bulk.data(), .iov_len = bulk.size()}}, [&, id] {
                                  ++sent;
                                  CHECK(self->find(id) == nullptr);
                                });
      });
  server.call([&] { self = &server.server(); });
  const auto channel = connect(server.endpoint());
  channel->send(Type::kWait, {}, {}, Clock::now() + kPatience);
  channel->send(Type::kWait, {}, {}, Clock::now() + kPatience);
  eventually([&] { return server.stats().frames == 3; });
  server.call([&] { CHECK(sent == 0); });
  server.destroy_server();
  server.call([&] { CHECK(sent == 2); });
}

}  // namespace hymcache::wire_testing
