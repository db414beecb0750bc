// A shared region that is formatted and mapped.
//
// There is no formatting step and no order among its users: whoever finds it blank claims it by
// one compare-exchange and formats it, the others wait for the claim to say `ready`. If the one
// that formats dies, its claim stands still, and another takes it over.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "chm_device/csrc/region_layout.h"
#include "chm_device/csrc/region_memory.h"

namespace hymcache::region {

struct RegionOptions {
  std::string path;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;         // 0: all from offset on
  std::optional<RegionForm> form;  // without one, only attaches
  bool force = false;              // formats whatever there is: nobody else may be attached
  bool map_data = true;            // else only what lies in front of the data slots
  bool writable = true;
  bool prefault = false;
  bool durable = false;  // of a file: objects are on its disk before they are shown
  std::chrono::milliseconds wait{10'000};
  SyncToDisk sync_to_disk{};  // msync, but for tests
};

class Region {
 public:
  // A claim that stands still for this long has lost its owner: a step of it takes milliseconds.
  static constexpr std::chrono::milliseconds kTakeOver{2'000};

  // Throws kConfig for what is not a region of this version or has no room, kUnavailable where
  // another does not come to an end of formatting it in time, kDevice.
  explicit Region(const RegionOptions& options);

  const RegionLayout& layout() const noexcept { return layout_; }
  RegionMemory& memory() noexcept { return memory_; }
  const RegionMemory& memory() const noexcept { return memory_; }
  bool formatted_here() const noexcept { return formatted_here_; }
  bool has_data() const noexcept { return options_.map_data; }
  bool is_durable() const noexcept {
    return options_.durable && memory_.kind() == MemoryKind::kFile;
  }
  std::uint64_t claim() const noexcept { return claim_; }

  // False once somebody has formatted the region anew.
  bool is_unchanged() const noexcept;
  // Throws kUnavailable then.
  void require_unchanged() const;

  std::byte* at(std::uint64_t offset) const noexcept { return memory_.base() + offset; }
  std::byte* slot(std::uint32_t slot) const noexcept {
    return at(layout_.header.data_offset + slot * layout_.header.slot_bytes);
  }

 private:
  std::atomic<std::uint64_t>& claim_word() const noexcept;
  bool is_blank() const noexcept;
  void require_room() const;
  void settle();
  void format_if_blank(std::uint64_t claim);
  bool format(std::uint64_t claim);

  RegionOptions options_;
  RegionMemory memory_;
  RegionLayout layout_;
  std::uint64_t claim_ = 0;
  bool formatted_here_ = false;
};

}  // namespace hymcache::region
