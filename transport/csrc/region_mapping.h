// A node's region in a client's address space: the staging window to read, the write buffer to
// write. The mapping outlives the connection that brought it, so a copy under way never faults.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>

#include "hymcache/csrc/unique_fd.h"
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

}  // namespace hymcache
