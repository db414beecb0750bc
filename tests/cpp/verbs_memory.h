// RDMA within one process: READs and WRITEs are copies, but only with a key that allows them. What
// a device checks is in tests/transport/verbs/fake_verbs.py; this is for what calls the interface.
#pragma once

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "transport/csrc/verbs.h"

namespace hymcache::testing {

struct VerbsFabric {
  struct Window {
    std::uint64_t peer = 0;
    std::uint64_t address = 0;
    std::uint64_t bytes = 0;
    bool writable = false;
  };

  std::mutex mutex;  // guards what follows
  std::map<wire::VerbsKey, Window> windows;
  std::set<std::uint64_t> peers;
  wire::VerbsKey next_key = 100;
  int pass_transfers = 0;  // so many of the next batches go well, and then
  int fail_transfers = 0;  // so many fail
  bool refuse = false;     // all that would link
  bool give_no_keys = false;
  std::uint64_t batches = 0;
  std::uint64_t pieces = 0;

  std::size_t windows_open() {
    const std::lock_guard lock(mutex);
    return windows.size();
  }
};

class MemoryAcceptor final : public VerbsAcceptor {
 public:
  MemoryAcceptor(std::shared_ptr<VerbsFabric> fabric, bool block_keys)
      : fabric_(std::move(fabric)), block_keys_(block_keys) {}

  bool prepare(std::uint8_t* base, std::uint64_t bytes, std::uint64_t read_write_offset) override {
    base_ = reinterpret_cast<std::uintptr_t>(base);
    bytes_ = bytes;
    split_ = read_write_offset;
    return true;
  }
  Accepted accept(std::uint64_t peer, const wire::LinkEndpoint& endpoint) override {
    const std::lock_guard lock(fabric_->mutex);
    if (fabric_->refuse) throw Error(ErrorKind::kUnavailable, "the device is gone");
    fabric_->peers.insert(peer);
    Accepted accepted{.endpoint = endpoint, .block_keys = block_keys_, .regions = {}};
    accepted.endpoint.queue_pair = static_cast<std::uint32_t>(peer);
    if (block_keys_) return accepted;
    accepted.regions.push_back(
        {.region_offset = 0, .bytes = split_, .key = 1, .access = wire::LinkRegion::kRead});
    accepted.regions.push_back({.region_offset = split_,
                                .bytes = bytes_ - split_,
                                .key = 2,
                                .access = wire::LinkRegion::kRead | wire::LinkRegion::kWrite});
    fabric_->windows[1] = {.address = base_, .bytes = split_};
    fabric_->windows[2] = {.address = base_ + split_, .bytes = bytes_ - split_, .writable = true};
    return accepted;
  }
  std::vector<wire::VerbsKey> bind(std::uint64_t peer, std::span<const Range> ranges,
                                   bool writable) override {
    const std::lock_guard lock(fabric_->mutex);
    std::vector<wire::VerbsKey> keys;
    for (const Range& range : ranges) {
      keys.push_back(fabric_->give_no_keys ? 0 : fabric_->next_key++);
      if (keys.back() == 0) continue;
      fabric_->windows[keys.back()] = {.peer = peer,
                                       .address = base_ + range.region_offset,
                                       .bytes = range.bytes,
                                       .writable = writable};
    }
    return keys;
  }
  bool unbind(std::uint64_t, std::span<const wire::VerbsKey> keys) noexcept override {
    const std::lock_guard lock(fabric_->mutex);
    for (const wire::VerbsKey key : keys) fabric_->windows.erase(key);
    return true;
  }
  void drop(std::uint64_t peer) noexcept override {
    const std::lock_guard lock(fabric_->mutex);
    fabric_->peers.erase(peer);
    std::erase_if(fabric_->windows, [peer](const auto& one) { return one.second.peer == peer; });
  }
  void close() noexcept override {
    const std::lock_guard lock(fabric_->mutex);
    fabric_->peers.clear();
    fabric_->windows.clear();
  }

 private:
  const std::shared_ptr<VerbsFabric> fabric_;
  const bool block_keys_;
  std::uint64_t base_ = 0;
  std::uint64_t bytes_ = 0;
  std::uint64_t split_ = 0;
};

class MemoryLink final : public VerbsLink {
 public:
  MemoryLink(std::shared_ptr<VerbsFabric> fabric, const std::vector<LocalMemory>& registered)
      : fabric_(std::move(fabric)), registered_(registered) {}

  wire::LinkEndpoint endpoint() override {
    return {.queue_pair = 7, .link_layer = 2, .gid_type = 2, .mtu = 5};
  }
  void connect(const wire::LinkEndpoint& peer) override { peer_ = peer.queue_pair; }
  void transfer(VerbsOpcode opcode, std::span<const VerbsPiece> pieces, TimePoint) override {
    const std::lock_guard lock(fabric_->mutex);
    ++fabric_->batches;
    fabric_->pieces += pieces.size();
    if (fabric_->pass_transfers > 0) {
      --fabric_->pass_transfers;
    } else if (fabric_->fail_transfers > 0) {
      --fabric_->fail_transfers;
      throw Error(ErrorKind::kUnavailable, "the peer does not answer");
    }
    for (const VerbsPiece& piece : pieces) move(opcode, piece);
  }
  LocalMemory allocate(std::size_t bytes) override {
    own_.push_back(std::make_unique<std::byte[]>(bytes));
    return {.data = own_.back().get(), .bytes = bytes, .key = kOwnKey};
  }
  std::optional<std::uint32_t> local_key(const void* data, std::size_t bytes) override {
    for (const LocalMemory& memory : registered_) {
      const auto* const begin = static_cast<const std::byte*>(data);
      if (begin >= memory.data && begin + bytes <= memory.data + memory.bytes) return memory.key;
    }
    return std::nullopt;
  }

 private:
  static constexpr std::uint32_t kOwnKey = 77;

  void move(VerbsOpcode opcode, const VerbsPiece& piece) {
    const auto found = fabric_->windows.find(piece.remote_key);
    const bool is_write = opcode == VerbsOpcode::kWrite;
    if (found == fabric_->windows.end() || piece.remote_address < found->second.address ||
        piece.remote_address + piece.bytes > found->second.address + found->second.bytes ||
        (is_write && !found->second.writable) ||
        (found->second.peer != 0 && found->second.peer != peer_)) {
      throw Error(ErrorKind::kUnavailable, "the key is not good for that memory");
    }
    void* const local = reinterpret_cast<void*>(piece.local_address);
    void* const remote = reinterpret_cast<void*>(piece.remote_address);
    std::memcpy(is_write ? remote : local, is_write ? local : remote, piece.bytes);
  }

  const std::shared_ptr<VerbsFabric> fabric_;
  const std::vector<LocalMemory>& registered_;
  std::uint64_t peer_ = 0;
  std::vector<std::unique_ptr<std::byte[]>> own_;
};

class MemoryInitiator final : public VerbsInitiator {
 public:
  MemoryInitiator(std::shared_ptr<VerbsFabric> fabric, std::size_t bounce_bytes)
      : fabric_(std::move(fabric)), bounce_bytes_(bounce_bytes) {}

  std::unique_ptr<VerbsLink> open() override {
    return std::make_unique<MemoryLink>(fabric_, registered_);
  }
  void register_memory(const void* data, std::size_t bytes) override {
    auto* const begin = static_cast<std::byte*>(const_cast<void*>(data));
    registered_.push_back({.data = begin, .bytes = bytes, .key = 50});
  }
  std::size_t bounce_bytes() const override { return bounce_bytes_; }
  void tell_fallbacks(std::uint64_t calls, const std::string& reason) noexcept override {
    told_calls += calls;
    told_reason = reason;
  }
  void close() noexcept override {}

  std::uint64_t told_calls = 0;
  std::string told_reason;

 private:
  const std::shared_ptr<VerbsFabric> fabric_;
  const std::size_t bounce_bytes_;
  std::vector<LocalMemory> registered_;
};

}  // namespace hymcache::testing
