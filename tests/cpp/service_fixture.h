// A whole service in one process: a master, storage nodes on scratch files, and what clients hold.
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "chm_device/csrc/backing_file.h"
#include "chm_device/csrc/file_device.h"
#include "kv_manager/csrc/storage_node.h"
#include "lookup/csrc/store_client.h"
#include "master/csrc/master_server.h"
#include "tests/cpp/device_fixture.h"
#include "tests/cpp/faulty_device.h"
#include "tests/cpp/numbered_objects.h"
#include "tests/cpp/raw_peer.h"

namespace hymcache::testing {

using wire_testing::eventually;
using wire_testing::kPatience;

struct NodeOptions {
  std::string name = "n1";
  std::uint64_t capacity_bytes = 64u << 20;
  std::uint64_t segment_bytes = 8u << 20;
  std::uint64_t staging_bytes = 2u << 20;
  std::uint64_t write_buffer_bytes = 2u << 20;
  std::string advertise_host{};
  SessionLimits sessions{};
  Clock::duration grant_lease = kGrantLease;
  MacFunction mac{};
  std::uint16_t protocol_version_max = wire::kVersionMax;
  FaultPlan faults{};
  std::shared_ptr<VerbsAcceptor> verbs{};
};

// A storage node that can be stopped and started again, on the same file and under the same name.
class TestNode {
 public:
  TestNode(std::string folder, std::vector<Endpoint> masters, NodeOptions options)
      : options_(std::move(options)), folder_(std::move(folder)), masters_(std::move(masters)) {
    start();
  }

  void start() {
    auto device = std::make_unique<FaultyDevice>(
        open_file_device({.path = path(),
                          .capacity_bytes = options_.capacity_bytes,
                          .staging_bytes = options_.staging_bytes,
                          .write_buffer_bytes = options_.write_buffer_bytes,
                          .segment_bytes = options_.segment_bytes,
                          .io_depth = 8,
                          .preallocate = false,
                          .log = {}}),
        options_.faults);
    region_ = device->region();
    StorageNodeOptions node;
    node.name = options_.name;
    node.listen = Endpoint::parse("127.0.0.1:0");
    node.advertise_host = options_.advertise_host;
    node.unix_path = folder_ + "/" + options_.name + ".sock";
    node.masters = masters_;
    node.sessions = options_.sessions;
    node.grant_lease = options_.grant_lease;
    node.mac = options_.mac;
    node.log = node.warn = [](std::string_view) {};
    node.protocol_version_max = options_.protocol_version_max;
    if (options_.verbs &&
        options_.verbs->prepare(region_.base, region_.bytes, region_.read_write_offset)) {
      node.verbs = options_.verbs;
    }
    node_ = std::make_unique<StorageNode>(id(), std::move(node), std::move(device));
  }
  void stop() { node_.reset(); }

  StorageNode& operator*() { return *node_; }
  StorageNode* operator->() { return node_.get(); }
  NodeId id() const { return static_cast<NodeId>(std::hash<std::string>{}(options_.name) | 1); }
  Endpoint tcp() { return Endpoint::parse(node_->endpoints().front()); }
  Endpoint unix_socket() { return Endpoint::parse(node_->endpoints().back()); }
  const DeviceRegion& region() const { return region_; }
  std::string path() const { return folder_ + "/" + options_.name + ".device"; }

  // Flips a bit of an object where the device keeps it. It must have been flushed.
  void flip_on_device(const Entry& entry, std::uint32_t at) {
    const UniqueFd file(::open(path().c_str(), O_RDWR | O_CLOEXEC));
    REQUIRE(file);
    const auto place = static_cast<off_t>(chm::BackingFile::kDataOffset + entry.address + at);
    std::uint8_t byte = 0;
    REQUIRE(::pread(file.get(), &byte, 1, place) == 1);
    byte ^= 0x10;
    REQUIRE(::pwrite(file.get(), &byte, 1, place) == 1);
    REQUIRE(::fsync(file.get()) == 0);
  }
  void wait_flushed() {
    eventually([&] { return node_->stats().device.write_buffer_used_bytes == 0; });
  }
  // Nothing is staged, sent or open any more.
  void wait_idle() {
    eventually([&] {
      const StorageNodeStats stats = node_->stats();
      return stats.sessions.sessions == 0 && stats.device.staging_used_bytes == 0 &&
             stats.writes.open == 0;
    });
  }

 private:
  const NodeOptions options_;
  const std::string folder_;
  const std::vector<Endpoint> masters_;
  DeviceRegion region_;
  std::unique_ptr<StorageNode> node_;
};

class Service {
 public:
  explicit Service(std::vector<NodeOptions> nodes = {NodeOptions{}},
                   std::chrono::milliseconds lease = std::chrono::seconds(10),
                   const MacFunction& mac = nullptr) {
    master_options_.listen = {Endpoint::parse("127.0.0.1:0")};
    master_options_.lease = lease;
    master_options_.rows_max = 1u << 18;
    master_options_.mac = mac;
    start_master();
    for (NodeOptions& options : nodes) {
      nodes_.push_back(
          std::make_unique<TestNode>(folder_.path(), master_options_.listen, std::move(options)));
    }
    wait_live();
  }

  // Again at the port that it had, with an index that it does not know yet.
  void start_master() {
    master_ = std::make_unique<MasterServer>(master_options_);
    master_->start();
    master_options_.listen = {master_->endpoints().front()};
  }
  void stop_master() { master_.reset(); }
  // Until the master knows all that the nodes hold.
  void wait_live() {
    for (const auto& node : nodes_) {
      eventually([&] { return (*node)->stats().masters.front().state == "live"; });
    }
  }

  MasterServer& master() { return *master_; }
  const Endpoint& master_endpoint() const { return master_options_.listen.front(); }
  TestNode& node(std::size_t i = 0) { return *nodes_.at(i); }
  const std::string& folder() const { return folder_.path(); }

  std::shared_ptr<StoreClient> client(TransportChoice transport = TransportChoice::kAuto,
                                      Clock::duration deadline = kPatience,
                                      std::shared_ptr<VerbsInitiator> verbs = nullptr) {
    ClientOptions options;
    options.verbs = std::move(verbs);
    options.masters = master_options_.listen;
    options.transport = transport;
    options.name = "test";
    options.deadline = deadline;
    options.mac = master_options_.mac;
    return std::make_shared<StoreClient>(std::move(options));
  }

 private:
  ScratchFolder folder_;
  MasterOptions master_options_;
  std::unique_ptr<MasterServer> master_;
  std::vector<std::unique_ptr<TestNode>> nodes_;
};

// The memory of a client's blocks: block i is of object first + i. Each lies in three segments,
// with a gap between them.
class Blocks {
 public:
  Blocks(std::uint64_t first, std::vector<std::uint32_t> lengths)
      : first_(first), lengths_(std::move(lengths)) {
    for (const std::uint32_t length : lengths_) memory_.emplace_back(length + 2 * kGap, kUnused);
  }
  Blocks(std::uint64_t first, std::size_t count, std::uint32_t length)
      : Blocks(first, std::vector<std::uint32_t>(count, length)) {}

  std::size_t size() const { return lengths_.size(); }
  std::uint64_t bytes() const { return std::reduce(lengths_.begin(), lengths_.end(), 0ull); }
  std::vector<ObjectKey> keys() const { return numbered_keys(first_, size()); }
  BlockPlaces places() {
    return [this](std::uint32_t i) -> std::span<const Segment> {
      segments_.clear();
      for (const auto& [from, bytes] : cuts(lengths_[i])) {
        segments_.push_back({.data = memory_[i].data() + from, .bytes = bytes});
      }
      return segments_;
    };
  }
  Blocks& fill_all() {
    for (std::size_t i = 0; i < size(); ++i) {
      std::uint32_t place = 0;
      for (const auto& [from, bytes] : cuts(lengths_[i])) {
        for (std::size_t at = 0; at < bytes; ++at) {
          memory_[i][from + at] = content_byte(first_ + i, place++);
        }
      }
    }
    return *this;
  }
  Blocks& wipe() {
    for (auto& block : memory_) std::fill(block.begin(), block.end(), kUnused);
    return *this;
  }
  // Block i has its object's bytes, and nothing beside it was touched.
  bool holds(std::size_t i) const {
    std::vector<std::uint8_t> expected(memory_[i].size(), kUnused);
    std::uint32_t place = 0;
    for (const auto& [from, bytes] : cuts(lengths_[i])) {
      for (std::size_t at = 0; at < bytes; ++at) {
        expected[from + at] = content_byte(first_ + i, place++);
      }
    }
    return memory_[i] == expected;
  }
  const std::vector<std::vector<std::uint8_t>>& memory() const { return memory_; }

 private:
  static constexpr std::size_t kGap = 64;
  static constexpr std::uint8_t kUnused = 0xA5;

  static std::vector<std::pair<std::size_t, std::size_t>> cuts(std::uint32_t length) {
    const std::size_t first = length / 3;
    const std::size_t second = length / 5;
    return {
        {0, first}, {first + kGap, second}, {first + second + 2 * kGap, length - first - second}};
  }

  const std::uint64_t first_;
  const std::vector<std::uint32_t> lengths_;
  std::vector<std::vector<std::uint8_t>> memory_;
  std::vector<Segment> segments_;
};

inline std::vector<BlockStatus> put(StoreClient& client, Blocks& blocks,
                                    bool prefix_order = false) {
  std::vector<BlockStatus> statuses(blocks.size());
  client.write(/*name_space=*/1, prefix_order, blocks.keys(), blocks.fill_all().places(), {},
               client.deadline(), statuses);
  return statuses;
}

inline std::vector<BlockStatus> get(StoreClient& client, Blocks& blocks) {
  std::vector<BlockStatus> statuses(blocks.size());
  const TimePoint deadline = client.deadline();
  const ReadPlan plan{.rows = client.lookup(blocks.keys(), deadline), .sessions = {}};
  client.read(plan, 0, blocks.wipe().places(), {}, deadline, statuses);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (statuses[i] == BlockStatus::kOk) CHECK(blocks.holds(i));
  }
  return statuses;
}

inline std::size_t count(const std::vector<BlockStatus>& statuses, BlockStatus wanted) {
  return static_cast<std::size_t>(std::count(statuses.begin(), statuses.end(), wanted));
}

// What was put can be looked up a moment later, when the node has told the master.
inline void wait_found(StoreClient& client, const std::vector<ObjectKey>& keys) {
  eventually([&] {
    const auto rows = client.lookup(keys, client.deadline());
    return std::all_of(rows.begin(), rows.end(), [](const Entry& row) { return row.valid(); });
  });
}

inline std::string name_of(TransportChoice transport) {
  return transport == TransportChoice::kShm ? "shm" : "tcp";
}
inline constexpr TransportChoice kTransports[] = {TransportChoice::kShm, TransportChoice::kTcp};

}  // namespace hymcache::testing
