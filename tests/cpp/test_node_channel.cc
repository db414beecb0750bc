// A client's side of reads and writes, against a node that answers whatever the test says.
#include <doctest/doctest.h>
#include <sys/mman.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/device_fixture.h"
#include "tests/cpp/raw_peer.h"
#include "transport/csrc/crc32c.h"
#include "transport/csrc/frame_server.h"
#include "transport/csrc/shm_node_channel.h"
#include "transport/csrc/tcp_node_channel.h"

namespace hymcache::testing {
namespace {

using std::chrono::milliseconds;
using wire_testing::kPatience;
using Status = BlockStatus;

constexpr std::uint64_t kRegionBytes = 64u << 10;
constexpr std::uint64_t kWritable = 32u << 10;

TimePoint soon() { return Clock::now() + kPatience; }

class FakeNode : private FrameServer::Handler {
 public:
  using Peer = FrameServer::Peer;
  using OnFrame = std::function<void(Peer&, const wire::Header&, wire::Bytes)>;

  explicit FakeNode(OnFrame on_frame)
      : on_frame_(std::move(on_frame)), memory_(::memfd_create("node", MFD_CLOEXEC)) {
    REQUIRE(::ftruncate(memory_.get(), kRegionBytes) == 0);
    void* const mapped =
        ::mmap(nullptr, kRegionBytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory_.get(), 0);
    REQUIRE(mapped != MAP_FAILED);
    region_ = static_cast<std::uint8_t*>(mapped);
    thread_.loop().call([this] {
      server_ = std::make_unique<FrameServer>(
          thread_.loop(), Identity{.role = wire::Role::kNode, .name = "fake", .mac = {}},
          FrameServerOptions{.listen = {Endpoint::parse("127.0.0.1:0"),
                                        Endpoint::parse("unix:" + folder_.file("socket"))}},
          static_cast<FrameServer::Handler&>(*this));
    });
  }
  ~FakeNode() override {
    thread_.stop();
    server_.reset();
    ::munmap(region_, kRegionBytes);
  }

  std::uint8_t* region() const { return region_; }
  std::unique_ptr<NodeChannel> connect(bool shm) {
    const Endpoint endpoint = server_->endpoints().at(shm ? 1 : 0);
    auto channel = Channel::connect(endpoint, Identity{}, wire::Role::kNode, soon());
    if (!shm) return std::make_unique<TcpNodeChannel>(std::move(channel));
    return std::make_unique<ShmNodeChannel>(std::move(channel), std::make_shared<SharedRegion>());
  }

 private:
  void on_frame(Peer& peer, const wire::Header& header, wire::Bytes payload) override {
    if (header.type != wire::Type::kAttach) return on_frame_(peer, header, payload);
    const wire::AttachReply reply{
        .region_bytes = kRegionBytes, .read_write_offset = kWritable, .incarnation = 1};
    peer.reply(header, wire::as_bytes(reply), {}, memory_.get());
  }
  void on_peer_gone(Peer&) override {}

  const OnFrame on_frame_;
  ScratchFolder folder_;
  const UniqueFd memory_;
  std::uint8_t* region_ = nullptr;
  LoopThread thread_{"fake"};
  std::unique_ptr<FrameServer> server_;
};

// One block's place, in as many segments as wanted.
class Place {
 public:
  explicit Place(std::size_t bytes, std::size_t segments = 1) : memory_(bytes) {
    for (std::size_t i = 0; i < segments; ++i) {
      const std::size_t from = bytes * i / segments;
      segments_.push_back(
          {.data = memory_.data() + from, .bytes = bytes * (i + 1) / segments - from});
    }
  }
  BlockPlaces places() {
    return [this](std::uint32_t) { return std::span<const Segment>(segments_); };
  }
  std::vector<std::uint8_t>& memory() { return memory_; }

 private:
  std::vector<std::uint8_t> memory_;
  std::vector<Segment> segments_;
};

struct Outcome {
  std::uint32_t count = 0;
  std::vector<Status> statuses;
  std::string error;
  ErrorKind kind = ErrorKind::kConfig;
  bool open = true;
};

Outcome read(FakeNode& node, bool shm, Place& place, std::vector<std::uint32_t> lengths,
             Clock::duration patience = kPatience) {
  const auto channel = node.connect(shm);
  Outcome outcome;
  outcome.statuses.resize(lengths.size());
  try {
    outcome.count = channel->read(wire::SessionId{}, 3, lengths, place.places(), {},
                                  Clock::now() + patience, outcome.statuses);
  } catch (const Error& error) {
    outcome.error = error.what();
    outcome.kind = error.kind();
  }
  outcome.open = channel->channel().open();
  return outcome;
}

// Answers WAIT with these rows, and bytes for inline readers.
FakeNode::OnFrame wait_answer(std::vector<wire::WaitRow> rows, std::uint32_t first = 3,
                              std::vector<std::uint8_t> bulk = {}, std::int64_t count = -1) {
  const auto kept = std::make_shared<std::vector<std::uint8_t>>(std::move(bulk));
  return
      [rows, first, kept, count](FrameServer::Peer& peer, const wire::Header& header, wire::Bytes) {
        if (header.type != wire::Type::kWait) return;
        const wire::WaitReply head{.first = first,
                                   .count = count < 0 ? static_cast<std::uint32_t>(rows.size())
                                                      : static_cast<std::uint32_t>(count)};
        std::vector<iovec> parts;
        if (!kept->empty()) parts.push_back({.iov_base = kept->data(), .iov_len = kept->size()});
        peer.socket().send_bulk(wire::Type::kWait, wire::kFlagResponse, header.request_id,
                                wire::as_bytes(head), std::as_bytes(std::span(rows)),
                                std::move(parts), nullptr);
      };
}

wire::WaitRow ready(std::uint32_t length, const std::vector<std::uint8_t>& bytes = {}) {
  wire::WaitRow row;
  row.state = wire::BlockState::kReady;
  row.length = length;
  if (bytes.empty()) return row;
  row.crc32c = crc32c(0, bytes.data(), bytes.size());
  row.flags = Entry::kHasCrc;
  return row;
}

std::vector<std::uint8_t> contents(std::uint32_t length) {
  std::vector<std::uint8_t> bytes(length);
  fill(bytes.data(), 4, length);
  return bytes;
}

TEST_CASE("node channel: a block lands in any number of segments") {
  for (const std::uint32_t length : {1u, 700u, 300'000u}) {
    const auto bytes = contents(length);
    FakeNode node(wait_answer({ready(length, bytes)}, 3, bytes));
    for (const std::size_t segments : {1u, 2u, 64u, 65u, 500u}) {
      CAPTURE(length);
      CAPTURE(segments);
      Place place(length, segments);
      const Outcome outcome = read(node, false, place, {length});
      CHECK(outcome.error == "");
      CHECK(outcome.count == 1);
      CHECK(outcome.statuses[0] == Status::kOk);
      CHECK(place.memory() == bytes);
    }
  }
}

TEST_CASE("node channel: shared memory is believed as far as checksum and generation go") {
  const auto bytes = contents(1000);
  wire::WaitRow row = ready(1000, bytes);
  row.region_offset = 4096;
  row.generation_word = 8;
  row.generation_value = 77;
  for (const auto& [generation, flip, expected] :
       {std::tuple{77, 0, Status::kOk}, std::tuple{78, 0, Status::kMiss},
        std::tuple{77, 1, Status::kCorrupt}, std::tuple{78, 1, Status::kMiss}}) {
    FakeNode node(wait_answer({row}));
    std::memcpy(node.region() + 4096, bytes.data(), bytes.size());
    node.region()[4096 + 500] ^= static_cast<std::uint8_t>(flip);
    node.region()[8] = static_cast<std::uint8_t>(generation);
    Place place(1000, 3);
    const Outcome outcome = read(node, true, place, {1000});
    CHECK(outcome.statuses[0] == expected);
    CHECK(outcome.open);
    if (expected == Status::kOk) CHECK(place.memory() == bytes);
  }
}

TEST_CASE("node channel: misses, device errors and damage are each block's own") {
  const auto bytes = contents(100);
  wire::WaitRow miss, broken, damaged = ready(100, bytes);
  broken.state = wire::BlockState::kDeviceError;
  damaged.crc32c ^= 1;
  std::vector<std::uint8_t> bulk = bytes;
  bulk.insert(bulk.end(), bytes.begin(), bytes.end());
  FakeNode node(wait_answer({miss, damaged, broken, ready(100, bytes)}, 3, bulk));
  Place place(100);
  const Outcome outcome = read(node, false, place, {100, 100, 100, 100});
  CHECK(outcome.count == 4);
  CHECK(outcome.statuses ==
        std::vector{Status::kMiss, Status::kCorrupt, Status::kDeviceError, Status::kOk});
}

TEST_CASE("node channel: an answer to another question ends the connection") {
  const auto bytes = contents(100);
  wire::WaitRow outside = ready(100);
  outside.region_offset = kRegionBytes - 99;
  const std::pair<bool, FakeNode::OnFrame> answers[] = {
      {false, wait_answer({ready(100)}, /*first=*/4, bytes)},
      {false, wait_answer({ready(99)}, 3, contents(99))},
      {false, wait_answer({ready(100)}, 3, contents(99))},
      {false, wait_answer({ready(100)}, 3)},
      {false, wait_answer({ready(100), ready(100)}, 3, contents(200))},
      {false, wait_answer({ready(100)}, 3, bytes, /*count=*/9)},
      {true, wait_answer({ready(100)}, 3, bytes)},
      {true, wait_answer({outside}, 3)},
  };
  int number = 0;
  for (const auto& [shm, answer] : answers) {
    CAPTURE(number++);
    FakeNode node(answer);
    Place place(100);
    const Outcome outcome = read(node, shm, place, {100});
    CHECK(outcome.kind == ErrorKind::kProtocol);
    CHECK_FALSE(outcome.error.empty());
    CHECK_FALSE(outcome.open);
  }
}

TEST_CASE("node channel: a session that is not known is no error") {
  FakeNode node([](FrameServer::Peer& peer, const wire::Header& header, wire::Bytes) {
    peer.socket().send_error(header.request_id, wire::ErrorCode::kNoSession, "gone");
  });
  for (const bool shm : {false, true}) {
    Place place(100);
    const Outcome outcome = read(node, shm, place, {100});
    CHECK(outcome.count == 0);
    CHECK(outcome.error == "");
    CHECK(outcome.open);
  }
}

TEST_CASE("node channel: a refusal is passed on") {
  FakeNode node([](FrameServer::Peer& peer, const wire::Header& header, wire::Bytes) {
    peer.socket().send_error(header.request_id, wire::ErrorCode::kMalformed, "what is that?");
  });
  Place place(100);
  const Outcome outcome = read(node, false, place, {100});
  CHECK(outcome.error == "what is that?");
  CHECK(outcome.kind == ErrorKind::kProtocol);
  CHECK_FALSE(outcome.open);
}

TEST_CASE("node channel: silence costs the deadline") {
  for (const bool shm : {false, true}) {
    FakeNode node([](FrameServer::Peer&, const wire::Header&, wire::Bytes) {});
    Place place(100);
    const TimePoint before = Clock::now();
    const Outcome outcome = read(node, shm, place, {100}, milliseconds(100));
    CHECK(outcome.kind == ErrorKind::kUnavailable);
    CHECK_FALSE(outcome.open);
    CHECK(Clock::now() - before >= milliseconds(100));
    CHECK(Clock::now() - before < milliseconds(3000));
  }
  // Nothing was settled in time: said by the node, which lives.
  FakeNode node(wait_answer({}));
  Place place(100);
  const Outcome outcome = read(node, false, place, {100});
  CHECK(outcome.kind == ErrorKind::kUnavailable);
  CHECK(outcome.open);
}

// Grants everything; commits as it is told.
class Writing {
 public:
  FakeNode::OnFrame handler() {
    return [this](FrameServer::Peer& peer, const wire::Header& header, wire::Bytes payload) {
      wire::PayloadReader reader(payload, "test");
      wire::PayloadWriter reply;
      if (header.type == wire::Type::kOffer) {
        const auto request = reader.take<wire::OfferRequest>();
        offered += request.count;
        reply.put(wire::OfferReply{.count = request.count + extra_rows});
        for (std::uint32_t i = 0; i < request.count + extra_rows; ++i) {
          reply.put(
              wire::OfferReplyRow{.state = state, .grant = i + 1, .region_offset = region_offset});
        }
      } else if (header.type == wire::Type::kCommit) {
        const auto request = reader.take<wire::CommitRequest>();
        const auto rows = reader.take_rows<wire::CommitRow>(request.count, wire::kOfferRowsMax);
        reply.put(wire::CommitReply{.count = request.count + extra_states});
        for (std::uint32_t i = 0; i < request.count + extra_states; ++i) {
          if (i < request.count) commits.push_back(wire::row_at<wire::CommitRow>(rows, i));
          reply.put(commit_state);
        }
      } else {
        written += header.bulk_bytes;
        return;
      }
      peer.reply(header, reply.bytes());
    };
  }

  wire::OfferState state = wire::OfferState::kGranted;
  wire::CommitState commit_state = wire::CommitState::kStored;
  std::uint32_t extra_rows = 0, extra_states = 0;
  std::uint64_t region_offset = kWritable;
  std::uint64_t offered = 0, written = 0;
  std::vector<wire::CommitRow> commits;
};

Outcome write(FakeNode& node, bool shm, Place& place, std::size_t count,
              const TransferOptions& options = {}) {
  const auto channel = node.connect(shm);
  std::vector<NodeChannel::Offered> blocks(count);
  for (auto& block : blocks) block.length = static_cast<std::uint32_t>(place.memory().size());
  Outcome outcome;
  outcome.statuses.assign(count, Status::kUnavailable);
  try {
    channel->write(1, false, blocks, place.places(), options, soon(), outcome.statuses);
  } catch (const Error& error) {
    outcome.error = error.what();
    outcome.kind = error.kind();
  }
  outcome.open = channel->channel().open();
  return outcome;
}

TEST_CASE("node channel: what is granted is written, and committed with its checksum") {
  for (const bool shm : {false, true}) {
    for (const bool checksums : {true, false}) {
      Writing writing;
      FakeNode node(writing.handler());
      Place place(1000, 7);
      fill(place.memory().data(), 4, 1000);
      const Outcome outcome = write(node, shm, place, 300, {.checksums = checksums});
      CHECK(outcome.error == "");
      CHECK(outcome.statuses == std::vector<Status>(300, Status::kOk));
      CHECK(writing.offered == 300);
      CHECK(writing.written == (shm ? 0 : 300'000));
      if (shm) CHECK(holds(node.region() + kWritable, 4, 1000));
      REQUIRE(writing.commits.size() == 300);
      CHECK(writing.commits[0].flags == (checksums ? wire::CommitRow::kHasCrc : 0u));
      if (checksums) CHECK(writing.commits[0].crc32c == crc32c(0, place.memory().data(), 1000));
    }
  }
}

TEST_CASE("node channel: each refusal has its status, an unknown one too") {
  using wire::OfferState;
  const std::pair<OfferState, Status> states[] = {
      {OfferState::kStored, Status::kStoredAlready},
      {OfferState::kBufferFull, Status::kSkipBufferFull},
      {OfferState::kDeviceFull, Status::kSkipDeviceFull},
      {OfferState::kTooLarge, Status::kSkipTooLarge},
      {OfferState::kDraining, Status::kSkipDraining},
      {OfferState::kPrefixBroken, Status::kSkipPrefix},
      {static_cast<OfferState>(99), Status::kSkipBufferFull}};
  for (const auto& [state, status] : states) {
    Writing writing;
    writing.state = state;
    FakeNode node(writing.handler());
    Place place(100);
    CHECK(write(node, false, place, 2).statuses == std::vector<Status>(2, status));
    CHECK(writing.commits.empty());
  }
}

TEST_CASE("node channel: a commit that comes to nothing is said") {
  using wire::CommitState;
  const std::pair<CommitState, Status> states[] = {{CommitState::kNoGrant, Status::kDeadline},
                                                   {CommitState::kNotWritten, Status::kDeadline},
                                                   {CommitState::kAborted, Status::kCancelled}};
  for (const auto& [state, status] : states) {
    Writing writing;
    writing.commit_state = state;
    FakeNode node(writing.handler());
    Place place(100);
    CHECK(write(node, false, place, 2).statuses == std::vector<Status>(2, status));
  }
}

TEST_CASE("node channel: a cancelled write gives its grants back") {
  for (const bool shm : {false, true}) {
    Writing writing;
    FakeNode node(writing.handler());
    Place place(100);
    const std::atomic<bool> cancelled{true};
    const Outcome outcome = write(node, shm, place, 3, {.cancelled = &cancelled});
    CHECK(outcome.error == "");
    REQUIRE(writing.commits.size() == 3);
    for (const auto& row : writing.commits) CHECK(row.flags == wire::CommitRow::kAbort);
  }
}

TEST_CASE("node channel: wrong counts and wrong places end a write") {
  const auto refused = [](bool shm, const std::function<void(Writing&)>& change) {
    Writing writing;
    change(writing);
    FakeNode node(writing.handler());
    Place place(100);
    const Outcome outcome = write(node, shm, place, 2);
    return outcome.kind == ErrorKind::kProtocol && !outcome.error.empty() && !outcome.open;
  };
  CHECK(refused(false, [](Writing& writing) { writing.extra_rows = 1; }));
  CHECK(refused(false, [](Writing& writing) { writing.extra_states = 1; }));
  CHECK(refused(true, [](Writing& writing) { writing.region_offset = 0; }));
  CHECK(refused(true, [](Writing& writing) { writing.region_offset = kRegionBytes - 99; }));
  CHECK(refused(true, [](Writing& writing) { writing.region_offset = ~0ull; }));
}

}  // namespace
}  // namespace hymcache::testing
