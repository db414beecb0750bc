// Blocks by RDMA, both ends and what lies between: links, keys, bounce memory, and the way back to
// TCP. The device is memory of this process (verbs_memory.h).
#include <doctest/doctest.h>

#include <vector>

#include "lookup/csrc/store_client.h"
#include "tests/cpp/golden_messages.h"
#include "tests/cpp/served_peers.h"
#include "tests/cpp/service_fixture.h"
#include "tests/cpp/verbs_memory.h"
#include "transport/csrc/verbs_batch.h"
#include "transport/csrc/verbs_node_channel.h"

namespace hymcache::testing {
namespace {

using wire::ErrorCode;
using wire::Type;
using wire_testing::ByteVector;
using wire_testing::frame_bytes;
using wire_testing::RawPeer;
using Status = BlockStatus;

constexpr std::uint32_t kLength = 100'000;
constexpr std::size_t kBounce = 256u << 10;  // less than a batch, and not a multiple of a block

struct Rig {
  explicit Rig(bool block_keys, SessionLimits limits = {}, Clock::duration lease = kGrantLease)
      : service({NodeOptions{.staging_bytes = 8u << 20,
                             .write_buffer_bytes = 8u << 20,
                             .sessions = limits,
                             .grant_lease = lease,
                             .verbs = std::make_shared<MemoryAcceptor>(fabric, block_keys)}}) {}

  std::shared_ptr<StoreClient> client() {
    initiator = std::make_shared<MemoryInitiator>(fabric, kBounce);
    return service.client(TransportChoice::kVerbs, kPatience, initiator);
  }
  // Only the keys of the whole memory are left, where there are such.
  void wait_no_block_keys(bool block_keys) {
    eventually([&] { return fabric->windows_open() == (block_keys ? 0u : 2u); });
    CHECK(service.node()->stats().verbs.keys_held == 0);
  }

  std::shared_ptr<VerbsFabric> fabric = std::make_shared<VerbsFabric>();
  std::shared_ptr<MemoryInitiator> initiator;
  Service service;
};

TEST_CASE("verbs: blocks of all sizes come back through bounce memory") {
  for (const bool block_keys : {true, false}) {
    CAPTURE(block_keys);
    Rig rig(block_keys);
    const auto client = rig.client();
    Blocks blocks(0, {1, 63, 4097, 100'000, 262'144, 262'145, 1'000'003, 2u << 20, 5});
    CHECK(count(put(*client, blocks), Status::kOk) == blocks.size());
    wait_found(*client, blocks.keys());
    CHECK(count(get(*client, blocks), Status::kOk) == blocks.size());
    for (std::size_t i = 0; i < blocks.size(); ++i) CHECK(blocks.holds(i));
    const ClientStats stats = client->stats();
    CHECK(stats.verbs.written == blocks.bytes());
    CHECK(stats.verbs.read == blocks.bytes());
    CHECK(stats.tcp.read + stats.tcp.written == 0);
    CHECK(stats.verbs_fallbacks == 0);
    rig.wait_no_block_keys(block_keys);
  }
}

TEST_CASE("verbs: registered memory is one batch, without a copy") {
  for (const bool block_keys : {true, false}) {
    CAPTURE(block_keys);
    Rig rig(block_keys);
    const auto client = rig.client();
    Blocks blocks(0, 8, kLength);
    for (const auto& memory : blocks.memory()) {
      rig.initiator->register_memory(memory.data(), memory.size());
    }
    CHECK(count(put(*client, blocks), Status::kOk) == 8);
    wait_found(*client, blocks.keys());
    rig.service.node().wait_idle();
    const std::uint64_t before = rig.fabric->batches;
    rig.fabric->pieces = 0;
    CHECK(count(get(*client, blocks), Status::kOk) == 8);
    // Settled at once, or in two goes; three segments a block, and a generation word.
    CHECK(rig.fabric->batches - before <= 8);
    CHECK(rig.fabric->pieces == 8 * (block_keys ? 3 : 4));
    for (std::size_t i = 0; i < blocks.size(); ++i) CHECK(blocks.holds(i));
  }
}

TEST_CASE("verbs: what fails goes over TCP, and RDMA comes back") {
  for (const bool block_keys : {true, false}) {
    CAPTURE(block_keys);
    Rig rig(block_keys);
    const auto client = rig.client();
    Blocks blocks(0, 4, kLength);
    rig.fabric->fail_transfers = 1;
    CHECK(count(put(*client, blocks), Status::kOk) == 4);
    CHECK(client->stats().tcp.written == blocks.bytes());
    wait_found(*client, blocks.keys());
    eventually([&] {
      CHECK(count(get(*client, blocks), Status::kOk) == 4);
      return client->stats().verbs.read > 0;
    });
    rig.fabric->fail_transfers = 1;
    const std::uint64_t before = client->stats().tcp.read;
    CHECK(count(get(*client, blocks.wipe()), Status::kOk) == 4);
    CHECK(client->stats().tcp.read == before + blocks.bytes());
    for (std::size_t i = 0; i < blocks.size(); ++i) CHECK(blocks.holds(i));
    CHECK(client->stats().verbs_failures == 2);
    CHECK(client->stats().verbs_last_failure == "the peer does not answer");
  }
}

TEST_CASE("verbs: a write that fails half-way is stored as a whole, over TCP") {
  for (const bool block_keys : {true, false}) {
    CAPTURE(block_keys);
    Rig rig(block_keys);
    const auto client = rig.client();
    Blocks blocks(0, 8, kLength);  // more than the bounce memory takes at once
    rig.fabric->pass_transfers = 1;
    rig.fabric->fail_transfers = 1;
    CHECK(count(put(*client, blocks), Status::kOk) == 8);
    CHECK(rig.fabric->batches == 2);
    CHECK(client->stats().tcp.written == blocks.bytes());
    CHECK(client->stats().verbs_fallbacks == 1);
    CHECK(rig.initiator->told_calls == 1);
    CHECK(rig.initiator->told_reason == "the peer does not answer");
    wait_found(*client, blocks.keys());
    CHECK(count(get(*client, blocks.wipe()), Status::kOk) == 8);
    for (std::size_t i = 0; i < blocks.size(); ++i) CHECK(blocks.holds(i));
  }
}

TEST_CASE("verbs: bytes are counted by the way that each took") {
  Rig rig(true);
  const auto client = rig.client();
  Blocks blocks(0, 300, 1000);  // more than one WAIT hands out
  CHECK(count(put(*client, blocks), Status::kOk) == 300);
  wait_found(*client, blocks.keys());
  rig.service.node().wait_idle();
  rig.fabric->pass_transfers = 1;
  rig.fabric->fail_transfers = 1;
  CHECK(count(get(*client, blocks.wipe()), Status::kOk) == 300);
  const ClientStats stats = client->stats();
  CHECK(stats.verbs.read > 0);
  CHECK(stats.tcp.read > 0);
  CHECK(stats.verbs.read + stats.tcp.read == blocks.bytes());
}

TEST_CASE("verbs: a client that insists on RDMA counts what a node without it costs") {
  Service plain;
  const auto fabric = std::make_shared<VerbsFabric>();
  const auto initiator = std::make_shared<MemoryInitiator>(fabric, kBounce);
  const auto client = plain.client(TransportChoice::kVerbs, kPatience, initiator);
  Blocks blocks(0, 4, kLength);
  CHECK(count(put(*client, blocks), Status::kOk) == 4);
  wait_found(*client, blocks.keys());
  CHECK(count(get(*client, blocks.wipe()), Status::kOk) == 4);
  CHECK(client->stats().verbs_fallbacks >= 2);
  CHECK(client->stats().verbs_failures == 0);
  CHECK(initiator->told_calls == 1);  // the others wait for a minute
  CHECK(initiator->told_reason == "the node offers no RDMA");
}

TEST_CASE("verbs: a node that refuses, or has no keys, is read over TCP") {
  Rig rig(true);
  rig.fabric->refuse = true;
  const auto client = rig.client();
  Blocks blocks(0, 4, kLength);
  CHECK(count(put(*client, blocks), Status::kOk) == 4);
  wait_found(*client, blocks.keys());
  CHECK(count(get(*client, blocks), Status::kOk) == 4);
  CHECK(client->stats().verbs_last_failure == "the device is gone");
  CHECK(rig.service.node()->stats().verbs.refused >= 1);
  rig.fabric->refuse = false;
  rig.fabric->give_no_keys = true;
  eventually([&] {
    CHECK(count(get(*client, blocks), Status::kOk) == 4);
    return client->stats().verbs_last_failure == "the node gave no key for a block";
  });
  CHECK(client->stats().verbs.read == 0);
}

TEST_CASE("verbs: a flipped bit is found, and told to the node") {
  Rig rig(true);
  const auto client = rig.client();
  Blocks blocks(0, 1, kLength);
  CHECK(count(put(*client, blocks), Status::kOk) == 1);
  wait_found(*client, blocks.keys());
  // In the write buffer, where the only block lies at its start.
  rig.service.node().region().base[rig.service.node().region().read_write_offset + 5] ^= 1;
  CHECK(count(get(*client, blocks), Status::kCorrupt) == 1);
  eventually([&] { return rig.service.node()->stats().reports == 1; });
}

// ---- byte by byte ----------------------------------------------------------------------------

template <class... Parts>
ByteVector request(Type type, std::uint32_t id, const Parts&... parts) {
  return frame_bytes(type, 0, id, wire_testing::golden::payload(parts...));
}

RawPeer connect(TestNode& node) {
  RawPeer peer = RawPeer::connect(node.tcp());
  wire::Hello hello = wire_testing::hello_of("raw");
  hello.features = ~0ull;
  CHECK(wire_testing::say_hello(peer, hello).features == wire::kFeatureVerbs);
  return peer;
}

wire::LinkEndpoint endpoint() {
  return {.queue_pair = 9, .link_layer = 2, .gid_type = 2, .mtu = 5};
}

RawPeer::Frame call(RawPeer& peer, const ByteVector& frame) {
  peer.write(frame);
  auto answer = peer.read_frame();
  REQUIRE(answer.has_value());
  return std::move(*answer);
}

struct Offered {
  wire::OfferReplyRow row;
  wire::VerbsKey key = 0;
};

Offered offer(RawPeer& peer, std::uint64_t number, bool keyed) {
  const auto frame =
      call(peer, request(Type::kOffer, 5, wire::OfferRequest{.name_space = 1, .count = 1},
                         wire::OfferRow{.key = numbered_key(number), .length = kLength}));
  wire::PayloadReader reader(frame.payload, "OFFER reply");
  CHECK(reader.take<wire::OfferReply>().count == 1);
  Offered offered{.row = reader.take<wire::OfferReplyRow>()};
  if (keyed) offered.key = reader.take<wire::VerbsKey>();
  reader.finish();
  CHECK(offered.row.state == wire::OfferState::kGranted);
  return offered;
}

TEST_CASE("verbs: keys stand behind the rows of a linked connection, and end with the grant") {
  Rig rig(true);
  RawPeer peer = connect(rig.service.node());
  offer(peer, 1, /*keyed=*/false);
  const auto linked = call(peer, request(Type::kLink, 3, endpoint()));
  wire::PayloadReader reader(linked.payload, "LINK reply");
  const auto head = reader.take<wire::LinkReply>();
  reader.finish();
  CHECK(head.count == 0);
  CHECK(head.flags == wire::LinkReply::kBlockKeys);
  CHECK(head.address == reinterpret_cast<std::uintptr_t>(rig.service.node().region().base));
  CHECK(head.region_bytes == rig.service.node().region().bytes);
  for (const std::uint32_t flags : {wire::CommitRow::kAbort, 0u}) {
    const Offered offered = offer(peer, 2 + flags, /*keyed=*/true);
    CHECK(offered.key != 0);
    CHECK(rig.fabric->windows_open() == 1);
    call(peer, request(Type::kCommit, 6, wire::CommitRequest{.count = 1},
                       wire::CommitRow{.grant = offered.row.grant, .flags = flags}));
    CHECK(rig.fabric->windows_open() == 0);
  }
  offer(peer, 10, /*keyed=*/true);
  CHECK(call(peer, request(Type::kUnlink, 7)).payload.empty());
  CHECK(rig.fabric->windows_open() == 0);
  offer(peer, 11, /*keyed=*/false);
}

TEST_CASE("verbs: the key of a grant ends with its lease, and all with the connection") {
  Rig rig(true, {}, std::chrono::milliseconds(500));
  RawPeer peer = connect(rig.service.node());
  call(peer, request(Type::kLink, 3, endpoint()));
  offer(peer, 1, /*keyed=*/true);
  eventually([&] { return rig.fabric->windows_open() == 0; });
  offer(peer, 2, /*keyed=*/true);
  peer.close();
  eventually([&] { return rig.fabric->windows_open() == 0 && rig.fabric->peers.empty(); });
}

TEST_CASE(
    "verbs: the key of a block ends with RELEASE, END, another WAIT and the session's lease") {
  Rig rig(true, {.lease_ms_max = 2000});
  const auto client = rig.client();
  Blocks blocks(0, 1, kLength);
  CHECK(count(put(*client, blocks), Status::kOk) == 1);
  wait_found(*client, blocks.keys());
  const Entry entry = client->lookup(blocks.keys(), client->deadline()).front();
  rig.service.node().wait_idle();
  RawPeer peer = connect(rig.service.node());
  call(peer, request(Type::kLink, 3, endpoint()));
  std::uint8_t number = 0;
  const auto session = [&] { return wire_testing::golden::counting<16>(number); };
  const auto hand_out = [&](std::uint32_t flags = 0) {
    const auto frame = call(peer, request(Type::kWait, 4,
                                          wire::WaitRequest{.session = session(),
                                                            .first = 0,
                                                            .count_max = 1,
                                                            .timeout_ms = 10'000,
                                                            .flags = flags}));
    wire::PayloadReader reader(frame.payload, "WAIT reply");
    CHECK(reader.take<wire::WaitReply>().count == 1);
    CHECK(reader.take<wire::WaitRow>().state == wire::BlockState::kReady);
    const bool keyed = flags == 0;
    const wire::VerbsKey key = keyed ? reader.take<wire::VerbsKey>() : 0;
    reader.finish();
    CHECK(rig.fabric->windows_open() == (keyed ? 1u : 0u));
    return key;
  };
  const auto open = [&] {
    ++number;
    peer.write(request(Type::kPrefetch, 3,
                       wire::PrefetchRequest{.session = session(), .lease_ms = 2000, .count = 1},
                       wire::PrefetchRow{.key = entry.key,
                                         .address = entry.address,
                                         .generation = entry.generation,
                                         .length = entry.length}));
    return hand_out();
  };
  const auto settled = [&] { eventually([&] { return rig.fabric->windows_open() == 0; }); };

  const wire::VerbsKey first = open();
  CHECK(hand_out() != first);  // another WAIT: another key, and only that
  peer.write(request(Type::kRelease, 5,
                     wire::ReleaseRequest{.session = session(), .first = 0, .count = 1}));
  settled();
  open();
  peer.write(request(Type::kEnd, 5, wire::EndRequest{.session = session()}));
  settled();
  open();
  hand_out(wire::WaitRequest::kInline);  // it goes in the stream after all
  open();
  settled();  // nobody comes back for it
}

TEST_CASE("verbs: a node without RDMA takes no links, one that refuses lives on") {
  Service plain;
  RawPeer peer = RawPeer::connect(plain.node().tcp());
  wire_testing::say_hello(peer);
  CHECK(call(peer, request(Type::kLink, 3, endpoint())).error().code == ErrorCode::kUnexpected);

  Rig rig(true);
  rig.fabric->refuse = true;
  RawPeer refused = connect(rig.service.node());
  CHECK(call(refused, request(Type::kLink, 3, endpoint())).error().code == ErrorCode::kBusy);
  offer(refused, 1, /*keyed=*/false);
}

TEST_CASE("verbs: a node whose regions lie outside of its memory is not linked to") {
  const wire::LinkReply head{
      .endpoint = endpoint(), .address = 0x1000, .region_bytes = 100, .flags = 0, .count = 1};
  const std::vector<wire::LinkRegion> bad{{.region_offset = 101, .bytes = 0},
                                          {.region_offset = 60, .bytes = 41},
                                          {.region_offset = ~0ull, .bytes = 2}};
  for (const wire::LinkRegion& region : bad) {
    CAPTURE(region.region_offset);
    wire_testing::TestServer server(
        {}, {.role = wire::Role::kNode, .name = "node-1", .mac = nullptr},
        [&](auto& peer, const wire::Header& header, wire::Bytes) {
          peer.reply(header, wire_testing::golden::payload(head, region));
        });
    const auto fabric = std::make_shared<VerbsFabric>();
    const auto record = std::make_shared<VerbsRecord>();
    const auto initiator = std::make_shared<MemoryInitiator>(fabric, kBounce);
    const TimePoint deadline = Clock::now() + kPatience;
    VerbsNodeChannel channel(
        Channel::connect(server.endpoint(), {.role = wire::Role::kClient, .name = "c", .mac = {}},
                         wire::Role::kNode, deadline),
        std::make_shared<VerbsTarget>(initiator, record));
    std::vector<Status> statuses(1);
    const std::vector<std::uint32_t> lengths{1};
    CHECK_THROWS_AS(channel.read({}, 0, lengths, {}, {}, deadline, statuses), Error);
    CHECK(record->last_failure().find("lies outside of it") != std::string::npos);
    CHECK(record->links() == 0);
    CHECK(fabric->batches == 0);
  }
}

TEST_CASE("verbs: segments are cut where a slice begins and ends") {
  std::vector<char> memory(100);
  const std::vector<Segment> place{{.data = memory.data(), .bytes = 10},
                                   {.data = memory.data() + 50, .bytes = 20}};
  for (std::uint64_t from = 0; from <= 30; ++from) {
    for (std::uint64_t bytes = 0; bytes <= 30 - from; ++bytes) {
      std::uint64_t at = from;
      std::uint64_t left = bytes;
      for (const Segment& part : slice_segments(place, from, bytes)) {
        const std::ptrdiff_t where = static_cast<char*>(part.data) - memory.data();
        CHECK(where == static_cast<std::ptrdiff_t>(at < 10 ? at : at + 40));
        CHECK(part.bytes > 0);
        at += part.bytes;
        left -= part.bytes;
      }
      CHECK(left == 0);
    }
  }
}

}  // namespace
}  // namespace hymcache::testing
