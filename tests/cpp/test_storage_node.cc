// A storage node over real sockets, frame by frame: what a client of any quality may send it.
#include <doctest/doctest.h>
#include <sys/socket.h>

#include <memory>
#include <string>
#include <vector>

#include "kv_manager/csrc/storage_node.h"
#include "tests/cpp/service_fixture.h"
#include "transport/csrc/channel.h"
#include "transport/csrc/crc32c.h"
#include "transport/csrc/region_mapping.h"

namespace hymcache::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using wire::CommitState;
using wire::OfferState;

TimePoint soon() { return Clock::now() + kPatience; }

// A node without a master, and raw conversations with it.
class Node {
 public:
  explicit Node(NodeOptions options = {}) : node_(folder_.path(), {}, std::move(options)) {}

  TestNode& operator*() { return node_; }
  TestNode* operator->() { return &node_; }
  std::unique_ptr<Channel> connect(bool unix_socket = false) {
    return Channel::connect(unix_socket ? node_.unix_socket() : node_.tcp(), Identity{},
                            wire::Role::kNode, soon());
  }
  StorageNodeStats stats() { return node_->stats(); }

 private:
  ScratchFolder folder_;
  TestNode node_;
};

wire::OfferReplyRow offer(Channel& channel, std::uint64_t number, std::uint32_t length) {
  wire::PayloadWriter payload;
  payload.put(wire::OfferRequest{.name_space = 1, .count = 1, .flags = 0});
  payload.put(wire::OfferRow{.key = numbered_key(number), .length = length, .reserved = 0});
  const auto frame = channel.call(wire::Type::kOffer, payload.bytes(), {}, soon());
  wire::PayloadReader reader(frame.payload, "OFFER reply");
  CHECK(reader.take<wire::OfferReply>().count == 1);
  return reader.take<wire::OfferReplyRow>();
}

void write(Channel& channel, const std::vector<wire::WriteRow>& rows,
           const std::vector<std::uint8_t>& bytes) {
  wire::PayloadWriter payload;
  payload.put(wire::WriteRequest{.count = static_cast<std::uint32_t>(rows.size()), .reserved = 0});
  for (const wire::WriteRow& row : rows) payload.put(row);
  const iovec bulk{.iov_base = const_cast<std::uint8_t*>(bytes.data()), .iov_len = bytes.size()};
  channel.send(wire::Type::kWrite, payload.bytes(), {}, soon(), std::span(&bulk, 1));
}

CommitState commit(Channel& channel, std::uint64_t grant, std::uint32_t crc = 0,
                   std::uint32_t flags = 0) {
  wire::PayloadWriter payload;
  payload.put(wire::CommitRequest{.count = 1, .reserved = 0});
  payload.put(wire::CommitRow{.grant = grant, .crc32c = crc, .flags = flags});
  const auto frame = channel.call(wire::Type::kCommit, payload.bytes(), {}, soon());
  wire::PayloadReader reader(frame.payload, "COMMIT reply");
  CHECK(reader.take<wire::CommitReply>().count == 1);
  return reader.take<CommitState>();
}

std::vector<std::uint8_t> object(std::uint64_t number, std::uint32_t length) {
  std::vector<std::uint8_t> bytes(length);
  fill(bytes.data(), number, length);
  return bytes;
}

// Stores an object by WRITE; where it lies.
void store(Channel& channel, std::uint64_t number, std::uint32_t length) {
  wire::OfferReplyRow granted;
  eventually([&] {
    granted = offer(channel, number, length);
    return granted.state == OfferState::kGranted;
  });
  const auto bytes = object(number, length);
  write(channel, {{.grant = granted.grant, .length = length, .reserved = 0}}, bytes);
  CHECK(commit(channel, granted.grant, crc32c(0, bytes.data(), length), Entry::kHasCrc) ==
        CommitState::kStored);
}

bool is_serving(Node& node) {
  const auto channel = node.connect();
  return offer(*channel, 0xFFFF, 1).state == OfferState::kGranted;
}

TEST_CASE("node: bytes for a grant that is none are thrown away, and the stream goes on") {
  Node node;
  const auto channel = node.connect();
  const auto granted = offer(*channel, 1, 100'000);
  REQUIRE(granted.state == OfferState::kGranted);
  const auto bytes = object(1, 100'000);
  write(*channel, {{.grant = 12345, .length = 100'000, .reserved = 0}}, bytes);
  CHECK(commit(*channel, 12345) == CommitState::kNoGrant);
  // One of two: then the other is not written either.
  auto both = bytes;
  both.resize(150'000);
  write(*channel,
        {{.grant = granted.grant, .length = 100'000, .reserved = 0},
         {.grant = 777, .length = 50'000, .reserved = 0}},
        both);
  // The same twice, another length.
  write(*channel,
        {{.grant = granted.grant, .length = 100'000, .reserved = 0},
         {.grant = granted.grant, .length = 50'000, .reserved = 0}},
        both);
  write(*channel, {{.grant = granted.grant, .length = 99'999, .reserved = 0}}, object(1, 99'999));
  write(*channel, {}, {});
  CHECK(commit(*channel, granted.grant) == CommitState::kNotWritten);
  store(*channel, 2, 100'000);
  CHECK(node.stats().objects == 1);
  CHECK(node.stats().writes.open == 0);
}

TEST_CASE("node: many grants are written by one frame") {
  Node node;
  const auto channel = node.connect();
  std::vector<wire::WriteRow> rows;
  std::vector<std::uint8_t> bytes;
  std::vector<std::uint64_t> grants;
  for (std::uint64_t i = 0; i < 20; ++i) {
    const auto length = static_cast<std::uint32_t>(1 + i * 997);
    const auto granted = offer(*channel, i, length);
    REQUIRE(granted.state == OfferState::kGranted);
    rows.push_back({.grant = granted.grant, .length = length, .reserved = 0});
    const auto some = object(i, length);
    bytes.insert(bytes.end(), some.begin(), some.end());
    grants.push_back(granted.grant);
  }
  write(*channel, rows, bytes);
  for (const std::uint64_t grant : grants) CHECK(commit(*channel, grant) == CommitState::kStored);
  CHECK(node.stats().object_bytes == bytes.size());
}

TEST_CASE("node: a writer that is cut off in the middle leaves nothing") {
  Node node;
  for (const std::size_t sent : {std::size_t{1}, std::size_t{50'000}, std::size_t{99'999}}) {
    const auto channel = node.connect();
    const auto granted = offer(*channel, 1, 100'000);
    REQUIRE(granted.state == OfferState::kGranted);
    wire::PayloadWriter payload;
    payload.put(wire::WriteRequest{.count = 1, .reserved = 0});
    payload.put(wire::WriteRow{.grant = granted.grant, .length = 100'000, .reserved = 0});
    channel->begin_bulk(wire::Type::kWrite, payload.bytes(), {}, 100'000, soon());
    auto bytes = object(1, 100'000);
    const iovec part{.iov_base = bytes.data(), .iov_len = sent};
    channel->send_bulk(std::span(&part, 1), soon());
    channel->close();
    eventually([&] {
      const auto stats = node.stats();
      return stats.writes.open == 0 && stats.device.write_buffer_used_bytes == 0;
    });
  }
  CHECK(node.stats().objects == 0);
  CHECK(is_serving(node));
}

TEST_CASE("node: only who has the memory may commit without having sent the bytes") {
  Node node;
  const auto tcp = node.connect();
  CHECK(commit(*tcp, offer(*tcp, 1, 100).grant) == CommitState::kNotWritten);
  const auto unix_socket = node.connect(/*unix_socket=*/true);
  CHECK(commit(*unix_socket, offer(*unix_socket, 1, 100).grant) == CommitState::kNotWritten);
  const auto frame = unix_socket->call(wire::Type::kAttach, {}, {}, soon());
  const auto attached = wire::PayloadReader(frame.payload, "test").take<wire::AttachReply>();
  const RegionMapping mapping(unix_socket->take_fd(), attached);
  const auto granted = offer(*unix_socket, 1, 100);
  REQUIRE(mapping.writable(granted.region_offset, 100) != nullptr);
  CHECK(commit(*unix_socket, granted.grant) == CommitState::kStored);
  // Another's grant is none.
  CHECK(commit(*unix_socket, offer(*tcp, 2, 100).grant) == CommitState::kNoGrant);
}

TEST_CASE("node: clients cannot write what they may only read") {
  Node node;
  const auto channel = node.connect(/*unix_socket=*/true);
  const auto frame = channel->call(wire::Type::kAttach, {}, {}, soon());
  const auto attached = wire::PayloadReader(frame.payload, "test").take<wire::AttachReply>();
  const UniqueFd fd = channel->take_fd();
  REQUIRE(fd);
  CHECK(::ftruncate(fd.get(), 0) != 0);  // nor take it away from others
  const RegionMapping mapping(UniqueFd(::dup(fd.get())), attached);
  CHECK(mapping.writable(0, 8) == nullptr);
}

TEST_CASE("node: grants and sessions that nobody uses end with their leases") {
  Node node({.grant_lease = milliseconds(50)});
  const auto channel = node.connect();
  const auto granted = offer(*channel, 1, 100);
  REQUIRE(granted.state == OfferState::kGranted);
  const wire::PrefetchRequest prefetch{.session = {1}, .lease_ms = 1, .count = 0};
  channel->send(wire::Type::kPrefetch, wire::as_bytes(prefetch), {}, soon());
  eventually([&] { return node.stats().sessions.opened == 1; });
  eventually([&] {
    const auto stats = node.stats();
    return stats.writes.open == 0 && stats.sessions.sessions == 0;
  });
  CHECK(node.stats().sessions.expired == 1);
  CHECK(node.stats().writes.aborted == 1);
  CHECK(commit(*channel, granted.grant) == CommitState::kNoGrant);
  CHECK(offer(*channel, 1, 100).state == OfferState::kGranted);
}

// A location is a client's business; here it is known how the log and the directory count.
void ask_inline(Node& node, Channel& channel, std::uint8_t session, std::uint64_t first,
                std::uint32_t count_of, std::uint32_t length) {
  wire::PayloadWriter payload;
  payload.put(wire::PrefetchRequest{.session = {session}, .lease_ms = 10'000, .count = count_of});
  for (std::uint64_t i = first; i < first + count_of; ++i) {
    payload.put(wire::PrefetchRow{.key = numbered_key(i),
                                  .address = i * length,
                                  .generation = node.stats().incarnation + i + 1,
                                  .length = length,
                                  .reserved = 0});
  }
  channel.send(wire::Type::kPrefetch, payload.bytes(), {}, soon());
  const wire::WaitRequest wait{.session = {session},
                               .first = 0,
                               .count_max = count_of,
                               .timeout_ms = 10'000,
                               .flags = wire::WaitRequest::kInline};
  channel.send(wire::Type::kWait, wire::as_bytes(wait), {}, soon());
}

// What is being sent when a node stops comes back to a session table that has others waiting.
TEST_CASE("node: it stops while it sends, and others wait for the room") {
  constexpr std::uint32_t kLength = 4u << 20;  // four of them are more than sockets hold
  Node node({.staging_bytes = 4 * kLength, .write_buffer_bytes = 4 * kLength});
  const auto writer = node.connect();
  for (std::uint64_t i = 0; i < 12; ++i) store(*writer, i, kLength);  // the last four stay in DRAM
  node->wait_flushed();
  const auto busy = node.connect();
  ask_inline(node, *busy, 1, 0, 4, kLength);
  eventually([&] { return node.stats().sessions.bytes_sent > 0; });
  const auto waiting = node.connect();
  ask_inline(node, *waiting, 2, 4, 1, kLength);
  ask_inline(node, *waiting, 3, 5, 1, kLength);
  eventually([&] { return node.stats().sessions.opened == 3; });
  node->stop();
}

}  // namespace
}  // namespace hymcache::testing
