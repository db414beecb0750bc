// FramedSocket, receiving: whatever the segments, the frames are the same; whatever is wrong, the
// peer gets an ERROR and the connection ends.
#include <doctest/doctest.h>

#include <random>
#include <thread>

#include "tests/cpp/recording_socket.h"
#include "transport/csrc/crc32c.h"

namespace hymcache::wire_testing {
namespace {

using wire::ErrorCode;
using wire::Type;

struct Sent {
  Type type;
  std::uint32_t request_id;
  ByteVector payload;
  ByteVector bulk;

  ByteVector bytes() const { return frame_bytes(type, 0, request_id, payload, bulk); }
};

ByteVector stream_of(const std::vector<Sent>& sent) {
  ByteVector stream;
  for (const Sent& one : sent) {
    const ByteVector bytes = one.bytes();
    stream.insert(stream.end(), bytes.begin(), bytes.end());
  }
  return stream;
}

void check_equal(const std::vector<RecordingSocket::Frame>& got, const std::vector<Sent>& sent) {
  REQUIRE(got.size() == sent.size());
  for (std::size_t i = 0; i < sent.size(); ++i) {
    CAPTURE(i);
    REQUIRE(got[i].header.type == sent[i].type);
    REQUIRE(got[i].header.request_id == sent[i].request_id);
    REQUIRE(got[i].payload == sent[i].payload);
    REQUIRE(got[i].bulk == sent[i].bulk);
    REQUIRE(got[i].bulk_complete);
  }
}

const std::vector<Sent>& small_frames() {
  static const std::vector<Sent> frames{
      {Type::kLookup, 1, pattern(10, 1), {}},
      {Type::kMembers, 2, {}, {}},
      {Type::kWrite, 3, pattern(5, 2), pattern(20, 3)},
      {Type::kWrite, 4, {}, pattern(1, 4)},
      {Type::kEnd, 5, pattern(16, 5), {}},
  };
  return frames;
}

// What a peer gets that sends `bytes` and nothing else: an ERROR, and the end.
wire::ErrorReply refusal_of(wire::Bytes bytes, std::uint32_t request_id,
                            RecordingSocket::OnFrame on_frame = {}) {
  auto [ours, theirs] = socket_pair();
  RecordingSocket socket(std::move(ours), std::move(on_frame));
  RawPeer peer(std::move(theirs));
  peer.write(bytes);
  const auto frame = peer.read_frame();
  REQUIRE(frame.has_value());
  CHECK(frame->header.request_id == request_id);
  CHECK(peer.at_end());
  CHECK(socket.wait_closed() == wire::from_text(frame->error().message));
  return frame->error();
}

std::string text_of(const wire::ErrorReply& error) { return wire::from_text(error.message); }

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("framed socket: a stream may be split at any byte") {
  const ByteVector stream = stream_of(small_frames());
  for (std::size_t cut = 1; cut < stream.size(); ++cut) {
    CAPTURE(cut);
    auto [ours, theirs] = socket_pair();
    RecordingSocket socket(std::move(ours));
    RawPeer peer(std::move(theirs));
    peer.write(wire::Bytes(stream).first(cut));
    wait_drained(peer.fd());
    peer.write(wire::Bytes(stream).subspan(cut));
    check_equal(socket.wait_frames(small_frames().size()), small_frames());
  }
}

TEST_CASE("framed socket: bytes may come one by one") {
  const ByteVector stream = stream_of(small_frames());
  auto [ours, theirs] = socket_pair();
  RecordingSocket socket(std::move(ours));
  RawPeer peer(std::move(theirs));
  for (const std::byte byte : stream) {
    peer.write({&byte, 1});
    wait_drained(peer.fd());
  }
  check_equal(socket.wait_frames(small_frames().size()), small_frames());
}

TEST_CASE("framed socket: many frames in one segment keep their order") {
  std::vector<Sent> sent;
  for (std::uint32_t i = 0; i < 2000; ++i) {
    sent.push_back({Type::kRelease, i, pattern(24, i), {}});
    if (i % 7 == 0) sent.push_back({Type::kWrite, i, pattern(24, i), pattern(i % 300, i + 1)});
  }
  auto [ours, theirs] = socket_pair();
  RecordingSocket socket(std::move(ours));
  RawPeer peer(std::move(theirs));
  peer.write(stream_of(sent));
  check_equal(socket.wait_frames(sent.size()), sent);
}

TEST_CASE("framed socket: random frames in random segments into random pieces") {
  const std::uint64_t seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 12; ++round) {
    CAPTURE(round);
    std::vector<Sent> sent;
    for (int i = 0; i < 20; ++i) {
      // Mostly small; now and then beyond the receive buffer.
      const std::size_t payload = random() % (random() % 5 == 0 ? 60'000 : 200);
      const std::size_t bulk = random() % 2 == 0 ? 0 : random() % (random() % 4 == 0 ? 90'000 : 90);
      sent.push_back({Type::kWrite, static_cast<std::uint32_t>(random()),
                      pattern(payload, static_cast<unsigned>(random())),
                      pattern(bulk, static_cast<unsigned>(random()))});
    }
    const ByteVector stream = stream_of(sent);
    auto [ours, theirs] = socket_pair();
    RecordingSocket socket(std::move(ours));
    socket.cut_bulk([&random](ByteVector& bulk) {
      std::vector<iovec> pieces;
      for (std::size_t at = 0; at < bulk.size();) {
        const std::size_t step = std::min<std::size_t>(bulk.size() - at, random() % 3000);
        pieces.push_back({.iov_base = bulk.data() + at, .iov_len = step});
        at += step;  // some are empty
      }
      return pieces;
    });
    RawPeer peer(std::move(theirs));
    std::mt19937_64 cuts(seed + static_cast<std::uint64_t>(round));
    for (std::size_t at = 0; at < stream.size();) {
      const std::size_t step = std::min<std::size_t>(stream.size() - at, 1 + cuts() % 20'000);
      REQUIRE(peer.write(wire::Bytes(stream).subspan(at, step)));
      at += step;
    }
    check_equal(socket.wait_frames(sent.size()), sent);
  }
}

TEST_CASE("framed socket: the largest payload is taken, and a frame after it") {
  const std::vector<Sent> sent{{Type::kPublish, 1, pattern(wire::kPayloadBytesMax, 1), {}},
                               {Type::kMembers, 2, {}, {}}};
  auto [ours, theirs] = socket_pair();
  RecordingSocket socket(std::move(ours));
  RawPeer peer(std::move(theirs));
  peer.write(stream_of(sent));
  check_equal(socket.wait_frames(2), sent);
}

TEST_CASE("framed socket: empty pieces in front of where the bulk bytes go do no harm") {
  auto [ours, theirs] = socket_pair();
  RecordingSocket socket(std::move(ours));
  socket.cut_bulk([](ByteVector& bulk) {
    std::vector<iovec> pieces(200, {.iov_base = bulk.data(), .iov_len = 0});
    pieces.push_back({.iov_base = bulk.data(), .iov_len = bulk.size()});
    return pieces;
  });
  RawPeer peer(std::move(theirs));
  const ByteVector frame = frame_bytes(Type::kWrite, 0, 1, {}, pattern(100, 1));
  peer.write(wire::Bytes(frame).first(sizeof(wire::Header)));
  wait_drained(peer.fd());  // none of them has come along with the header
  peer.write(wire::Bytes(frame).subspan(sizeof(wire::Header)));
  CHECK(socket.wait_frames(1).front().bulk == pattern(100, 1));
}

TEST_CASE("framed socket: bulk bytes that nobody wants are thrown away") {
  std::vector<Sent> sent{{Type::kWrite, 1, pattern(8, 1), pattern(300'000, 2)},
                         {Type::kWrite, 2, {}, pattern(3, 3)},
                         {Type::kMembers, 3, pattern(4, 4), {}}};
  auto [ours, theirs] = socket_pair();
  RecordingSocket socket(std::move(ours));
  socket.cut_bulk(nullptr);
  RawPeer peer(std::move(theirs));
  peer.write(stream_of(sent));
  const auto frames = socket.wait_frames(3);
  CHECK(frames[2].payload == sent[2].payload);
  CHECK(socket.closed().empty());
}

TEST_CASE("framed socket: bulk bytes of another number than expected end the connection") {
  for (const std::size_t expected : {std::size_t{9}, std::size_t{11}}) {
    auto [ours, theirs] = socket_pair();
    RecordingSocket socket(std::move(ours));
    socket.cut_bulk([expected](ByteVector& bulk) {
      bulk.resize(expected);
      return std::vector<iovec>{{.iov_base = bulk.data(), .iov_len = expected}};
    });
    RawPeer peer(std::move(theirs));
    peer.write(frame_bytes(Type::kWrite, 0, 5, {}, pattern(10, 1)));
    const auto frame = peer.read_frame();
    REQUIRE(frame.has_value());
    CHECK(frame->error().code == ErrorCode::kMalformed);
    CHECK(contains(text_of(frame->error()), "10 bulk bytes announced"));
    socket.wait_closed();
    CHECK_FALSE(socket.frames().front().bulk_complete);
  }
}

TEST_CASE("framed socket: no single flipped bit goes unnoticed") {
  const ByteVector payload = pattern(24, 7);
  const ByteVector good = frame_bytes(Type::kRelease, 0, 77, payload);
  for (std::size_t bit = 0; bit < good.size() * 8; ++bit) {
    CAPTURE(bit);
    ByteVector bad = good;
    bad[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    const bool in_header = bit < sizeof(wire::Header) * 8;
    // A header that cannot be believed has no request id either.
    const auto error = refusal_of(bad, in_header ? 0 : 77,
                                  [](auto&, auto&, auto) { FAIL("a damaged frame is handled"); });
    CHECK(error.code == ErrorCode::kMalformed);
    CHECK(contains(text_of(error), bit < 32    ? "does not speak"
                                   : in_header ? "header is damaged"
                                               : "payload of a RELEASE frame is damaged"));
  }
}

TEST_CASE("framed socket: what is not the protocol at all is told so") {
  const char* const request = "GET /metrics HTTP/1.1\r\nHost: node-1\r\nAccept: */*\r\n\r\n";
  const auto error = refusal_of(std::as_bytes(std::span(request, strlen(request))), 0);
  CHECK(text_of(error) == "the peer does not speak the HyMCache protocol");
}

TEST_CASE("framed socket: lengths beyond the bounds are refused before a byte of them comes") {
  const auto header_only = [](std::uint64_t payload_bytes, std::uint64_t bulk_bytes) {
    wire::Header header = wire::make_header(Type::kWrite, 0, 9, {}, bulk_bytes);
    header.payload_bytes = static_cast<std::uint32_t>(payload_bytes);
    header.header_crc32c = crc32c(0, &header, sizeof header - 4);
    return to_vector(wire::as_bytes(header));
  };
  for (const std::uint64_t payload :
       {std::uint64_t{wire::kPayloadBytesMax} + 1, std::uint64_t{0xFFFFFFFF}}) {
    CHECK(contains(text_of(refusal_of(header_only(payload, 0), 0)), "payload bytes, at most"));
  }
  for (const std::uint64_t bulk : {wire::kBulkBytesMax + 1, ~std::uint64_t{0}}) {
    CHECK(contains(text_of(refusal_of(header_only(0, bulk), 0)), "bulk bytes, at most"));
  }
}

TEST_CASE("framed socket: flags that are not known are refused") {
  wire::Header header = wire::make_header(Type::kMembers, 0x8000, 3, {}, 0);
  CHECK(contains(text_of(refusal_of(wire::as_bytes(header), 0)), "flags"));
}

TEST_CASE("framed socket: a tighter bound on payloads holds") {
  auto [ours, theirs] = socket_pair();
  RecordingSocket socket(std::move(ours));
  socket.call([](auto& framed) { framed->set_payload_bytes_max(100); });
  RawPeer peer(std::move(theirs));
  peer.write(frame_bytes(Type::kHello, 0, 1, pattern(100, 1)));
  peer.write(frame_bytes(Type::kHello, 0, 2, pattern(101, 1)));
  CHECK(contains(text_of(peer.read_frame()->error()), "at most 100"));
  CHECK(socket.frames().size() == 1);
}

TEST_CASE("framed socket: what the handler throws is what the peer is told") {
  const ByteVector frame = frame_bytes(Type::kOffer, 0, 12, pattern(4, 1));
  const auto malformed = refusal_of(frame, 12, [](auto&, auto&, auto) {
    throw Error(ErrorKind::kProtocol, "OFFER: 9 rows, at most 8 are allowed");
  });
  CHECK(malformed.code == ErrorCode::kMalformed);
  CHECK(text_of(malformed) == "OFFER: 9 rows, at most 8 are allowed");
  const auto unexpected =
      refusal_of(frame, 12, [](auto&, auto&, auto) { throw wire::Unexpected("not now"); });
  CHECK(unexpected.code == ErrorCode::kUnexpected);
}

TEST_CASE("framed socket: nothing is handled after the frame that ended the connection") {
  ByteVector stream = frame_bytes(Type::kMembers, 0, 1, {});
  const ByteVector bad = frame_bytes(Type::kOffer, 0, 2, {}, pattern(50, 1));
  const ByteVector after = frame_bytes(Type::kMembers, 0, 3, {});
  stream.insert(stream.end(), bad.begin(), bad.end());
  stream.insert(stream.end(), after.begin(), after.end());
  auto [ours, theirs] = socket_pair();
  RecordingSocket socket(std::move(ours),
                         [](FramedSocket& framed, const wire::Header& header, wire::Bytes) {
                           if (header.request_id == 2) framed.close("enough");
                         });
  RawPeer peer(std::move(theirs));
  peer.write(stream);
  CHECK(peer.at_end());
  CHECK(socket.wait_closed() == "enough");
  CHECK(socket.frames().size() == 2);
  CHECK_FALSE(socket.frames()[1].bulk_complete);
}

TEST_CASE("framed socket: a peer that leaves in the middle of a frame is gone, nothing else") {
  const ByteVector frame = frame_bytes(Type::kWrite, 0, 1, pattern(40, 1), pattern(40, 2));
  for (std::size_t cut = 0; cut < frame.size(); cut += 9) {
    CAPTURE(cut);
    auto [ours, theirs] = socket_pair();
    RecordingSocket socket(std::move(ours));
    RawPeer peer(std::move(theirs));
    peer.write(wire::Bytes(frame).first(cut));
    peer.end_writing();
    CHECK(peer.at_end());
    CHECK(socket.wait_closed() == "the peer closed the connection");
    for (const auto& got : socket.frames()) CHECK_FALSE(got.bulk_complete);
  }
}

TEST_CASE("framed socket: half a frame that stands still is a stall, an idle connection is not") {
  const ByteVector frame = frame_bytes(Type::kWrite, 0, 1, pattern(40, 1), pattern(40, 2));
  for (const std::size_t cut :
       {std::size_t{0}, std::size_t{3}, std::size_t{50}, std::size_t{100}, frame.size()}) {
    CAPTURE(cut);
    auto [ours, theirs] = socket_pair();
    RecordingSocket socket(std::move(ours));
    RawPeer peer(std::move(theirs));
    peer.write(wire::Bytes(frame).first(cut));
    wait_drained(peer.fd());
    socket.call([&](auto& framed) {
      const TimePoint later = Clock::now() + std::chrono::seconds(60);
      CHECK(framed->stalled(later, std::chrono::seconds(30)) == (cut > 0 && cut < frame.size()));
      CHECK_FALSE(framed->stalled(later, std::chrono::seconds(90)));
    });
  }
}

TEST_CASE("framed socket: large bulks over TCP are taken whole, in whatever pieces they come") {
  Endpoint endpoint = Endpoint::parse("127.0.0.1:0");
  const UniqueFd listener = listen_socket(endpoint, &endpoint.port);
  for (const std::size_t piece : {1'000'000u, 262'144u, 100'000u}) {
    CAPTURE(piece);
    RawPeer peer(connect_socket(endpoint, Clock::now() + kPatience));
    UniqueFd accepted(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    REQUIRE(accepted);
    RecordingSocket socket(std::move(accepted));
    const std::vector<Sent> sent{{Type::kWrite, 1, pattern(8, 1), pattern(700'000, 2)},
                                 {Type::kWrite, 2, {}, pattern(300'001, 3)},
                                 {Type::kMembers, 3, pattern(4, 4), {}}};
    const ByteVector stream = stream_of(sent);
    for (std::size_t at = 0; at < stream.size(); at += piece) {
      peer.write(wire::Bytes(stream).subspan(at, std::min(piece, stream.size() - at)));
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    check_equal(socket.wait_frames(sent.size()), sent);
  }
}

}  // namespace hymcache::wire_testing
