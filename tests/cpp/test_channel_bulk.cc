// Channel: bulk bytes in and out in any pieces, descriptors, and a server's last words.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>

#include <random>

#include "tests/cpp/served_peers.h"
#include "transport/csrc/channel.h"

namespace hymcache::wire_testing {
namespace {

using wire::Type;

std::unique_ptr<Channel> connect(const Endpoint& endpoint) {
  return Channel::connect(endpoint, {.name = "engine-1", .mac = nullptr}, wire::Role::kNode,
                          Clock::now() + kPatience);
}

TimePoint soon() { return Clock::now() + kPatience; }

std::vector<iovec> random_pieces(std::mt19937_64& random, ByteVector& data) {
  std::vector<iovec> pieces;
  for (std::size_t at = 0; at < data.size();) {
    const std::size_t step = std::min<std::size_t>(data.size() - at, random() % 5000);
    pieces.push_back({.iov_base = data.data() + at, .iov_len = step});
    at += step;
  }
  return pieces;
}

int open_descriptors() {
  int count = 0;
  for (int fd = 0; fd < 1024; ++fd) count += ::fcntl(fd, F_GETFD) >= 0 ? 1 : 0;
  return count;
}

void send_with_fds(int socket, wire::Bytes bytes, const std::vector<int>& fds) {
  iovec part{.iov_base = const_cast<std::byte*>(bytes.data()), .iov_len = bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
  cmsghdr* const rights = CMSG_FIRSTHDR(&message);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
  std::memcpy(CMSG_DATA(rights), fds.data(), fds.size() * sizeof(int));
  REQUIRE(::sendmsg(socket, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
}

}  // namespace

TEST_CASE("channel: bulk bytes arrive whole, whatever came along with the header") {
  const std::uint64_t seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  TemporaryFolder folder;
  for (int round = 0; round < 20; ++round) {
    CAPTURE(round);
    const ByteVector payload = pattern(random() % 300, static_cast<unsigned>(random()));
    const ByteVector bulk = pattern(random() % 400'000, static_cast<unsigned>(random()));
    const std::uint64_t cut_seed = random();
    const Endpoint endpoint =
        round % 2 == 0 ? loopback() : folder.unix_endpoint(std::to_string(round));
    ScriptedServer server(
        [&](RawPeer& peer) {
          std::mt19937_64 cuts(cut_seed);
          answer_hello(peer);
          for (std::uint32_t id = 2; id < 4; ++id) {
            peer.read_frame();
            const ByteVector all = frame_bytes(Type::kWait, wire::kFlagResponse, id, payload, bulk);
            for (std::size_t at = 0; at < all.size();) {
              const std::size_t step = std::min<std::size_t>(all.size() - at, 1 + cuts() % 90'000);
              peer.write(wire::Bytes(all).subspan(at, step));
              at += step;
            }
          }
          peer.at_end();
        },
        endpoint);
    auto channel = connect(server.endpoint());
    for (int twice = 0; twice < 2; ++twice) {
      const auto frame = channel->call(Type::kWait, {}, {}, soon());
      CHECK(to_vector(frame.payload) == payload);
      REQUIRE(frame.header.bulk_bytes == bulk.size());
      ByteVector got(bulk.size());
      // In several calls, each with many pieces, some of them empty.
      const auto pieces = random_pieces(random, got);
      const std::size_t middle = pieces.empty() ? 0 : random() % pieces.size();
      channel->receive_bulk(std::span(pieces).first(middle), soon());
      channel->receive_bulk(std::span(pieces).subspan(middle), soon());
      CHECK(got == bulk);
    }
    CHECK_FALSE(channel->stale());
  }
}

TEST_CASE("channel: bulk bytes leave whole, at once or piece by piece") {
  const std::uint64_t seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  TemporaryFolder folder;
  for (const Endpoint& endpoint : {loopback(), folder.unix_endpoint("server")}) {
    std::vector<RawPeer::Frame> got;
    {
      ScriptedServer server(
          [&](RawPeer& peer) {
            answer_hello(peer);
            set_buffer_bytes(peer.fd(), SO_RCVBUF, 60'000);
            while (auto frame = peer.read_frame()) got.push_back(std::move(*frame));
          },
          endpoint);
      auto channel = connect(server.endpoint());
      ByteVector bulk = pattern(1'000'000, 7);
      const ByteVector head = pattern(16, 1);
      const ByteVector tail = pattern(200, 2);
      CHECK(channel->send(Type::kWrite, head, tail, soon(), random_pieces(random, bulk)) == 2);
      const auto pieces = random_pieces(random, bulk);
      CHECK(channel->begin_bulk(Type::kWrite, {}, tail, bulk.size(), soon()) == 3);
      for (const iovec& piece : pieces) channel->send_bulk({&piece, 1}, soon());
      CHECK(channel->send(Type::kEnd, {}, {}, soon()) == 4);
      channel->close();
    }
    REQUIRE(got.size() == 3);
    CHECK(got[0].payload == join({pattern(16, 1), pattern(200, 2)}));
    CHECK(got[0].bulk == pattern(1'000'000, 7));
    CHECK(got[1].payload == pattern(200, 2));
    CHECK(got[1].bulk == pattern(1'000'000, 7));
    CHECK(got[2].payload.empty());
  }
}

TEST_CASE("channel: against the real server, over both kinds of socket") {
  TemporaryFolder folder;
  ByteVector stored(3u << 20);
  TestServer server(
      {.listen = {loopback(), folder.unix_endpoint("server")}},
      {.role = wire::Role::kNode, .name = "node-1", .mac = nullptr},
      [&](FrameServer::Peer& peer, const wire::Header& header, wire::Bytes payload) {
        const std::vector<iovec> all{{.iov_base = stored.data(), .iov_len = stored.size()}};
        if (header.type == Type::kWrite) {
          peer.socket().receive_bulk(all, [] {});
        } else {
          peer.socket().send_bulk(header.type, wire::kFlagResponse, header.request_id, payload, {},
                                  all, [] {});
        }
      });
  for (const std::size_t which : {0u, 1u}) {
    auto channel = connect(server.endpoint(which));
    ByteVector mine = pattern(stored.size(), static_cast<unsigned>(which) + 5);
    const iovec part{.iov_base = mine.data(), .iov_len = mine.size()};
    channel->send(Type::kWrite, {}, {}, soon(), {&part, 1});
    const auto frame = channel->call(Type::kWait, {}, {}, soon());
    REQUIRE(frame.header.bulk_bytes == stored.size());
    ByteVector back(stored.size());
    const iovec to{.iov_base = back.data(), .iov_len = back.size()};
    channel->receive_bulk({&to, 1}, soon());
    CHECK(back == mine);
  }
}

TEST_CASE("channel: what is posted leaves with the next frame, before it") {
  std::vector<std::uint32_t> ids;
  ByteVector bulk;
  {
    ScriptedServer server([&](RawPeer& peer) {
      answer_hello(peer);
      while (const auto frame = peer.read_frame()) {
        ids.push_back(frame->header.request_id);
        bulk = frame->bulk;
        if (frame->header.type != Type::kLookup) continue;
        peer.write(frame_bytes(Type::kLookup, wire::kFlagResponse, ids.back(), frame->payload));
      }
    });
    auto channel = connect(server.endpoint());
    channel->post(Type::kRelease, pattern(16, 1), pattern(8, 2));
    channel->post(Type::kEnd, pattern(16, 3), {});
    CHECK(channel->stale());  // with something to say, it cannot be given to another
    const auto frame = channel->call(Type::kLookup, pattern(9, 4), {}, soon());
    CHECK(to_vector(frame.payload) == pattern(9, 4));
    CHECK(ids == std::vector<std::uint32_t>{2, 3, 4});
    CHECK_FALSE(channel->stale());
    channel->post(Type::kEnd, {}, {});
    channel->flush(soon());
    channel->flush(soon());
    CHECK_FALSE(channel->stale());
    ByteVector data = pattern(100'000, 5);
    const iovec part{.iov_base = data.data(), .iov_len = data.size()};
    channel->post(Type::kEnd, {}, {});
    channel->begin_bulk(Type::kWrite, {}, {}, data.size(), soon());
    channel->send_bulk({&part, 1}, soon());
    channel->close();
    CHECK(thrown_by([&] {
            channel->post(Type::kEnd, {}, {});
            channel->flush(soon());
          }).kind == ErrorKind::kUnavailable);
  }
  CHECK(ids == std::vector<std::uint32_t>{2, 3, 4, 5, 6, 7});
  CHECK(bulk == pattern(100'000, 5));
}

TEST_CASE("channel: a descriptor comes with its response, one at most") {
  TemporaryFolder folder;
  const UniqueFd region(::memfd_create("region", MFD_CLOEXEC));
  ScriptedServer server(
      [&](RawPeer& peer) {
        answer_hello(peer);
        for (std::uint32_t id = 2; peer.read_frame(); ++id) {
          const ByteVector bytes =
              frame_bytes(Type::kAttach, wire::kFlagResponse, id, pattern(24, 1));
          if (id == 3) {
            peer.write(bytes);
          } else {
            send_with_fds(peer.fd(), bytes, std::vector<int>(id == 2 ? 1 : 3, region.get()));
          }
        }
      },
      folder.unix_endpoint("server"));
  auto channel = connect(server.endpoint());
  const int before = open_descriptors();
  channel->call(Type::kAttach, {}, {}, soon());
  {
    const UniqueFd fd = channel->take_fd();
    REQUIRE(fd);
    CHECK((::fcntl(fd.get(), F_GETFD) & FD_CLOEXEC) != 0);
    CHECK_FALSE(channel->take_fd());
  }
  channel->call(Type::kAttach, {}, {}, soon());
  CHECK_FALSE(channel->take_fd());
  // More than one: the rest are not let in.
  for (int i = 0; i < 5; ++i) channel->call(Type::kAttach, {}, {}, soon());
  CHECK(open_descriptors() == before + 1);
  CHECK(channel->take_fd());
  CHECK(open_descriptors() == before);
}

TEST_CASE("channel: what a server says while it hangs up is heard, though sending fails") {
  TemporaryFolder folder;
  for (const Endpoint& endpoint : {loopback(), folder.unix_endpoint("server")}) {
    CAPTURE(endpoint.text());
    for (const bool speaks : {true, false}) {
      ScriptedServer server(
          [speaks](RawPeer& peer) {
            answer_hello(peer);
            peer.read(1000);  // of a frame that it does not like
            const auto error = wire::make_error(wire::ErrorCode::kUnexpected, "WRITE: not here");
            if (speaks) {
              peer.write(frame_bytes(Type::kError, wire::kFlagResponse, 2, wire::as_bytes(error)));
            }
          },
          endpoint);
      auto channel = connect(server.endpoint());
      ByteVector bulk(64u << 20);
      const iovec part{.iov_base = bulk.data(), .iov_len = bulk.size()};
      const Thrown thrown =
          thrown_by([&] { channel->send(Type::kWrite, {}, {}, soon(), {&part, 1}); });
      CHECK_FALSE(channel->open());
      if (speaks) {
        CHECK(thrown.kind == ErrorKind::kProtocol);
        CHECK(thrown.text == "WRITE: not here");
      } else {
        CHECK(thrown.kind == ErrorKind::kUnavailable);
      }
    }
  }
}

TEST_CASE("channel: a released connection goes on in an event loop") {
  TestServer server;
  auto channel = connect(server.endpoint());
  RawPeer peer(channel->release());
  CHECK_FALSE(channel->open());
  peer.write(frame_bytes(Type::kMembers, 0, 9, pattern(7, 1)));
  CHECK(peer.read_frame()->payload == pattern(7, 1));
}

}  // namespace hymcache::wire_testing
