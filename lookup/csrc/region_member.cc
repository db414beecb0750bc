#include "lookup/csrc/region_member.h"

#include <cstring>
#include <utility>

#include "hymcache/csrc/error.h"

namespace hymcache::region {

RegionMember::RegionMember(const Table& table, std::string name, std::chrono::milliseconds lease,
                           std::string place)
    : table_(table), name_(std::move(name)), lease_(lease), place_(std::move(place)) {
  seen_.resize(table_.size());
  const Clock::time_point now = observed_ = Clock::now();
  for (std::uint32_t i = 0; i < table_.size(); ++i) {
    seen_[i] = {table_.state(i).load(std::memory_order_acquire),
                table_.beats(i).load(std::memory_order_relaxed), now};
  }
  const std::lock_guard lock(mutex_);
  join();
}

void RegionMember::join() {
  const std::optional<Owner> joined = table_.join();
  if (!joined) {
    throw Error(ErrorKind::kUnavailable,
                place_ + ": all " + std::to_string(table_.size()) +
                    " places for participants are taken; stop one, or format the region with more");
  }
  owner_ = *joined;
  joined_ = true;
  char text[kNameBytes] = {};
  std::strncpy(text, name_.c_str(), sizeof text - 1);
  for (std::uint32_t i = 0; i < kNameBytes / 8; ++i) {
    std::uint64_t word;
    std::memcpy(&word, text + std::size_t{i} * 8, sizeof word);
    table_.name(owner_.index, i).store(word, std::memory_order_relaxed);
  }
  table_.beats(owner_.index).fetch_add(1, std::memory_order_relaxed);
  free_cells_.clear();
  for (std::uint32_t i = table_.pins(); i > 0; --i) free_cells_.push_back(i - 1);
}

Owner RegionMember::owner() {
  const std::lock_guard lock(mutex_);
  if (!joined_) throw Error(ErrorKind::kUnavailable, place_ + ": this directory is closed");
  if (!table_.is_active(owner_)) {
    join();
    ++rejoined_;
  }
  return owner_;
}

Owner RegionMember::last_owner() noexcept {
  const std::lock_guard lock(mutex_);
  return owner_;
}

RegionMember::Cell RegionMember::take_cell() noexcept {
  const std::lock_guard lock(mutex_);
  if (free_cells_.empty() || !joined_ || !table_.is_active(owner_)) return {};
  const std::uint32_t index = free_cells_.back();
  free_cells_.pop_back();
  SharedWord& used = table_.pins_used(owner_.index);
  // Before the pin is published, so that who looks for it looks as far as here.
  if (used.load(std::memory_order_relaxed) <= index) {
    used.store(index + 1, std::memory_order_release);
  }
  return {.word = &table_.pin(owner_.index, index), .index = index, .owner = owner_};
}

void RegionMember::give_back(const Cell& cell) {
  const std::lock_guard lock(mutex_);
  if (!joined_ || cell.owner.epoch != owner_.epoch || cell.owner.index != owner_.index) return;
  cell.word->store(0, std::memory_order_release);
  free_cells_.push_back(cell.index);
}

void RegionMember::beat() {
  const Owner now = owner();
  table_.beats(now.index).fetch_add(1, std::memory_order_relaxed);
}

std::vector<std::uint32_t> RegionMember::observe(Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  std::vector<std::uint32_t> dead;
  const bool stood_still = now - std::exchange(observed_, now) > lease_ / 2;
  for (std::uint32_t i = 0; i < table_.size(); ++i) {
    const std::uint64_t state = table_.state(i).load(std::memory_order_acquire);
    const std::uint64_t beats = table_.beats(i).load(std::memory_order_relaxed);
    Seen& seen = seen_[i];
    if (stood_still || state != seen.state || beats != seen.beats) seen = {state, beats, now};
    if (Table::state_of(state) == ParticipantState::kDead) dead.push_back(i);
    if (Table::state_of(state) != ParticipantState::kActive || now - seen.since < lease_) continue;
    if (joined_ && i == owner_.index) continue;
    if (table_.bury(i, state)) dead.push_back(i);
  }
  return dead;
}

void RegionMember::audit() {
  const std::lock_guard lock(mutex_);
  if (!joined_ || !table_.is_active(owner_)) return;
  for (const std::uint32_t cell : free_cells_) {
    SharedWord& word = table_.pin(owner_.index, cell);
    if (word.load(std::memory_order_relaxed) != 0) word.store(0, std::memory_order_release);
  }
}

bool RegionMember::is_first(Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  for (std::uint32_t i = 0; i < owner_.index; ++i) {
    const std::uint64_t state = table_.state(i).load(std::memory_order_relaxed);
    // A command of the operator's is active too, but does not beat and keeps no room.
    const bool beats = now - seen_[i].since < lease_ / 2;
    if (Table::state_of(state) == ParticipantState::kActive && beats) return false;
  }
  return true;
}

std::chrono::milliseconds RegionMember::silent(std::uint32_t index, Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  return std::chrono::duration_cast<std::chrono::milliseconds>(now - seen_[index].since);
}

void RegionMember::leave() {
  const std::lock_guard lock(mutex_);
  if (!joined_) return;
  joined_ = false;
  if (table_.is_active(owner_)) {
    table_.free(owner_.index, Table::word_of(owner_.epoch, ParticipantState::kActive));
  }
}

std::uint64_t RegionMember::rejoined() {
  const std::lock_guard lock(mutex_);
  return rejoined_;
}

}  // namespace hymcache::region
