// The handshake: versions, roles and secrets, between the real client and server and against peers
// that cheat.
#include <doctest/doctest.h>

#include <string>

#include "tests/cpp/served_peers.h"
#include "transport/csrc/channel.h"
#include "transport/csrc/handshake.h"

namespace hymcache::wire_testing {
namespace {

using wire::ErrorCode;
using wire::Role;
using wire::Type;

Identity client(MacFunction mac = nullptr) {
  return {.role = Role::kClient, .name = "engine-1", .mac = std::move(mac)};
}

Identity node(MacFunction mac = nullptr) {
  return {
      .role = Role::kNode, .name = "node-1", .node = 7, .incarnation = 99, .mac = std::move(mac)};
}

std::unique_ptr<Channel> connect(const Endpoint& endpoint, const Identity& identity,
                                 Role expected = Role::kNode) {
  return Channel::connect(endpoint, identity, expected, Clock::now() + kPatience);
}

Thrown refusal(const Endpoint& endpoint, const Identity& identity, Role expected = Role::kNode) {
  return thrown_by([&] { connect(endpoint, identity, expected); });
}

// What a server says to one frame of a peer that has not shaken hands.
wire::ErrorReply answer_to(const Endpoint& endpoint, wire::Bytes frame) {
  RawPeer peer = RawPeer::connect(endpoint);
  peer.write(frame);
  const auto answer = peer.read_frame();
  REQUIRE(answer.has_value());
  CHECK(peer.at_end());
  return answer->error();
}

}  // namespace

TEST_CASE("handshake: the highest common version, or a refusal that names both ranges") {
  for (std::uint16_t mine_min = 1; mine_min <= 4; ++mine_min) {
    for (std::uint16_t mine_max = mine_min; mine_max <= 4; ++mine_max) {
      for (std::uint16_t their_min = 0; their_min <= 5; ++their_min) {
        for (std::uint16_t their_max = 0; their_max <= 5; ++their_max) {
          CAPTURE(mine_min);
          CAPTURE(mine_max);
          CAPTURE(their_min);
          CAPTURE(their_max);
          Identity mine = node();
          mine.version_min = mine_min;
          mine.version_max = mine_max;
          const wire::Hello theirs{.version_min = their_min, .version_max = their_max};
          int best = -1;
          for (int version = mine_min; version <= mine_max; ++version) {
            if (version >= their_min && version <= their_max) best = version;
          }
          if (best >= 0) {
            CHECK(agree_on_version(mine, theirs) == best);
          } else {
            const Thrown thrown = thrown_by([&] { agree_on_version(mine, theirs); });
            CHECK(thrown.kind == ErrorKind::kProtocol);
            CHECK(thrown.text.find("client speaks protocol version " + std::to_string(their_min)) !=
                  std::string::npos);
            CHECK(thrown.text.find("this node speaks " + std::to_string(mine_min)) !=
                  std::string::npos);
          }
        }
      }
    }
  }
}

TEST_CASE("handshake: proofs depend on the secret, the side and both nonces") {
  const wire::Nonce a = random_nonce();
  const wire::Nonce b = random_nonce();
  CHECK(a != b);
  const MacFunction mac = mac_of("secret");
  const wire::Mac proof = prove(mac, Role::kClient, a, b);
  CHECK(prove(mac, Role::kClient, a, b) == proof);
  CHECK(prove(mac, Role::kMaster, a, b) != proof);
  CHECK(prove(mac, Role::kNode, a, b) == prove(mac, Role::kMaster, a, b));
  CHECK(prove(mac, Role::kClient, b, a) != proof);
  CHECK(prove(mac_of("other"), Role::kClient, a, b) != proof);
  std::string message;
  prove(
      [&](std::string_view m) {
        message = m;
        return wire::Mac{};
      },
      Role::kClient, a, b);
  CHECK(message == "client" + std::string(a.begin(), a.end()) + std::string(b.begin(), b.end()));
}

TEST_CASE("handshake: proofs are compared to the last bit") {
  const wire::Mac mac = prove(mac_of("secret"), Role::kClient, random_nonce(), random_nonce());
  CHECK(equal_in_constant_time(mac, mac));
  for (std::size_t bit = 0; bit < mac.size() * 8; ++bit) {
    wire::Mac other = mac;
    other[bit / 8] ^= static_cast<std::uint8_t>(1u << (bit % 8));
    CHECK_FALSE(equal_in_constant_time(mac, other));
  }
}

TEST_CASE("handshake: without a secret, a client learns who the server is") {
  TestServer server({}, node());
  const auto channel = connect(server.endpoint(), client());
  CHECK(channel->server().version == 1);
  CHECK(channel->server().role == Role::kNode);
  CHECK(channel->server().node == 7);
  CHECK(channel->server().incarnation == 99);
  CHECK(wire::from_text(channel->server().name) == "node-1");
  CHECK(channel->server().auth_required == 0);
}

TEST_CASE("handshake: the same secret on both sides lets through, nothing else does") {
  TestServer secured({}, node(mac_of("secret")));
  TestServer open({}, node());
  const auto channel = connect(secured.endpoint(), client(mac_of("secret")));
  CHECK(channel->server().auth_required == 1);
  CHECK(channel->open());

  const Thrown wrong = refusal(secured.endpoint(), client(mac_of("Secret")));
  CHECK(wrong.kind == ErrorKind::kConfig);
  CHECK(wrong.text ==
        "node-1 refuses the shared secret of engine-1: set the same secret_file on both");
  const Thrown missing_here = refusal(secured.endpoint(), client());
  CHECK(missing_here.kind == ErrorKind::kConfig);
  CHECK(missing_here.text.find("requires a shared secret: set secret_file") != std::string::npos);
  const Thrown missing_there = refusal(open.endpoint(), client(mac_of("secret")));
  CHECK(missing_there.kind == ErrorKind::kConfig);
  CHECK(missing_there.text.find("has no shared secret, but one is set here") != std::string::npos);
  CHECK(secured.stats().refused == 1);
}

TEST_CASE("handshake: a server that sends the client's proof back does not know the secret") {
  ScriptedServer reflecting([](RawPeer& peer) {
    answer_hello(peer, {.version = 1, .role = Role::kNode, .auth_required = 1});
    const auto auth = peer.read_frame();
    if (!auth) return;
    peer.write(
        frame_bytes(Type::kAuth, wire::kFlagResponse, auth->header.request_id, auth->payload));
    peer.at_end();
  });
  const Thrown thrown = refusal(reflecting.endpoint(), client(mac_of("secret")));
  CHECK(thrown.kind == ErrorKind::kConfig);
  CHECK(thrown.text.find("does not know the shared secret") != std::string::npos);
}

TEST_CASE("handshake: a client's proof holds for one connection, and the server's for none") {
  const MacFunction mac = mac_of("secret");
  TestServer server({}, node(mac));
  wire::Nonce ours = random_nonce();
  wire::Mac first_proof{};
  for (const bool replayed : {false, true}) {
    CAPTURE(replayed);
    RawPeer peer = RawPeer::connect(server.endpoint());
    wire::Hello hello = hello_of("raw");
    hello.nonce = ours;
    const wire::HelloReply reply = say_hello(peer, hello);
    const wire::Mac proof = replayed ? first_proof : prove(mac, Role::kClient, ours, reply.nonce);
    first_proof = proof;
    peer.write(frame_bytes(Type::kAuth, 0, 2, wire::as_bytes(proof)));
    const auto answer = peer.read_frame();
    REQUIRE(answer.has_value());
    if (!replayed) {
      CHECK(answer->header.type == Type::kAuth);
      const auto theirs = wire::PayloadReader(answer->payload, "AUTH").take<wire::Auth>();
      CHECK(theirs.proof == prove(mac, Role::kMaster, ours, reply.nonce));
      // As a client's it is worthless.
      CHECK(theirs.proof != proof);
    } else {
      CHECK(answer->error().code == ErrorCode::kAuthentication);
      CHECK(peer.at_end());
    }
  }
}

TEST_CASE("handshake: another version is refused with both named, on either side") {
  Identity future = client();
  future.version_min = 2;
  future.version_max = 3;
  TestServer server({}, node());
  const Thrown refused = refusal(server.endpoint(), future);
  CHECK(refused.kind == ErrorKind::kProtocol);
  CHECK(refused.text ==
        "the client speaks protocol version 2 to 3, this node speaks 1: install the "
        "same release of hymcache on both");
  CHECK(server.stats().refused == 1);

  ScriptedServer arbitrary([](RawPeer& peer) {
    answer_hello(peer, {.version = 9, .role = Role::kNode});
    peer.at_end();
  });
  const Thrown not_offered = refusal(arbitrary.endpoint(), client());
  CHECK(not_offered.kind == ErrorKind::kProtocol);
  CHECK(not_offered.text.find("chose protocol version 9") != std::string::npos);
}

TEST_CASE("handshake: features are those that both have") {
  Identity with_features = node();
  with_features.features = 0b0110;
  TestServer server({}, with_features);
  Identity other = client();
  other.features = 0b1100;
  CHECK(connect(server.endpoint(), other)->server().features == 0b0100);
}

TEST_CASE("handshake: a client says when it has the wrong address") {
  TestServer server({}, node());
  const Thrown thrown = refusal(server.endpoint(), client(), Role::kMaster);
  CHECK(thrown.kind == ErrorKind::kConfig);
  CHECK(thrown.text ==
        server.endpoint().text() + " is a storage node, not a master: check the address");
}

TEST_CASE("handshake: nothing but its next message is taken, and it within bounds") {
  TestServer open({}, node());
  TestServer secured({}, node(mac_of("secret")));
  const wire::Hello good = hello_of("raw");
  const ByteVector hello = to_vector(wire::as_bytes(good));
  const wire::Auth auth;

  for (const Type type : {Type::kLookup, Type::kAuth, Type::kError, Type::kWait}) {
    CAPTURE(wire::type_name(type));
    const auto error = answer_to(open.endpoint(), frame_bytes(type, 0, 1, wire::as_bytes(auth)));
    CHECK(error.code == ErrorCode::kUnexpected);
  }
  CHECK(answer_to(open.endpoint(), frame_bytes(Type::kHello, 0, 1, hello, pattern(3, 1))).code ==
        ErrorCode::kUnexpected);
  CHECK(answer_to(open.endpoint(), frame_bytes(Type::kHello, wire::kFlagResponse, 1, hello)).code ==
        ErrorCode::kUnexpected);
  CHECK(answer_to(open.endpoint(), frame_bytes(Type::kHello, 0, 1, wire::Bytes(hello).first(95)))
            .code == ErrorCode::kMalformed);
  CHECK(answer_to(open.endpoint(), frame_bytes(Type::kHello, 0, 1, ByteVector(4097))).code ==
        ErrorCode::kMalformed);
  wire::Hello stranger = good;
  stranger.role = static_cast<Role>(9);
  CHECK(
      answer_to(open.endpoint(), frame_bytes(Type::kHello, 0, 1, wire::as_bytes(stranger))).code ==
      ErrorCode::kMalformed);

  for (const Type type : {Type::kHello, Type::kLookup}) {
    RawPeer peer = RawPeer::connect(secured.endpoint());
    CHECK(say_hello(peer).auth_required == 1);
    peer.write(frame_bytes(type, 0, 2, hello));
    CHECK(peer.read_frame()->error().code == ErrorCode::kUnexpected);
    CHECK(peer.at_end());
  }
  RawPeer peer = RawPeer::connect(secured.endpoint());
  say_hello(peer);
  peer.write(frame_bytes(Type::kAuth, 0, 2, ByteVector(33)));
  CHECK(peer.read_frame()->error().code == ErrorCode::kMalformed);

  for (const Type type : {Type::kHello, Type::kAuth}) {
    RawPeer known = RawPeer::connect(open.endpoint());
    CHECK(say_hello(known).auth_required == 0);
    known.write(frame_bytes(type, 0, 2, hello));
    CHECK(known.read_frame()->error().code == ErrorCode::kUnexpected);
  }
}

TEST_CASE("handshake: a HELLO of a later version may be longer, a request may follow at once") {
  TestServer server({}, node());
  RawPeer peer = RawPeer::connect(server.endpoint());
  wire::Hello hello = hello_of("raw");
  hello.version_max = 8;
  const ByteVector longer = join({wire::as_bytes(hello), pattern(40, 1)});
  const ByteVector payload = pattern(100'000, 2);
  peer.write(
      join({frame_bytes(Type::kHello, 0, 1, longer), frame_bytes(Type::kMembers, 0, 2, payload)}));
  CHECK(peer.read_frame()->header.type == Type::kHello);
  CHECK(peer.read_frame()->payload == payload);
}

TEST_CASE("handshake: a name that cannot be shown does no harm") {
  TestServer server({}, node(mac_of("secret")));
  RawPeer peer = RawPeer::connect(server.endpoint());
  wire::Hello hello;
  hello.name.fill('\xFF');
  hello.name[0] = '\n';
  say_hello(peer, hello);
  peer.write(frame_bytes(Type::kAuth, 0, 2, ByteVector(32)));
  const auto error = peer.read_frame()->error();
  CHECK(wire::from_text(error.message).find("of " + std::string(64, '?')) != std::string::npos);
}

}  // namespace hymcache::wire_testing
