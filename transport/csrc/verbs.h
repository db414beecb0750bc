// One-sided access by RDMA, as the client and the node see it. The implementations are in Python
// over pyverbs (transport/verbs); each call below takes the GIL once.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "transport/csrc/backoff.h"
#include "transport/csrc/wire.h"

namespace hymcache {

// ---- a client --------------------------------------------------------------------------------

// One piece of a batch: memory here, memory there.
struct VerbsPiece {
  std::uint64_t local_address = 0;
  std::uint32_t local_key = 0;
  std::uint64_t remote_address = 0;
  std::uint32_t remote_key = 0;
  std::uint32_t bytes = 0;
  bool fenced = false;  // starts when all READs before it have ended
};

enum class VerbsOpcode : int { kWrite = 0, kRead = 4 };

struct LocalMemory {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::uint32_t key = 0;
};

// A queue pair to one node. For one thread at a time. When it is gone, no memory is touched for it
// any more.
class VerbsLink {
 public:
  virtual ~VerbsLink() = default;
  virtual wire::LinkEndpoint endpoint() = 0;
  // Each of these throws Unavailable (and connect ProtocolError). After a failure it is of no use.
  virtual void connect(const wire::LinkEndpoint& peer) = 0;
  // Returns when all pieces are done.
  virtual void transfer(VerbsOpcode opcode, std::span<const VerbsPiece> pieces,
                        TimePoint deadline) = 0;
  // Registered memory that lives as long as the link.
  virtual LocalMemory allocate(std::size_t bytes) = 0;
  // The key of memory that the client has registered; none: it has to be copied.
  virtual std::optional<std::uint32_t> local_key(const void* data, std::size_t bytes) = 0;
};

class VerbsInitiator {
 public:
  virtual ~VerbsInitiator() = default;
  virtual std::unique_ptr<VerbsLink> open() = 0;  // throws Unavailable
  // Makes memory known that blocks will be read into and written from; it must stay until the
  // initiator is gone. Throws ConfigError or DeviceError.
  virtual void register_memory(const void* data, std::size_t bytes) = 0;
  virtual std::size_t bounce_bytes() const = 0;
  // For a person to read: so many calls since the last time went over TCP, the last one why.
  virtual void tell_fallbacks(std::uint64_t calls, const std::string& reason) noexcept = 0;
  // No more links; what was registered goes with the last that there is.
  virtual void close() noexcept = 0;
};

// How a client's RDMA fares. Thread-safe.
class VerbsRecord {
 public:
  void linked() noexcept { links_.fetch_add(1, std::memory_order_relaxed); }
  void failed(const std::string& reason) {
    failures_.fetch_add(1, std::memory_order_relaxed);
    const std::lock_guard lock(mutex_);
    last_failure_ = reason;
  }
  // Returns how many nobody was told of, where it is time to tell; else 0.
  std::uint64_t fell_back(TimePoint now) {
    const std::uint64_t all = fallbacks_.fetch_add(1, std::memory_order_relaxed) + 1;
    const std::lock_guard lock(mutex_);
    if (all <= told_ || now < tell_next_) return 0;
    tell_next_ = now + kTellPause;
    return all - std::exchange(told_, all);
  }
  std::uint64_t links() const noexcept { return links_.load(std::memory_order_relaxed); }
  std::uint64_t failures() const noexcept { return failures_.load(std::memory_order_relaxed); }
  std::uint64_t fallbacks() const noexcept { return fallbacks_.load(std::memory_order_relaxed); }
  std::string last_failure() const {
    const std::lock_guard lock(mutex_);
    return last_failure_;
  }

 private:
  static constexpr std::chrono::minutes kTellPause{1};
  std::atomic<std::uint64_t> links_{0}, failures_{0}, fallbacks_{0};
  mutable std::mutex mutex_;
  std::string last_failure_;
  std::uint64_t told_ = 0;  // of the fallbacks
  TimePoint tell_next_{};
};

// RDMA to one node as all connections of a client share it: after a failure it is left alone for a
// while. Thread-safe.
class VerbsTarget {
 public:
  VerbsTarget(std::shared_ptr<VerbsInitiator> initiator, std::shared_ptr<VerbsRecord> record)
      : initiator_(std::move(initiator)), record_(std::move(record)) {}

  VerbsInitiator& initiator() noexcept { return *initiator_; }
  VerbsRecord& record() noexcept { return *record_; }
  bool may_try(TimePoint now) {
    const std::lock_guard lock(mutex_);
    return backoff_.may_try(now);
  }
  // Bytes went through: a link alone says nothing of them.
  void succeeded() {
    const std::lock_guard lock(mutex_);
    backoff_.succeeded();
  }
  void failed(const std::string& reason) {
    record_->failed(reason);
    const std::lock_guard lock(mutex_);
    backoff_.failed(Clock::now());
  }

 private:
  const std::shared_ptr<VerbsInitiator> initiator_;
  const std::shared_ptr<VerbsRecord> record_;
  // A batch that fails has cost its caller seconds before it goes by TCP.
  static constexpr std::chrono::seconds kRetryLast{60};
  std::mutex mutex_;
  Backoff backoff_{kRetryLast};
};

// ---- a node ----------------------------------------------------------------------------------

// Lets peers at the node's memory. Called from the node's event loop.
class VerbsAcceptor {
 public:
  struct Accepted {
    wire::LinkEndpoint endpoint;
    bool block_keys = false;  // keys come from bind(), one for each block
    std::vector<wire::LinkRegion> regions;
  };
  struct Range {
    std::uint64_t region_offset = 0;
    std::uint64_t bytes = 0;
  };

  virtual ~VerbsAcceptor() = default;
  // Registers the node's memory. False: this node does without. Throws where it must not.
  virtual bool prepare(std::uint8_t* base, std::uint64_t bytes,
                       std::uint64_t read_write_offset) = 0;
  // A queue pair for the peer, in place of the one that it had. Throws Unavailable.
  virtual Accepted accept(std::uint64_t peer, const wire::LinkEndpoint& endpoint) = 0;
  // A key for each range, good for this peer only; 0 where there is none to be had.
  virtual std::vector<wire::VerbsKey> bind(std::uint64_t peer, std::span<const Range> ranges,
                                           bool writable) = 0;
  // None of them is good for anything when it returns. False: the device would not end one, and
  // the peer reaches nothing any more.
  virtual bool unbind(std::uint64_t peer, std::span<const wire::VerbsKey> keys) noexcept = 0;
  virtual void drop(std::uint64_t peer) noexcept = 0;  // the peer reaches nothing any more
  virtual void close() noexcept = 0;                   // all peers, and the memory's registration
};

}  // namespace hymcache
