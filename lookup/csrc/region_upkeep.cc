// What a directory does beside its calls: beats, takes back what the dead have left, keeps some
// slots free, and tells what there is.
#include <algorithm>
#include <cstring>
#include <exception>

#include "hymcache/csrc/error.h"
#include "lookup/csrc/object_checksum.h"
#include "lookup/csrc/region_directory.h"
#include "transport/csrc/crc32c.h"

namespace hymcache::region {
namespace {

using std::chrono::milliseconds;

constexpr auto kRelaxed = std::memory_order_relaxed;
// A participant that beats this often in a lease is not held for dead for a beat that was late.
constexpr int kBeatsInLease = 8;
constexpr milliseconds kBeatMin{2};
constexpr milliseconds kRoomPeriod{500};

}  // namespace

void RegionDirectory::maintain() {
  const milliseconds period =
      std::max(kBeatMin, milliseconds(region_->layout().header.lease_ms) / kBeatsInLease);
  auto room_kept = std::chrono::steady_clock::now();
  for (;;) {
    {
      std::unique_lock lock(wake_mutex_);
      if (wake_.wait_for(lock, period, [this] { return stopping_; })) return;
    }
    try {
      region_->require_unchanged();
      member_->beat();
      member_->audit();
      reclaim_dead();
      const auto now = std::chrono::steady_clock::now();
      if (now - room_kept < kRoomPeriod) continue;
      room_kept = now;
      keep_room();
    } catch (const std::exception&) {
      // No place among the participants, no memory, or the region is gone: the calls tell whoever
      // makes them, and this one tries again.
    }
  }
}

std::uint64_t RegionDirectory::reclaim() {
  const Operation operation = begin();
  member().owner();
  const std::uint64_t of_the_dead = reclaim_dead();
  // Also what a participant that left without an end of its stores may have left behind.
  std::uint64_t freed = 0;
  for (std::uint32_t slot = 0; slot < protocol_.slots(); ++slot) freed += protocol_.reclaim(slot);
  stats_.reclaimed.fetch_add(freed, kRelaxed);
  return of_the_dead + freed;
}

std::uint64_t RegionDirectory::reclaim_dead() {
  const std::vector<std::uint32_t> dead = member_->observe(RegionMember::Clock::now());
  if (dead.empty()) return 0;
  std::vector<std::uint64_t> states;
  for (const std::uint32_t index : dead) {
    states.push_back(table_.state(index).load(std::memory_order_acquire));
  }
  std::uint64_t freed = 0;
  for (std::uint32_t slot = 0; slot < protocol_.slots(); ++slot) freed += protocol_.reclaim(slot);
  for (std::size_t i = 0; i < dead.size(); ++i) {
    if (table_.state_of(states[i]) != ParticipantState::kDead) continue;
    if (table_.free(dead[i], states[i])) stats_.buried.fetch_add(1, kRelaxed);
  }
  stats_.reclaimed.fetch_add(freed, kRelaxed);
  return freed;
}

// So that a store finds a free slot in its window most of the time. One participant is enough;
// should there be two for a moment, some more objects go.
void RegionDirectory::keep_room() {
  if (!member_->is_first(RegionMember::Clock::now())) return;
  const std::uint32_t slots = protocol_.slots();
  std::uint64_t used = 0;
  for (std::uint32_t slot = 0; slot < slots; ++slot) {
    // Nobody buries twice: what one that was buried has begun since, and left, is found here.
    stats_.reclaimed.fetch_add(protocol_.reclaim(slot), kRelaxed);
    used += protocol_.word(slot).state() != SlotState::kFree;
  }
  if (static_cast<double>(used) <= options_.high_watermark * slots) return;
  const auto goal = static_cast<std::uint64_t>(options_.low_watermark * slots);
  const Owner owner = member_->owner();
  // Two rounds at most: the first may find nothing but reference bits.
  for (std::uint64_t looked = 0; used > goal && looked < 2 * std::uint64_t{slots}; ++looked) {
    const auto slot = static_cast<std::uint32_t>(hand_->fetch_add(1, kRelaxed) % slots);
    if (!protocol_.tick(slot, owner)) continue;
    --used;
    stats_.evicted_by_watermark.fetch_add(1, kRelaxed);
  }
}

RegionDirectory::StateCounts RegionDirectory::slots_by_state() {
  const Operation operation = begin();
  StateCounts counts{};
  for (std::uint32_t slot = 0; slot < protocol_.slots(); ++slot) {
    ++counts[static_cast<std::size_t>(protocol_.word(slot).state())];
  }
  return counts;
}

RegionDirectory::Usage RegionDirectory::usage() {
  const Operation operation = begin();
  // Once for all slots: a look at every pin for each of them takes seconds.
  const std::vector<std::uint64_t> pins = table_.pins_in_order();
  Usage usage;
  for (std::uint32_t slot = 0; slot < protocol_.slots(); ++slot) {
    const SlotWord seen = protocol_.word(slot);
    ++usage.by_state[static_cast<std::size_t>(seen.state())];
    const auto object = protocol_.object_at(slot);
    if (!object) continue;
    const FoundSlot& found = object->second;
    usage.pinned +=
        found.word.held() &&
        std::binary_search(pins.begin(), pins.end(), pin_cell(slot, found.word.generation()));
    usage.stored_bytes += found.info.length;
    auto& [objects, bytes] = usage.namespaces[found.info.name_space];
    ++objects;
    bytes += found.info.length;
  }
  return usage;
}

std::vector<RegionDirectory::SlotView> RegionDirectory::entries(std::uint32_t first,
                                                                std::uint32_t count) {
  const Operation operation = begin();
  std::vector<SlotView> views;
  const std::uint64_t end =
      std::min<std::uint64_t>(protocol_.slots(), std::uint64_t{first} + count);
  for (std::uint32_t slot = first; slot < end; ++slot) {
    const SlotWord seen = protocol_.word(slot);
    if (const auto object = protocol_.object_at(slot)) {
      views.push_back({slot, object->second.word, object->first, object->second.info});
    } else if (seen.state() != SlotState::kFree) {
      views.push_back({slot, seen, {}, {}});
    }
  }
  return views;
}

std::vector<RegionDirectory::ParticipantView> RegionDirectory::participants() {
  const Operation operation = begin();
  std::vector<ParticipantView> views;
  const auto now = RegionMember::Clock::now();
  for (std::uint32_t index = 0; index < table_.size(); ++index) {
    const std::uint64_t state = table_.state(index).load(std::memory_order_acquire);
    if (state == 0) continue;  // never used
    char name[kNameBytes + 1] = {};
    for (std::uint32_t i = 0; i < kNameBytes / 8; ++i) {
      const std::uint64_t word = table_.name(index, i).load(kRelaxed);
      std::memcpy(name + std::size_t{i} * 8, &word, sizeof word);
    }
    std::uint64_t pins = 0;
    const std::uint64_t used = table_.pins_used(index).load(std::memory_order_acquire);
    for (std::uint32_t i = 0; i < used && i < table_.pins(); ++i) {
      pins += table_.pin(index, i).load(kRelaxed) != 0;
    }
    views.push_back({.index = index,
                     .epoch = table_.epoch_of(state),
                     .state = table_.state_of(state),
                     .name = name,
                     .beats = table_.beats(index).load(kRelaxed),
                     .silent_ms = member_ ? member_->silent(index, now).count() : 0,
                     .pins = pins});
  }
  return views;
}

RegionDirectory::Verified RegionDirectory::verify(std::uint32_t first, std::uint32_t count) {
  const Operation operation = begin();
  if (!region_->has_data()) throw Error(ErrorKind::kConfig, "the data slots are not mapped");
  Verified verified;
  const std::uint64_t end =
      std::min<std::uint64_t>(protocol_.slots(), std::uint64_t{first} + count);
  for (std::uint32_t slot = first; slot < end; ++slot) {
    const auto object = protocol_.object_at(slot);
    if (!object) continue;
    const FoundSlot& found = object->second;
    if (!found.info.has_crc) {
      ++verified.unchecked;
      continue;
    }
    const bool fits = found.info.length <= region_->layout().header.slot_bytes;
    const std::uint32_t seed =
        checksum_seed(object->first, found.word.generation(), found.info.length);
    const std::uint32_t crc =
        fits ? crc32c(seed, region_->slot(slot), found.info.length) : ~found.info.crc32c;
    if (!protocol_.is_unchanged(found)) continue;
    if (crc == found.info.crc32c) {
      ++verified.good;
    } else {
      ++verified.corrupt;
      drop(found);
    }
  }
  return verified;
}

}  // namespace hymcache::region
