// A node's region in a client's address space: the staging window to read, the write buffer to
// write. The mapping outlives the connection that brought it, so a copy under way never faults.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

#include "hymcache/csrc/unique_fd.h"
#include "transport/csrc/channel.h"
#include "transport/csrc/wire.h"

namespace hymcache {

class RegionMapping {
 public:
  // Throws ProtocolError when the descriptor does not hold what `attach` says.
  RegionMapping(UniqueFd fd, const wire::AttachReply& attach);
  ~RegionMapping();
  RegionMapping(const RegionMapping&) = delete;
  RegionMapping& operator=(const RegionMapping&) = delete;

  std::uint64_t incarnation() const noexcept { return incarnation_; }
  // Null when the range is not inside the region (or not in its writable part).
  const std::byte* readable(std::uint64_t offset, std::uint64_t bytes) const noexcept;
  std::byte* writable(std::uint64_t offset, std::uint64_t bytes) const noexcept;
  // The generation word at `offset`, read after everything read before. It pairs with the release
  // store by which the device announces that it takes the bytes back.
  std::uint64_t load_generation(std::uint64_t offset) const noexcept;

 private:
  void populate() noexcept;

  std::byte* base_ = nullptr;
  std::uint64_t bytes_;
  std::uint64_t read_write_offset_;
  std::uint64_t incarnation_;
  std::atomic<bool> stopping_{false};
  std::thread populating_;
};

// The region of one node as all connections of a client share it: mapped once, by the first that
// moves bytes. Who only sends messages never maps it. Thread-safe.
class SharedRegion {
 public:
  // Asks for the region over a UNIX connection, which is also its leave to write without WRITE.
  // Throws Unavailable or ProtocolError.
  std::shared_ptr<const RegionMapping> attach(Channel& channel, TimePoint deadline);
  // True once an attach has failed: the bytes had better go another way.
  bool failed() const noexcept { return failed_.load(std::memory_order_relaxed); }

 private:
  std::mutex mutex_;
  std::shared_ptr<const RegionMapping> mapping_;
  std::atomic<bool> failed_{false};
};

}  // namespace hymcache
