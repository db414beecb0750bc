#include "chm_device/csrc/slot_table.h"

#include <algorithm>

#include "chm_device/csrc/byte_size.h"

namespace hymcache::chm {

void SlotList::insert_after(SlotIndex previous, SlotIndex index) {
  std::vector<Slot>& slots = *slots_;
  const SlotIndex next = previous == kNoSlot ? first_ : slots[previous].next;
  slots[index].previous = previous;
  slots[index].next = next;
  (previous == kNoSlot ? first_ : slots[previous].next) = index;
  (next == kNoSlot ? last_ : slots[next].previous) = index;
}

void SlotList::insert_by_sequence(SlotIndex index) {
  SlotIndex previous = last_;
  while (previous != kNoSlot && (*slots_)[previous].sequence > (*slots_)[index].sequence) {
    previous = (*slots_)[previous].previous;
  }
  insert_after(previous, index);
}

void SlotList::remove(SlotIndex index) {
  std::vector<Slot>& slots = *slots_;
  Slot& slot = slots[index];
  (slot.previous == kNoSlot ? first_ : slots[slot.previous].next) = slot.next;
  (slot.next == kNoSlot ? last_ : slots[slot.next].previous) = slot.previous;
  slot.previous = kNoSlot;
  slot.next = kNoSlot;
}

std::uint32_t SlotTable::slots_for(std::uint64_t window_bytes) {
  constexpr std::uint64_t kSlotsMin = 16;
  constexpr std::uint64_t kSlotsMax = 1u << 18;
  constexpr std::uint64_t kBytesPerSlot = 16 << 10;
  return static_cast<std::uint32_t>(std::clamp(window_bytes / kBytesPerSlot, kSlotsMin, kSlotsMax));
}

SlotTable::SlotTable(Arena& arena, std::uint64_t staging_bytes, std::uint64_t write_buffer_bytes)
    : arena_(arena),
      slots_(slots_for(staging_bytes) + slots_for(write_buffer_bytes)),
      pools_{Pool(arena.staging_offset(), staging_bytes, slots_for(staging_bytes), make_list()),
             Pool(arena.region().read_write_offset, write_buffer_bytes,
                  slots_for(write_buffer_bytes), make_list())} {
  add_unused(Window::kStaging, 0, slots_for(staging_bytes));
  add_unused(Window::kWriteBuffer, slots_for(staging_bytes), slots_for(write_buffer_bytes));
}

void SlotTable::add_unused(Window window, SlotIndex first, std::uint32_t count) {
  for (SlotIndex index = first + count; index-- > first;) {
    slots_[index].window = window;
    slots_[index].next = pool(window).unused;
    pool(window).unused = index;
  }
}

StagedObject SlotTable::staged(SlotIndex index) const {
  return {slots_[index].region_offset, Arena::word_offset(index), arena_.generation(index)};
}

SlotIndex SlotTable::allocate(Window window, std::uint32_t length) {
  Pool& from = pool(window);
  const std::uint64_t bytes = padded(length);
  if (from.extents.free_bytes() + from.idle_bytes < bytes) return kNoSlot;
  std::optional<ExtentId> extent = from.extents.allocate(bytes);
  while (!extent && !from.idle.empty()) {
    const SlotIndex oldest = from.idle.front();
    remove_idle(oldest);
    retire(oldest);
    extent = from.extents.allocate(bytes);
  }
  if (!extent) return kNoSlot;

  // There is a slot for each extent that the allocator may give.
  const SlotIndex index = from.unused;
  Slot& slot = slots_[index];
  from.unused = slot.next;
  slot = Slot{};
  slot.window = window;
  slot.length = length;
  slot.extent = *extent;
  slot.region_offset = from.region_offset + from.extents.offset_bytes(*extent);
  return index;
}

void SlotTable::retire(SlotIndex index) {
  Slot& slot = slots_[index];
  if (find(slot.address) == index) withdraw(index);
  arena_.advance_generation(index);
  Pool& to = pool(slot.window);
  to.extents.release(slot.extent);
  slot.state = SlotState::kFree;
  slot.next = to.unused;
  to.unused = index;
}

SlotIndex SlotTable::find(std::uint64_t address) const {
  const auto found = by_address_.find(address);
  return found == by_address_.end() ? kNoSlot : found->second;
}

void SlotTable::publish(SlotIndex index) { by_address_[slots_[index].address] = index; }

void SlotTable::withdraw(SlotIndex index) { by_address_.erase(slots_[index].address); }

void SlotTable::add_idle(SlotIndex index) {
  Pool& of = pool(slots_[index].window);
  of.idle.push_back(index);
  of.idle_bytes += padded(slots_[index].length);
}

void SlotTable::remove_idle(SlotIndex index) {
  Pool& of = pool(slots_[index].window);
  of.idle.remove(index);
  of.idle_bytes -= padded(slots_[index].length);
}

std::uint64_t SlotTable::busy_bytes(Window window) const {
  return pool(window).extents.used_bytes() - pool(window).idle_bytes;
}

}  // namespace hymcache::chm
