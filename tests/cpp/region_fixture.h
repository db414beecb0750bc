// A region in a memfd or on a disk, and objects whose bytes follow from their numbers.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "hymcache/csrc/unique_fd.h"
#include "lookup/csrc/region_directory.h"

namespace hymcache::region_testing {

using namespace hymcache::region;

class MemoryFile {
 public:
  explicit MemoryFile(std::uint64_t bytes) : fd_(::memfd_create("region", MFD_CLOEXEC)) {
    if (!fd_ || ::ftruncate(fd_.get(), static_cast<off_t>(bytes)) != 0) std::abort();
  }
  std::string path() const { return "/proc/self/fd/" + std::to_string(fd_.get()); }
  int fd() const { return fd_.get(); }

 private:
  UniqueFd fd_;
};

// What is msynced: /tmp may be memory, /var/tmp is not.
class DiskFile {
 public:
  explicit DiskFile(std::uint64_t bytes) : fd_(::mkstemp(path_)) {
    if (!fd_ || ::ftruncate(fd_.get(), static_cast<off_t>(bytes)) != 0) std::abort();
  }
  ~DiskFile() { ::unlink(path_); }
  DiskFile(const DiskFile&) = delete;
  std::string path() const { return path_; }

 private:
  char path_[32] = "/var/tmp/hymcache-region-XXXXXX";
  UniqueFd fd_;
};

inline RegionForm small_form(std::uint64_t slot_bytes = 4096) {
  return {
      .slot_bytes = slot_bytes, .config = "{}", .participants = 8, .pins = 8, .lease_ms = 60'000};
}

inline std::shared_ptr<Region> open_region(const MemoryFile& file, const RegionForm& form,
                                           bool writable = true) {
  RegionOptions options;
  options.path = file.path();
  options.writable = writable;
  if (writable) options.form = form;
  return std::make_shared<Region>(options);
}

inline std::shared_ptr<Region> open_durable(const DiskFile& file, const RegionForm& form,
                                            SyncToDisk sync_to_disk) {
  RegionOptions options;
  options.path = file.path();
  options.form = form;
  options.durable = true;
  options.sync_to_disk = std::move(sync_to_disk);
  return std::make_shared<Region>(options);
}

inline ParticipantTable<SharedWord> table_of(const Region& region) {
  const RegionLayout& layout = region.layout();
  return {reinterpret_cast<SharedWord*>(region.at(layout.participants_offset)),
          layout.header.participants, layout.header.pins,
          static_cast<std::uint32_t>(layout.participant_bytes / 8)};
}

// Spread over all slots by its first bytes.
inline ObjectKey key_of(std::uint64_t number) {
  ObjectKey key;
  const std::uint64_t words[2] = {number * 0x9e3779b97f4a7c15, number * 0xc2b2ae3d27d4eb4f};
  std::memcpy(key.data(), words, sizeof words);
  return key;
}

inline std::vector<std::byte> bytes_of_object(std::uint64_t number, std::size_t bytes) {
  std::vector<std::byte> content(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    content[i] = static_cast<std::byte>(number * 31 + i / 8 + number / 256);
  }
  return content;
}

inline RegionStatus store(RegionDirectory& directory, std::uint64_t number,
                          std::vector<std::byte> content) {
  RegionStatus status{};
  const ObjectKey key = key_of(number);
  const Segment segment{content.data(), content.size()};
  directory.store({&key, 1}, [&](std::size_t) { return std::span(&segment, 1); }, number,
                  {&status, 1});
  return status;
}

inline RegionStatus load(RegionDirectory& directory, std::uint64_t number,
                         std::vector<std::byte>& into) {
  RegionStatus status{};
  const ObjectKey key = key_of(number);
  const Segment segment{into.data(), into.size()};
  directory.load({&key, 1}, [&](std::size_t) { return std::span(&segment, 1); }, {&status, 1});
  return status;
}

inline RegionStatus look_up(RegionDirectory& directory, std::uint64_t number) {
  RegionStatus status{};
  const ObjectKey key = key_of(number);
  directory.lookup({&key, 1}, {&status, 1});
  return status;
}

}  // namespace hymcache::region_testing
