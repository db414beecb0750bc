// A client's connection to a storage node, and the way bytes move over it.
//
// The control messages are the same for every transport; a subclass moves the bytes: through shared
// memory (shm_node_channel.h), in the stream itself (tcp_node_channel.h), or by RDMA
// (verbs_node_channel.h). For one thread at a time.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "transport/csrc/block_status.h"
#include "transport/csrc/channel.h"
#include "transport/csrc/copy.h"

namespace hymcache {

// The memory of the i-th block of a call: segments that hold exactly the block's bytes, valid until
// the next call.
using BlockPlaces = std::function<std::span<const Segment>(std::uint32_t i)>;

struct TransferOptions {
  bool checksums = true;                         // verify on reads, compute on writes
  const std::atomic<bool>* cancelled = nullptr;  // looked at between blocks

  bool is_cancelled() const noexcept {
    return cancelled != nullptr && cancelled->load(std::memory_order_relaxed);
  }
};

class NodeChannel {
 public:
  struct Offered {
    ObjectKey key{};
    std::uint32_t length = 0;
  };

  explicit NodeChannel(std::unique_ptr<Channel> channel) : channel_(std::move(channel)) {}
  virtual ~NodeChannel() = default;
  virtual const char* transport() const noexcept = 0;

  Channel& channel() noexcept { return *channel_; }
  // Closed because nobody wants what is on its way: that says nothing about the node.
  bool discarded() const noexcept { return discarded_; }

  // These have no response. They leave with the next call that has one, or with flush().
  void prefetch(const wire::SessionId& session, std::span<const wire::PrefetchRow> rows,
                std::uint32_t lease_ms);
  void release(const wire::SessionId& session, std::uint32_t first, std::uint32_t count);
  void end(const wire::SessionId& session);
  void flush(TimePoint deadline) { channel_->flush(deadline); }

  // Waits until block `first` of the session is settled, then reads it and those after it that are
  // settled too, up to statuses.size(), and posts their release. lengths[i] and places(i) are for
  // block first + i.
  // Returns how many have a status now: at least 1, or 0 if the session is not known to the node.
  // Throws Unavailable (the connection is closed then, and nothing more is written to the places).
  virtual std::uint32_t read(const wire::SessionId& session, std::uint32_t first,
                             std::span<const std::uint32_t> lengths, const BlockPlaces& places,
                             const TransferOptions& options, TimePoint deadline,
                             std::span<BlockStatus> statuses) = 0;

  // Offers blocks and writes those that are granted. In prefix order: nothing after the first block
  // that could not be stored. Every block gets a status. Throws Unavailable.
  void write(std::uint64_t name_space, bool prefix_order, std::span<const Offered> blocks,
             const BlockPlaces& places, const TransferOptions& options, TimePoint deadline,
             std::span<BlockStatus> statuses);

 protected:
  struct Granted {
    std::uint32_t block = 0;  // its place in the call
    std::uint64_t grant = 0;
    std::uint64_t region_offset = 0;
    std::uint32_t length = 0;
    std::uint32_t crc32c = 0;
    wire::VerbsKey key = 0;
    bool written = false;
  };

  struct Settled {
    std::uint32_t first = 0;
    std::vector<wire::WaitRow> rows;
    bool session_known = true;
    std::vector<wire::VerbsKey> keys;  // as many as rows, if block_keys_
  };

  // Comes before a write's first offer.
  virtual void prepare_write(TimePoint) {}
  // Moves the bytes of what was granted; fills crc32c and written. Stops early when cancelled.
  virtual void write_granted(std::span<Granted> granted, const BlockPlaces& places,
                             const TransferOptions& options, TimePoint deadline) = 0;
  // One WAIT. Checks the answer against what was asked.
  Settled wait(const wire::SessionId& session, std::uint32_t first,
               std::span<const std::uint32_t> lengths, std::uint32_t flags, TimePoint deadline);
  void report(const wire::SessionId& session, std::uint32_t index);
  [[noreturn]] void fail_protocol(const std::string& message);

  std::unique_ptr<Channel> channel_;
  bool discarded_ = false;
  bool block_keys_ = false;  // the node answers with a key for each block (RDMA)

 private:
  template <class F>
  auto closing_on_protocol_error(F call);
  Settled ask_settled(const wire::SessionId& session, std::uint32_t first,
                      std::span<const std::uint32_t> lengths, std::uint32_t flags,
                      TimePoint deadline);
  void write_batches(std::uint64_t name_space, bool prefix_order, std::span<const Offered> blocks,
                     const BlockPlaces& places, const TransferOptions& options, TimePoint deadline,
                     std::span<BlockStatus> statuses);
  void commit(std::span<const Granted> granted, const TransferOptions& options, TimePoint deadline,
              std::span<BlockStatus> statuses);
};

}  // namespace hymcache
