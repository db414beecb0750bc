// The slots of a device's DRAM: which bytes of the arena hold which object, and for whom.
//
// A slot belongs to the staging window or to the write buffer and never moves. Its number is the
// number of its generation word, which changes when the slot is retired, before its bytes can be
// given to another.
//
//   write buffer:  free -> granted -> dirty -> flushing -> clean -> free
//                             \-> free (aborted)
//   staging:       free -> waiting -> reading -> clean -> free
//                             \          \-> failed -> free
//                              \-> free (released before it was started)
//
// A clean slot that nobody pins keeps its bytes, and can be found, until room is needed: then the
// one that has been so for longest goes.
#pragma once

#include <array>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "chm_device/csrc/arena.h"
#include "chm_device/csrc/device.h"
#include "chm_device/csrc/extent_allocator.h"

namespace hymcache::chm {

using SlotIndex = std::uint32_t;
inline constexpr SlotIndex kNoSlot = ~SlotIndex{0};

enum class Window : std::uint8_t { kStaging, kWriteBuffer };

enum class SlotState : std::uint8_t {
  kFree,
  kGranted,   // a client may write
  kDirty,     // committed, to be flushed
  kFlushing,  // the write is in the I/O engine
  kWaiting,   // to be read, not yet in the I/O engine
  kReading,   // the read is in the I/O engine
  kFailed,    // the read failed
  kClean,     // same bytes as on the device
};

struct Slot {
  SlotState state = SlotState::kFree;
  Window window = Window::kStaging;
  // The object was freed or lost while the slot was in use: nobody finds it any more, and its
  // address goes back to the log with the slot, not before.
  bool is_dead = false;
  std::uint32_t length = 0;
  std::uint32_t pins = 0;  // requests
  ExtentId extent = 0;
  std::uint64_t address = 0;
  std::uint64_t region_offset = 0;
  std::uint64_t sequence = 0;    // of the grant: the order of addresses in the log
  RequestId waiter = 0;          // first of the requests that wait for the read
  SlotIndex previous = kNoSlot;  // in the one list that its state puts it in
  SlotIndex next = kNoSlot;
};

// Slots chained through their own links.
class SlotList {
 public:
  explicit SlotList(std::vector<Slot>& slots) : slots_(&slots) {}

  bool empty() const noexcept { return first_ == kNoSlot; }
  SlotIndex front() const noexcept { return first_; }
  void push_back(SlotIndex index) { insert_after(last_, index); }
  // Keeps the list in order of `sequence`; quick for what comes nearly in order.
  void insert_by_sequence(SlotIndex index);
  void remove(SlotIndex index);

 private:
  void insert_after(SlotIndex previous, SlotIndex index);

  std::vector<Slot>* slots_;
  SlotIndex first_ = kNoSlot;
  SlotIndex last_ = kNoSlot;
};

class SlotTable {
 public:
  // Slots that a window of this size gets: one for 16 KiB, within bounds.
  static std::uint32_t slots_for(std::uint64_t window_bytes);

  SlotTable(Arena& arena, std::uint64_t staging_bytes, std::uint64_t write_buffer_bytes);
  SlotTable(const SlotTable&) = delete;  // the lists point into it
  SlotTable& operator=(const SlotTable&) = delete;

  Slot& at(SlotIndex index) { return slots_[index]; }
  const Slot& at(SlotIndex index) const { return slots_[index]; }
  std::uint8_t* data(const Slot& slot) const { return arena_.at(slot.region_offset); }
  StagedObject staged(SlotIndex index) const;
  SlotList make_list() { return SlotList(slots_); }

  // A slot for `length` bytes, its state still kFree; unpinned clean slots give way. kNoSlot when
  // what is in use leaves no room.
  SlotIndex allocate(Window window, std::uint32_t length);
  // Ends a slot: clients are told, its bytes and its number are free. It is in no list.
  void retire(SlotIndex index);

  // The slot that holds the object at `address`, if there is one that may be found.
  SlotIndex find(std::uint64_t address) const;
  void publish(SlotIndex index);
  void withdraw(SlotIndex index);

  // Clean and unpinned: may give way.
  void add_idle(SlotIndex index);
  void remove_idle(SlotIndex index);

  // Bytes that cannot give way.
  std::uint64_t busy_bytes(Window window) const;

 private:
  struct Pool {
    Pool(std::uint64_t offset, std::uint64_t bytes, std::uint32_t slots, SlotList list)
        : region_offset(offset), extents(bytes, slots), idle(list) {}

    std::uint64_t region_offset;
    ExtentAllocator extents;
    SlotList idle;
    std::uint64_t idle_bytes = 0;
    SlotIndex unused = kNoSlot;  // chained by Slot::next
  };

  Pool& pool(Window window) { return pools_[static_cast<std::size_t>(window)]; }
  const Pool& pool(Window window) const { return pools_[static_cast<std::size_t>(window)]; }
  void add_unused(Window window, SlotIndex first, std::uint32_t count);

  Arena& arena_;
  std::vector<Slot> slots_;
  std::array<Pool, 2> pools_;
  std::unordered_map<std::uint64_t, SlotIndex> by_address_;
};

}  // namespace hymcache::chm
