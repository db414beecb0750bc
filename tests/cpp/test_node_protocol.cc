// A storage node as docs/wire-protocol.md has it, byte by byte: sessions, grants, the region, and
// what it refuses.
#include <doctest/doctest.h>
#include <sys/mman.h>

#include <random>

#include "tests/cpp/golden_messages.h"
#include "tests/cpp/message_decoder.h"
#include "tests/cpp/served_peers.h"
#include "tests/cpp/service_fixture.h"
#include "transport/csrc/crc32c.h"

namespace hymcache::testing {
namespace {

using wire::ErrorCode;
using wire::Type;
using wire_testing::ByteVector;
using wire_testing::frame_bytes;
using wire_testing::pattern;
using wire_testing::RawPeer;

constexpr std::uint32_t kLength = 40'000;

// A node without a master.
class Node {
 public:
  Node() : node_(folder_.path(), {}, NodeOptions{}) {}
  TestNode* operator->() { return &node_; }
  RawPeer connect_tcp() { return greeted(RawPeer::connect(node_.tcp())); }
  RawPeer connect_unix() { return greeted(RawPeer::connect(node_.unix_socket())); }

 private:
  static RawPeer greeted(RawPeer peer) {
    wire_testing::say_hello(peer);
    return peer;
  }
  ScratchFolder folder_;
  TestNode node_;
};

template <class... Parts>
ByteVector request(Type type, std::uint32_t id, const Parts&... parts) {
  return frame_bytes(type, 0, id, wire_testing::golden::payload(parts...));
}

// The response to request `id`, read as `Head` and rows.
template <class Head>
struct Answer {
  Head head;
  wire::PayloadReader rows;
  RawPeer::Frame frame;
};
template <class Head>
Answer<Head> answer_of(RawPeer& peer, Type type, std::uint32_t id) {
  auto frame = peer.read_frame();
  REQUIRE(frame.has_value());
  if (frame->header.type == Type::kError) FAIL(wire::from_text(frame->error().message));
  REQUIRE(frame->header.type == type);
  REQUIRE(frame->header.request_id == id);
  Answer<Head> answer{{}, wire::PayloadReader({}, ""), std::move(*frame)};
  answer.rows = wire::PayloadReader(answer.frame.payload, "answer");
  answer.head = answer.rows.template take<Head>();
  return answer;
}

void check_error(RawPeer& peer, ErrorCode code, std::uint32_t id) {
  const auto frame = peer.read_frame();
  REQUIRE(frame.has_value());
  CHECK(frame->error().code == code);
  CHECK(frame->header.request_id == id);
  if (!wire::is_recoverable(code)) CHECK(peer.at_end());
}

ObjectKey key_of(std::uint8_t number) { return wire_testing::golden::counting<16>(number); }
wire::SessionId session_of(std::uint8_t number) {
  return wire_testing::golden::counting<16>(number);
}

wire::OfferReplyRow offer(RawPeer& peer, std::uint8_t number, std::uint32_t length = kLength) {
  peer.write(request(Type::kOffer, 50, wire::OfferRequest{.name_space = 5, .count = 1},
                     wire::OfferRow{.key = key_of(number), .length = length}));
  auto answer = answer_of<wire::OfferReply>(peer, Type::kOffer, 50);
  CHECK(answer.head.count == 1);
  return answer.rows.take<wire::OfferReplyRow>();
}

ByteVector write_frame(std::uint64_t grant, std::uint32_t length, const ByteVector& bytes) {
  return frame_bytes(
      Type::kWrite, 0, 51,
      wire_testing::golden::payload(wire::WriteRequest{.count = 1},
                                    wire::WriteRow{.grant = grant, .length = length}),
      bytes);
}

wire::CommitState commit(RawPeer& peer, std::uint64_t grant, std::uint32_t crc = 0,
                         std::uint32_t flags = 0) {
  peer.write(request(Type::kCommit, 52, wire::CommitRequest{.count = 1},
                     wire::CommitRow{.grant = grant, .crc32c = crc, .flags = flags}));
  return answer_of<wire::CommitReply>(peer, Type::kCommit, 52).rows.take<wire::CommitState>();
}

// Writes pattern(kLength, number) under key_of(number).
void put(RawPeer& peer, std::uint8_t number) {
  const auto granted = offer(peer, number);
  REQUIRE(granted.state == wire::OfferState::kGranted);
  const ByteVector bytes = pattern(kLength, number);
  peer.write(write_frame(granted.grant, kLength, bytes));
  REQUIRE(commit(peer, granted.grant, crc32c(0, bytes.data(), bytes.size()),
                 wire::CommitRow::kHasCrc) == wire::CommitState::kStored);
}

// The row of key_of(number), once the master knows of it.
Entry looked_up(RawPeer& master, std::uint8_t number) {
  Entry entry;
  eventually([&] {
    master.write(request(Type::kLookup, 60, wire::LookupRequest{.count = 1}, key_of(number)));
    auto answer = answer_of<wire::LookupReply>(master, Type::kLookup, 60);
    entry = answer.rows.take<Entry>();
    return entry.valid();
  });
  return entry;
}

wire::WaitRequest wait_for(std::uint8_t session, std::uint32_t first, std::uint32_t flags = 0,
                           std::uint32_t timeout_ms = 20'000) {
  return {.session = session_of(session),
          .first = first,
          .count_max = 1,
          .timeout_ms = timeout_ms,
          .flags = flags};
}

}  // namespace

TEST_CASE("node protocol: an offer is granted once, and committed once") {
  Node node;
  RawPeer peer = node.connect_tcp();
  const auto granted = offer(peer, 1);
  REQUIRE(granted.state == wire::OfferState::kGranted);
  CHECK(granted.grant != 0);
  CHECK(offer(peer, 1).state == wire::OfferState::kStored);  // on its way
  CHECK(offer(peer, 2, 0).state == wire::OfferState::kTooLarge);
  CHECK(offer(peer, 2, 1u << 30).state == wire::OfferState::kTooLarge);
  peer.write(write_frame(granted.grant, kLength, pattern(kLength, 1)));
  CHECK(commit(peer, granted.grant) == wire::CommitState::kStored);
  CHECK(commit(peer, granted.grant) == wire::CommitState::kNoGrant);
}

TEST_CASE("node protocol: an object goes in by WRITE, is looked up, and comes out by WAIT") {
  Service service;
  TestNode& node = service.node();
  RawPeer writer = RawPeer::connect(node.tcp());
  wire_testing::say_hello(writer);
  put(writer, 1);
  const ByteVector bytes = pattern(kLength, 1);
  RawPeer master = RawPeer::connect(service.master_endpoint());
  wire_testing::say_hello(master);
  const Entry entry = looked_up(master, 1);
  CHECK(entry.name_space == 5);
  CHECK(entry.length == kLength);
  CHECK(entry.node == node.id());
  CHECK(entry.crc32c == crc32c(0, bytes.data(), bytes.size()));
  CHECK(entry.flags == (Entry::kValid | Entry::kHasCrc));

  RawPeer reader = RawPeer::connect(node.unix_socket());
  wire_testing::say_hello(reader);
  const wire::PrefetchRow row{.key = entry.key,
                              .address = entry.address,
                              .generation = entry.generation,
                              .length = entry.length};
  reader.write(request(
      Type::kPrefetch, 2,
      wire::PrefetchRequest{.session = session_of(1), .lease_ms = 20'000, .count = 2}, row, row));

  // Block 0 through the region, and again, until it is released.
  wire::WaitRow first;
  for (std::uint32_t id = 3; id < 5; ++id) {
    reader.write(request(Type::kWait, id, wait_for(1, 0)));
    auto answer = answer_of<wire::WaitReply>(reader, Type::kWait, id);
    CHECK(answer.frame.bulk.empty());
    const auto again = answer.rows.take<wire::WaitRow>();
    if (id == 3) first = again;
    CHECK(std::memcmp(&again, &first, sizeof first) == 0);
  }
  CHECK(first.state == wire::BlockState::kReady);
  CHECK(first.length == kLength);
  CHECK(first.crc32c == entry.crc32c);
  CHECK(first.flags == Entry::kHasCrc);
  const std::uint8_t* const region = node.region().base;
  CHECK(std::memcmp(region + first.region_offset, bytes.data(), kLength) == 0);
  CHECK(std::memcmp(region + first.generation_word, &first.generation_value, 8) == 0);
  reader.write(
      request(Type::kRelease, 5, wire::ReleaseRequest{.session = session_of(1), .count = 1}));
  reader.write(request(Type::kWait, 6, wait_for(1, 0)));
  CHECK(answer_of<wire::WaitReply>(reader, Type::kWait, 6).rows.take<wire::WaitRow>().state ==
        wire::BlockState::kMiss);

  // Block 1 in the stream, by another connection that knows its token; it is released with that.
  RawPeer other = RawPeer::connect(node.tcp());
  wire_testing::say_hello(other);
  other.write(request(Type::kWait, 7, wait_for(1, 1, wire::WaitRequest::kInline)));
  auto answer = answer_of<wire::WaitReply>(other, Type::kWait, 7);
  CHECK(answer.rows.take<wire::WaitRow>().state == wire::BlockState::kReady);
  CHECK(answer.frame.bulk == bytes);
  other.write(request(Type::kWait, 8, wait_for(1, 1, wire::WaitRequest::kInline)));
  answer = answer_of<wire::WaitReply>(other, Type::kWait, 8);
  CHECK(answer.rows.take<wire::WaitRow>().state == wire::BlockState::kMiss);
  CHECK(answer.frame.bulk.empty());
  // The session is now that connection's, and ends with it.
  other.close();
  node.wait_idle();
  reader.write(request(Type::kWait, 9, wait_for(1, 0)));
  check_error(reader, ErrorCode::kNoSession, 9);
}

TEST_CASE("node protocol: grants are their connection's, and bytes of no grant are thrown away") {
  Node node;
  RawPeer peer = node.connect_tcp();
  RawPeer other = node.connect_tcp();
  const auto granted = offer(peer, 1);
  const ByteVector bytes = pattern(kLength, 1);

  CHECK(commit(other, granted.grant) == wire::CommitState::kNoGrant);
  other.write(write_frame(granted.grant, kLength, bytes));
  CHECK(commit(other, granted.grant) == wire::CommitState::kNoGrant);
  peer.write(write_frame(granted.grant + 1, kLength, bytes));
  peer.write(write_frame(granted.grant, kLength - 1, pattern(kLength - 1, 1)));
  CHECK(commit(peer, granted.grant) == wire::CommitState::kNotWritten);
  CHECK(commit(peer, granted.grant) == wire::CommitState::kNoGrant);

  const auto second = offer(peer, 1);
  CHECK(second.state == wire::OfferState::kGranted);
  CHECK(second.grant != granted.grant);
  CHECK(commit(peer, second.grant, 0, wire::CommitRow::kAbort) == wire::CommitState::kAborted);
  offer(peer, 1);
  peer.close();
  node->wait_idle();
  CHECK(offer(other, 1).state == wire::OfferState::kGranted);
}

TEST_CASE("node protocol: rows and bulk bytes of a WRITE must add up") {
  Node node;
  for (const std::uint32_t length : {kLength - 1, kLength + 1}) {
    RawPeer peer = node.connect_tcp();
    const auto granted = offer(peer, 1);
    REQUIRE(granted.state == wire::OfferState::kGranted);
    peer.write(write_frame(granted.grant, kLength, pattern(length, 1)));
    check_error(peer, ErrorCode::kMalformed, 51);
    node->wait_idle();
  }
}

TEST_CASE("node protocol: an OFFER in order of a prefix breaks at the first refusal") {
  Node node;
  RawPeer peer = node.connect_tcp();
  put(peer, 1);
  for (const bool in_order : {true, false}) {
    peer.write(request(
        Type::kOffer, 9,
        wire::OfferRequest{
            .name_space = 5, .count = 3, .flags = in_order ? wire::OfferRequest::kPrefixOrder : 0},
        wire::OfferRow{.key = key_of(1), .length = kLength},
        wire::OfferRow{.key = key_of(2), .length = 1u << 30},
        wire::OfferRow{.key = key_of(in_order ? 3 : 4), .length = kLength}));
    auto answer = answer_of<wire::OfferReply>(peer, Type::kOffer, 9);
    CHECK(answer.rows.take<wire::OfferReplyRow>().state == wire::OfferState::kStored);
    CHECK(answer.rows.take<wire::OfferReplyRow>().state == wire::OfferState::kTooLarge);
    CHECK(answer.rows.take<wire::OfferReplyRow>().state ==
          (in_order ? wire::OfferState::kPrefixBroken : wire::OfferState::kGranted));
  }
}

TEST_CASE("node protocol: ATTACH hands over the region, over a UNIX socket only") {
  Node node;
  RawPeer tcp = node.connect_tcp();
  tcp.write(request(Type::kAttach, 3));
  check_error(tcp, ErrorCode::kUnexpected, 3);

  auto channel = Channel::connect(node->unix_socket(), {.name = "raw", .mac = nullptr},
                                  wire::Role::kNode, Clock::now() + kPatience);
  const auto frame = channel->call(Type::kAttach, {}, {}, Clock::now() + kPatience);
  const auto attach = wire::read_all<wire::AttachReply>(frame.payload, "ATTACH");
  const UniqueFd region = channel->take_fd();
  REQUIRE(region);
  CHECK(attach.incarnation == channel->server().incarnation);
  CHECK(attach.region_bytes == node->region().bytes);
  CHECK(attach.read_write_offset % static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)) == 0);
  const int seals = ::fcntl(region.get(), F_GET_SEALS);
  CHECK((seals & F_SEAL_SHRINK) != 0);
}

TEST_CASE("node protocol: unknown sessions are said or ignored, and the connection lives") {
  Node node;
  RawPeer peer = node.connect_tcp();
  const wire::SessionId unknown = session_of(0x70);
  peer.write(request(Type::kRelease, 2, wire::ReleaseRequest{.session = unknown, .count = 9}));
  peer.write(request(Type::kEnd, 3, wire::EndRequest{.session = unknown}));
  peer.write(request(Type::kReport, 4, wire::ReportRequest{.session = unknown, .index = 1}));
  peer.write(request(Type::kWait, 5, wait_for(0x70, 0)));
  check_error(peer, ErrorCode::kNoSession, 5);
  // More blocks than a session may have.
  const ByteVector rows(1024 * sizeof(wire::PrefetchRow));
  const wire::PrefetchRequest head{.session = session_of(1), .lease_ms = 20'000, .count = 1024};
  const ByteVector prefetch =
      frame_bytes(Type::kPrefetch, 0, 6, wire_testing::join({wire::as_bytes(head), rows}));
  for (int i = 0; i < 65; ++i) peer.write(prefetch);
  check_error(peer, ErrorCode::kNoSession, 6);
  peer.write(request(Type::kWait, 7, wait_for(1, 0)));
  check_error(peer, ErrorCode::kNoSession, 7);
}

TEST_CASE("node protocol: stale locations are misses, and a WAIT has its time") {
  Node node;
  RawPeer peer = node.connect_tcp();
  peer.write(
      request(Type::kPrefetch, 2,
              wire::PrefetchRequest{.session = session_of(1), .lease_ms = 20'000, .count = 1},
              wire::PrefetchRow{.key = key_of(9), .generation = 77, .length = 123}));
  peer.write(request(Type::kWait, 3, wait_for(1, 0)));
  auto answer = answer_of<wire::WaitReply>(peer, Type::kWait, 3);
  CHECK(answer.head.count == 1);
  const auto row = answer.rows.take<wire::WaitRow>();
  CHECK(row.state == wire::BlockState::kMiss);
  CHECK(row.length == 123);
  // Block 1 may still be named, but is not in time.
  peer.write(request(Type::kWait, 4, wait_for(1, 1, 0, 10)));
  CHECK(answer_of<wire::WaitReply>(peer, Type::kWait, 4).head.count == 0);
  // Overtaken by another WAIT, the first gets nothing; and that one its session's end.
  peer.write(request(Type::kWait, 5, wait_for(1, 1)));
  peer.write(request(Type::kWait, 6, wait_for(1, 2)));
  CHECK(answer_of<wire::WaitReply>(peer, Type::kWait, 5).head.count == 0);
  peer.write(request(Type::kEnd, 7, wire::EndRequest{.session = session_of(1)}));
  check_error(peer, ErrorCode::kNoSession, 6);
}

TEST_CASE("node protocol: what does not belong to a node is refused") {
  Node node;
  for (const auto& [name, frame] : wire_testing::golden_messages()) {
    CAPTURE(name);
    const wire::Header header = wire::parse_header(frame);
    const wire::Bytes payload = wire::Bytes(frame).subspan(sizeof header, header.payload_bytes);
    const bool for_nodes = header.type >= Type::kAttach && !header.is_response();
    if (!for_nodes) {
      RawPeer peer = node.connect_tcp();
      peer.write(frame);
      check_error(peer, ErrorCode::kUnexpected, header.request_id);
      continue;
    }
    RawPeer longer = node.connect_unix();
    longer.write(frame_bytes(header.type, 0, 8, wire_testing::join({payload, ByteVector(1)}),
                             ByteVector(header.bulk_bytes)));
    check_error(longer, ErrorCode::kMalformed, 8);
    if (!payload.empty()) {
      RawPeer shorter = node.connect_unix();
      shorter.write(frame_bytes(header.type, 0, 8, payload.first(payload.size() - 1),
                                ByteVector(header.bulk_bytes)));
      check_error(shorter, ErrorCode::kMalformed, 8);
    }
    if (header.type != Type::kWrite) {
      RawPeer bulky = node.connect_unix();
      bulky.write(frame_bytes(header.type, 0, 8, payload, ByteVector(1)));
      check_error(bulky, ErrorCode::kMalformed, 8);
    }
  }
  RawPeer peer = node.connect_tcp();
  put(peer, 1);
}

TEST_CASE("node protocol: well-formed nonsense is answered, and leaves nothing behind") {
  const std::uint64_t seed = test_seed();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  Node node;
  const auto golden = wire_testing::golden_messages();
  for (int round = 0; round < 60; ++round) {
    RawPeer peer = random() % 2 == 0 ? node.connect_tcp() : node.connect_unix();
    bool alive = true;
    for (int frames = 0; frames < 30 && alive; ++frames) {
      auto chosen = golden.begin();
      std::advance(chosen, static_cast<std::ptrdiff_t>(random() % golden.size()));
      const wire::Header header = wire::parse_header(chosen->second);
      if (header.type < Type::kAttach || header.is_response()) continue;
      ByteVector bytes(chosen->second.begin() + sizeof header, chosen->second.end());
      for (std::size_t change = random() % 3; change > 0 && !bytes.empty(); --change) {
        bytes[random() % bytes.size()] = static_cast<std::byte>(random());
      }
      const wire::Bytes all(bytes);
      alive = peer.write(frame_bytes(header.type, 0, 9, all.first(header.payload_bytes),
                                     all.subspan(header.payload_bytes)));
    }
    peer.end_writing();
    while (const auto frame = peer.read_frame()) {
      const auto again = wire_testing::decode(frame->header, frame->payload);
      CHECK(again.size() == frame->payload.size());
    }
  }
  node->wait_idle();
  RawPeer peer = node.connect_tcp();
  put(peer, 1);
}

}  // namespace hymcache::testing
