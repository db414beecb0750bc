// The memory under a shared region: a device-dax, a file, or a memfd by its path in /proc.
//
// It is mapped MAP_SHARED, with MADV_RANDOM. A device-dax and the page cache of one host are
// coherent, so nothing has to be flushed for others to see it; sync() is for what shall outlive the
// machine, and does nothing but on a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "hymcache/csrc/unique_fd.h"

namespace hymcache::region {

enum class MemoryKind { kDax, kFile, kMemory };
const char* memory_kind_name(MemoryKind kind) noexcept;

// msync(2) with MS_SYNC, or what a test puts in its place.
using SyncToDisk = std::function<int(std::byte* from, std::uint64_t bytes)>;

class RegionMemory {
 public:
  // Opens `path`. Where `create` says so, makes a file of offset + bytes, or lets one that ends
  // in front of offset grow so far; never a shorter one, and never a file in the place of a device
  // below /dev. With 0 bytes the region is all from offset on. Throws kConfig where path or sizes
  // cannot be, kDevice where the system refuses.
  RegionMemory(const std::string& path, std::uint64_t offset, std::uint64_t bytes, bool create,
               bool writable, SyncToDisk sync_to_disk = {});
  ~RegionMemory();
  RegionMemory(const RegionMemory&) = delete;
  RegionMemory& operator=(const RegionMemory&) = delete;

  MemoryKind kind() const noexcept { return kind_; }
  bool is_writable() const noexcept { return writable_; }
  std::uint64_t available_bytes() const noexcept { return bytes_; }  // from offset on
  // PATH, or PATH at its offset: as messages name it.
  const std::string& place() const noexcept { return place_; }

  // Takes the file system's room for the first `bytes` of the region, so that no page of a file is
  // missing when it is touched (SIGBUS). Throws kDevice where there is not enough.
  void reserve(std::uint64_t bytes);

  // The first bytes of what lies at `offset`, a multiple of 2 MiB in front of the region; at most
  // `bytes_max`. Throws kDevice.
  std::vector<std::byte> head_at(std::uint64_t offset, std::uint64_t bytes_max) const;

  // Maps the first `bytes` of the region; what was mapped before is unmapped. Throws kDevice.
  void map(std::uint64_t bytes);
  std::byte* base() const noexcept { return base_; }
  std::uint64_t mapped_bytes() const noexcept { return mapped_bytes_; }

  // Has every mapped page in the page tables when it returns. Throws kDevice where one is not to
  // be had.
  void prefault() const;
  // Writes a range of the mapping to the disk under a file. Throws kDevice.
  void sync(std::uint64_t from, std::uint64_t bytes) const;

 private:
  std::string path_;
  std::string place_;
  SyncToDisk sync_to_disk_;
  UniqueFd fd_;
  MemoryKind kind_ = MemoryKind::kFile;
  bool writable_;
  std::uint64_t offset_;
  std::uint64_t bytes_ = 0;
  std::byte* base_ = nullptr;
  std::uint64_t mapped_bytes_ = 0;
};

}  // namespace hymcache::region
