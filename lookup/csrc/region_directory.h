// The objects of a shared region, for one process: batches of lookups, stores, loads and pins.
// Thread-safe. No call waits for another process.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "chm_device/csrc/region.h"
#include "lookup/csrc/region_member.h"
#include "lookup/csrc/slot_protocol.h"
#include "transport/csrc/copy.h"

namespace hymcache::region {

enum class RegionStatus : std::uint8_t {
  kOk = 0,
  kMiss = 1,
  kCorrupt = 2,
  kPending = 3,
  kStoredAlready = 4,
  kFull = 5,
  kWrongSize = 6,
  kLost = 7,
};
inline constexpr std::size_t kRegionStatuses = 8;

struct DirectoryOptions {
  std::string name{};
  bool checksums = true;
  unsigned threads = 1;  // that copy the objects of one call
  double high_watermark = 0.98;
  double low_watermark = 0.95;
  bool maintain = true;
};

struct DirectoryStats {
  using Counter = std::atomic<std::uint64_t>;

  Counter lookups{0}, lookup_keys{0}, lookup_hits{0};
  std::array<Counter, kRegionStatuses> stored{};
  std::array<Counter, kRegionStatuses> loaded{};
  Counter stored_bytes{0}, loaded_bytes{0};
  Counter loads_overtaken{0};  // of the misses: the object was replaced during the copy
  Counter pins{0}, pins_missed{0}, pins_full{0};
  Counter evicted_for_room{0}, evicted_by_watermark{0}, removed{0};
  Counter reclaimed{0}, buried{0};
};

// Where the bytes of the object of key i are, or go.
using SegmentsOf = std::function<std::span<const Segment>(std::size_t)>;

class RegionDirectory {
 public:
  using Protocol = SlotProtocol<SharedWord>;

  // Throws kUnavailable where all places for participants are taken, kConfig for bad watermarks.
  RegionDirectory(std::shared_ptr<Region> region, DirectoryOptions options);
  ~RegionDirectory();
  RegionDirectory(const RegionDirectory&) = delete;
  RegionDirectory& operator=(const RegionDirectory&) = delete;

  const std::shared_ptr<Region>& region() const noexcept { return region_; }
  const DirectoryStats& stats() const noexcept { return stats_; }
  std::uint64_t rejoined() { return member_ ? member_->rejoined() : 0; }
  int participant();  // -1 where the region is read-only

  void lookup(std::span<const ObjectKey> keys, std::span<RegionStatus> out);
  void touch(std::span<const ObjectKey> keys);
  void store(std::span<const ObjectKey> keys, const SegmentsOf& from, std::uint64_t name_space,
             std::span<RegionStatus> out);
  void load(std::span<const ObjectKey> keys, const SegmentsOf& into, std::span<RegionStatus> out);

  using Ticket = std::uint64_t;
  Ticket pin(std::span<const ObjectKey> keys, std::span<RegionStatus> out);
  void unpin(Ticket ticket);  // throws kConfig for one that is not known

  void remove(std::span<const ObjectKey> keys, std::span<RegionStatus> out);
  std::uint64_t clear();
  std::uint64_t reclaim();

  // For a look at it.
  using StateCounts = std::array<std::uint64_t, 4>;  // by SlotState
  StateCounts slots_by_state();  // one pass over the words: cheap enough to ask every second
  struct Usage {
    StateCounts by_state{};
    std::uint64_t pinned = 0;
    std::uint64_t stored_bytes = 0;
    std::map<std::uint64_t, std::pair<std::uint64_t, std::uint64_t>> namespaces;  // objects, bytes
  };
  Usage usage();
  struct SlotView {
    std::uint32_t slot;
    SlotWord word;
    KeyWords key;
    ObjectInfo info;
  };
  std::vector<SlotView> entries(std::uint32_t first, std::uint32_t count);
  struct ParticipantView {
    std::uint32_t index;
    std::uint32_t epoch;
    ParticipantState state;
    std::string name;
    std::uint64_t beats;
    std::int64_t silent_ms;
    std::uint64_t pins;
  };
  std::vector<ParticipantView> participants();
  struct Verified {
    std::uint64_t good = 0;
    std::uint64_t unchecked = 0;
    std::uint64_t corrupt = 0;
  };
  // Those that are corrupt are removed where the region is writable.
  Verified verify(std::uint32_t first, std::uint32_t count);

  void close();

 private:
  class Pinned;
  using Operation = std::shared_lock<std::shared_mutex>;

  Operation begin();  // throws kUnavailable after close(), and where the region was formatted anew
  RegionMember& member();
  RegionStatus store_one(const ObjectKey& key, std::span<const Segment> from,
                         std::uint64_t name_space, Owner owner);
  RegionStatus publish(const ClaimedSlot& claimed, KeyWords key, std::span<const Segment> from,
                       std::uint64_t name_space);
  bool fill(const ClaimedSlot& claimed, std::span<const Segment> from, std::uint32_t* crc);
  void sync(const SharedWord* from, std::uint64_t words);
  RegionStatus load_one(const ObjectKey& key, std::span<const Segment> into);
  RegionStatus load_found(const ObjectKey& key, const FoundSlot& found,
                          std::span<const Segment> into);
  void drop(const FoundSlot& found);
  void for_each_in_threads(std::size_t count, const std::function<void(std::size_t)>& visit);
  std::uint64_t reclaim_dead();
  void keep_room();
  void maintain();

  const std::shared_ptr<Region> region_;
  const DirectoryOptions options_;
  const ParticipantTable<SharedWord> table_;
  Protocol protocol_;
  SharedWord* const hand_;  // of the clock: the slot it looks at next, shared by all
  std::unique_ptr<RegionMember> member_;
  DirectoryStats stats_;

  std::shared_mutex open_mutex_;  // held by every call, and alone by close()
  bool open_ = true;
  std::mutex tickets_mutex_;
  Ticket last_ticket_ = 0;
  std::map<Ticket, std::vector<RegionMember::Cell>> tickets_;

  std::mutex wake_mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::thread maintaining_;
};

}  // namespace hymcache::region
