// Channel: blocking calls against servers that are correct, slow, silent or wrong.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>

#include <thread>

#include "tests/cpp/served_peers.h"
#include "transport/csrc/channel.h"

namespace hymcache::wire_testing {
namespace {

using wire::ErrorCode;
using wire::Type;

constexpr auto kShort = std::chrono::milliseconds(80);

const Identity kClient{.name = "engine-1", .mac = nullptr};

std::unique_ptr<Channel> connect(const Endpoint& endpoint, Clock::duration limit = kPatience) {
  return Channel::connect(endpoint, kClient, wire::Role::kNode, Clock::now() + limit);
}

// Runs out of time after `kShort`, and not much later.
template <class Action>
void check_runs_out(Action action) {
  const TimePoint start = Clock::now();
  const Thrown thrown = thrown_by([&] { action(start + kShort); });
  const auto spent = Clock::now() - start;
  CHECK(thrown.kind == ErrorKind::kUnavailable);
  CHECK(thrown.error_number == ETIMEDOUT);
  CHECK(thrown.text.find("did not answer in time") != std::string::npos);
  CHECK(spent >= kShort);
  CHECK(spent < kShort + std::chrono::milliseconds(1500));  // generous: sanitizers, shared machines
}

// A server that shakes hands and then answers the first request with these bytes.
ScriptedServer::Script answering(ByteVector bytes, bool then_close = false) {
  return [bytes = std::move(bytes), then_close](RawPeer& peer) {
    answer_hello(peer);
    if (!peer.read_frame()) return;
    peer.write(bytes);
    if (!then_close) peer.at_end();
  };
}

ByteVector response(Type type, std::uint32_t id, const ByteVector& payload,
                    const ByteVector& bulk = {}) {
  return frame_bytes(type, wire::kFlagResponse, id, payload, bulk);
}

ByteVector error_frame(ErrorCode code, std::uint32_t id, const char* message = "why") {
  const wire::ErrorReply reply = wire::make_error(code, message);
  return frame_bytes(Type::kError, wire::kFlagResponse, id, wire::as_bytes(reply));
}

// HELLO is request 1, what follows is request 2.
constexpr std::uint32_t kFirstId = 2;

Channel::Frame call(Channel& channel, Type type = Type::kLookup) {
  return channel.call(type, {}, {}, Clock::now() + kPatience);
}

std::vector<iovec> pieces_of(ByteVector& data, std::size_t step) {
  std::vector<iovec> pieces;
  for (std::size_t at = 0; at < data.size(); at += step) {
    pieces.push_back({.iov_base = data.data() + at, .iov_len = std::min(step, data.size() - at)});
    pieces.push_back({.iov_base = data.data(), .iov_len = 0});
  }
  return pieces;
}

}  // namespace

TEST_CASE("channel: a server that is not there, or never answers") {
  Endpoint nobody = loopback();
  {
    const UniqueFd gone = listen_socket(nobody, &nobody.port);
  }
  const Thrown refused = thrown_by([&] { connect(nobody); });
  CHECK(refused.kind == ErrorKind::kUnavailable);
  CHECK(refused.error_number == ECONNREFUSED);
  CHECK(refused.text.find("cannot connect to " + nobody.text()) == 0);

  ScriptedServer silent([](RawPeer& peer) { peer.read(1 << 20); });
  check_runs_out([&](TimePoint deadline) {
    Channel::connect(silent.endpoint(), kClient, wire::Role::kNode, deadline);
  });
}

TEST_CASE("channel: half an answer is none, and ends the channel") {
  const ByteVector whole = response(Type::kLookup, kFirstId, pattern(100, 1));
  for (const std::size_t cut : {0u, 1u, 31u, 32u, 33u, 131u}) {
    CAPTURE(cut);
    ByteVector half(whole.begin(), whole.begin() + cut);
    ScriptedServer slow(answering(half));
    auto channel = connect(slow.endpoint());
    check_runs_out([&](TimePoint deadline) { channel->call(Type::kLookup, {}, {}, deadline); });
    CHECK_FALSE(channel->open());
    CHECK(channel->stale());

    ScriptedServer dying(answering(half, /*then_close=*/true));
    auto second = connect(dying.endpoint());
    const Thrown thrown = thrown_by([&] { call(*second); });
    CHECK(thrown.kind == ErrorKind::kUnavailable);
    CHECK(thrown.text.find("closed the connection") != std::string::npos);
    CHECK_FALSE(second->open());
  }
}

TEST_CASE("channel: an answer that comes drop by drop does not put the deadline off") {
  ScriptedServer dripping([](RawPeer& peer) {
    answer_hello(peer);
    const ByteVector answer =
        response(Type::kLookup, kFirstId, pattern(10'000, 1), pattern(10'000, 2));
    for (const std::byte byte : answer) {
      if (!peer.write({&byte, 1})) return;
      ::usleep(1000);
    }
  });
  auto channel = connect(dripping.endpoint());
  check_runs_out([&](TimePoint deadline) { channel->call(Type::kLookup, {}, {}, deadline); });
  CHECK_FALSE(channel->open());
}

TEST_CASE("channel: bulk bytes that come drop by drop do not either") {
  ScriptedServer dripping([](RawPeer& peer) {
    answer_hello(peer);
    const ByteVector answer = response(Type::kWait, kFirstId, {}, pattern(10'000, 2));
    peer.write(wire::Bytes(answer).first(32));
    for (const std::byte byte : wire::Bytes(answer).subspan(32)) {
      if (!peer.write({&byte, 1})) return;
      ::usleep(1000);
    }
  });
  auto channel = connect(dripping.endpoint());
  check_runs_out([&](TimePoint deadline) {
    channel->call(Type::kWait, {}, {}, deadline);
    ByteVector bulk(10'000);
    channel->receive_bulk(pieces_of(bulk, 1000), deadline);
  });
  CHECK_FALSE(channel->open());
}

TEST_CASE("channel: a server that takes bytes drop by drop does not put the deadline off") {
  TemporaryFolder folder;
  for (const Endpoint& endpoint : {loopback(), folder.unix_endpoint("server")}) {
    CAPTURE(endpoint.text());
    std::atomic<bool> done = false;
    ScriptedServer sipping(
        [&](RawPeer& peer) {
          answer_hello(peer);
          set_buffer_bytes(peer.fd(), SO_RCVBUF, 60'000);
          // For each piece that a UNIX socket takes there would be a new time-out.
          while (!done && peer.read(40'000).size() == 40'000) ::usleep(20'000);
        },
        endpoint);
    auto channel = connect(sipping.endpoint());
    ByteVector data(32u << 20);
    check_runs_out([&](TimePoint deadline) {
      channel->send(Type::kWrite, {}, {}, deadline, pieces_of(data, data.size()));
    });
    CHECK_FALSE(channel->open());
    done = true;
  }
}

TEST_CASE("channel: a deadline that has passed is not tried") {
  TestServer server;
  auto channel = connect(server.endpoint());
  const Thrown thrown =
      thrown_by([&] { channel->call(Type::kLookup, {}, {}, Clock::now() - kShort); });
  CHECK(thrown.error_number == ETIMEDOUT);
  CHECK_FALSE(channel->open());
  const Thrown closed = thrown_by([&] { call(*channel); });
  CHECK(closed.kind == ErrorKind::kUnavailable);
  CHECK(closed.text.find("the connection is closed") != std::string::npos);
}

TEST_CASE("channel: it is stale when the peer has closed it, or has said something unasked") {
  enum class Does { kNothing, kCloses, kSpeaks, kSpeaksEarly };
  for (const Does does : {Does::kNothing, Does::kCloses, Does::kSpeaks, Does::kSpeaksEarly}) {
    CAPTURE(static_cast<int>(does));
    std::atomic<bool> done = false;
    ScriptedServer server([&](RawPeer& peer) {
      const auto hello = peer.read_frame();
      const wire::HelloReply reply{.version = 1, .role = wire::Role::kNode};
      ByteVector bytes = response(Type::kHello, 1, to_vector(wire::as_bytes(reply)));
      // In one segment with the answer, it lies in the channel's own buffer.
      if (does == Does::kSpeaksEarly) bytes.push_back(std::byte{1});
      peer.write(bytes);
      if (does == Does::kSpeaks) peer.write(error_frame(ErrorCode::kBusy, 0));
      if (does == Does::kCloses) peer.close();
      done = true;
      if (does != Does::kCloses) peer.at_end();
    });
    auto channel = connect(server.endpoint());
    eventually([&] { return done.load(); });
    if (does == Does::kNothing) {
      CHECK_FALSE(channel->stale());
      CHECK(channel->open());
    } else {
      eventually([&] { return channel->stale(); });
    }
    channel->close();
    CHECK(channel->stale());
  }
}

TEST_CASE("channel: an ERROR is thrown, and ends the channel where it must") {
  for (const auto code :
       {ErrorCode::kVersion, ErrorCode::kAuthentication, ErrorCode::kMalformed,
        ErrorCode::kUnexpected, ErrorCode::kNoSession, ErrorCode::kBusy, ErrorCode::kUnregistered,
        ErrorCode::kConflict, static_cast<ErrorCode>(99)}) {
    CAPTURE(static_cast<int>(code));
    ScriptedServer server([code](RawPeer& peer) {
      answer_hello(peer);
      peer.read_frame();
      peer.write(error_frame(code, kFirstId));
      if (!peer.read_frame()) return;
      peer.write(response(Type::kLookup, kFirstId + 1, pattern(3, 1)));
      peer.at_end();
    });
    auto channel = connect(server.endpoint());
    CHECK(thrown_by([&] { call(*channel); }).text == "why");
    const bool lives = code == ErrorCode::kNoSession || code == ErrorCode::kBusy;
    CHECK(channel->open() == lives);
    if (lives) CHECK(to_vector(call(*channel).payload) == pattern(3, 1));
  }
}

TEST_CASE("channel: an ERROR about a message without a response is passed over") {
  const ByteVector answer = response(Type::kWait, kFirstId + 2, pattern(9, 1));
  for (const auto code : {ErrorCode::kNoSession, ErrorCode::kBusy}) {
    ScriptedServer server([&](RawPeer& peer) {
      answer_hello(peer);
      for (int i = 0; i < 3; ++i) peer.read_frame();
      peer.write(join({error_frame(code, kFirstId), error_frame(code, kFirstId + 1), answer}));
      peer.at_end();
    });
    auto channel = connect(server.endpoint());
    channel->send(Type::kPrefetch, {}, {}, Clock::now() + kPatience);
    channel->send(Type::kRelease, {}, {}, Clock::now() + kPatience);
    CHECK(to_vector(call(*channel, Type::kWait).payload) == pattern(9, 1));
  }
  // About the connection, or of the kind that ends it, it is not.
  for (const auto& error :
       {error_frame(ErrorCode::kBusy, 0), error_frame(ErrorCode::kMalformed, kFirstId - 1)}) {
    ScriptedServer server(answering(join({error, response(Type::kLookup, kFirstId, {})})));
    auto channel = connect(server.endpoint());
    CHECK(thrown_by([&] { call(*channel); }).text == "why");
    CHECK_FALSE(channel->open());
  }
}

TEST_CASE("channel: anything but the response that is due ends the channel") {
  const ByteVector wrong[] = {
      response(Type::kMembers, kFirstId, {}),
      response(Type::kLookup, kFirstId + 1, {}),
      response(Type::kLookup, kFirstId - 1, {}),
      frame_bytes(Type::kLookup, 0, kFirstId, {}),
      response(Type::kError, kFirstId, pattern(255, 1)),
      pattern(64, 1),
  };
  for (const ByteVector& bytes : wrong) {
    ScriptedServer server(answering(bytes));
    auto channel = connect(server.endpoint());
    CHECK(thrown_by([&] { call(*channel); }).kind == ErrorKind::kProtocol);
    CHECK_FALSE(channel->open());
  }
}

TEST_CASE("channel: no single flipped bit of a response goes unnoticed") {
  const ByteVector good = response(Type::kLookup, kFirstId, pattern(16, 1));
  std::size_t bit = 0;
  ScriptedServer server([&](RawPeer& peer) {
    answer_hello(peer);
    peer.read_frame();
    ByteVector bad = good;
    bad[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    peer.write(bad);
    peer.at_end();
  });
  for (; bit < good.size() * 8; ++bit) {
    CAPTURE(bit);
    auto channel = connect(server.endpoint());
    CHECK(thrown_by([&] { call(*channel); }).kind == ErrorKind::kProtocol);
    CHECK_FALSE(channel->open());
  }
}

TEST_CASE("channel: an answer is had that comes during a spin, and one that comes after it") {
  ScriptedServer server([](RawPeer& peer) {
    answer_hello(peer);
    for (std::uint32_t id = kFirstId; peer.read_frame(); ++id) {
      if (id % 2 == 1) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      peer.write(response(Type::kLookup, id, pattern(100, static_cast<int>(id))));
    }
  });
  auto channel = connect(server.endpoint());
  channel->set_spin(std::chrono::milliseconds(1));
  for (std::uint32_t id = kFirstId; id < kFirstId + 40; ++id) {
    const wire::Bytes payload = call(*channel).payload;
    CHECK(ByteVector(payload.begin(), payload.end()) == pattern(100, static_cast<int>(id)));
  }
}

TEST_CASE("channel: a spin outlasts neither the deadline nor the peer") {
  ScriptedServer silent([](RawPeer& peer) {
    answer_hello(peer);
    peer.read(1 << 20);
  });
  auto channel = connect(silent.endpoint());
  channel->set_spin(std::chrono::hours(1));
  check_runs_out([&](TimePoint deadline) { channel->call(Type::kLookup, {}, {}, deadline); });

  ScriptedServer dying([](RawPeer& peer) {
    answer_hello(peer);
    peer.read_frame();
  });
  auto second = connect(dying.endpoint());
  second->set_spin(std::chrono::hours(1));
  CHECK(thrown_by([&] { call(*second); }).kind == ErrorKind::kUnavailable);
}

}  // namespace hymcache::wire_testing
