// The participants of a shared region: who is attached, that it lives, and what it has pinned.
//
// A record is a header of 8 words and one word for each pin:
//
//   0  epoch << 8 | state      2  pins that were ever used (the others are 0)
//   1  beats                   3  name: 40 bytes of UTF-8, filled up with NUL
//
//            join                   silent for the lease
//     free ─────────▶ active ──────────────────────────────▶ dead
//       ▲  (epoch + 1)  │ leave                                │ slots and pins are taken back
//       └───────────────┴──────────────────────────────────────┘
//
// Written over a word type, so that the explorer of interleavings runs this very code.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "lookup/csrc/slot_word.h"

namespace hymcache::region {

enum class ParticipantState : std::uint8_t { kFree = 0, kActive = 1, kDead = 2 };

inline constexpr std::uint32_t kRecordHeaderWords = 8;
inline constexpr std::uint32_t kNameBytes = 40;

template <class Word>
class ParticipantTable {
 public:
  ParticipantTable(Word* records, std::uint32_t participants, std::uint32_t pins,
                   std::uint32_t record_words)
      : records_(records), participants_(participants), pins_(pins), record_words_(record_words) {}

  std::uint32_t size() const noexcept { return participants_; }
  std::uint32_t pins() const noexcept { return pins_; }

  static constexpr std::uint64_t word_of(std::uint32_t epoch, ParticipantState state) noexcept {
    return std::uint64_t{epoch} << 8 | static_cast<std::uint64_t>(state);
  }
  static constexpr ParticipantState state_of(std::uint64_t word) noexcept {
    return static_cast<ParticipantState>(word & 3);
  }
  static constexpr std::uint32_t epoch_of(std::uint64_t word) noexcept {
    return static_cast<std::uint32_t>(word >> 8);
  }

  Word& state(std::uint32_t index) const noexcept { return record(index)[0]; }
  Word& beats(std::uint32_t index) const noexcept { return record(index)[1]; }
  Word& pins_used(std::uint32_t index) const noexcept { return record(index)[2]; }
  Word& name(std::uint32_t index, std::uint32_t word) const noexcept {
    return record(index)[3 + word];
  }
  Word& pin(std::uint32_t index, std::uint32_t cell) const noexcept {
    return record(index)[kRecordHeaderWords + cell];
  }

  // Takes a free record, or nothing where there is none.
  std::optional<Owner> join() const noexcept {
    for (std::uint32_t index = 0; index < participants_; ++index) {
      std::uint64_t word = state(index).load(std::memory_order_acquire);
      if (state_of(word) != ParticipantState::kFree) continue;
      const std::uint32_t epoch = epoch_of(word) + 1;
      if (!state(index).compare_exchange_strong(word, word_of(epoch, ParticipantState::kActive),
                                                std::memory_order_acq_rel,
                                                std::memory_order_relaxed)) {
        continue;
      }
      // Not by who frees it: of several that do, a slow one would clear the pins of the next owner.
      // Until they are gone they hold off an eviction, no more.
      clear_pins(index);
      return Owner{.index = static_cast<std::uint8_t>(index), .epoch = epoch};
    }
    return std::nullopt;
  }

  // False once somebody has held this participant for dead.
  bool is_active(Owner owner) const noexcept {
    return state(owner.index).load(std::memory_order_acquire) ==
           word_of(owner.epoch, ParticipantState::kActive);
  }

  // The owner that a slot word names is there.
  bool owns(SlotWord slot) const noexcept {
    if (slot.owner() >= participants_) return false;
    const std::uint64_t word = state(slot.owner()).load(std::memory_order_acquire);
    return state_of(word) == ParticipantState::kActive &&
           static_cast<std::uint8_t>(epoch_of(word)) == slot.epoch();
  }

  // From here on nobody minds its pins, and its slots may be taken back. `from` is its state word.
  bool bury(std::uint32_t index, std::uint64_t from) const noexcept {
    return state(index).compare_exchange_strong(
        from, word_of(epoch_of(from), ParticipantState::kDead), std::memory_order_acq_rel,
        std::memory_order_relaxed);
  }

  // After its slots were taken back. Several may do this at once for one that is dead.
  bool free(std::uint32_t index, std::uint64_t from) const noexcept {
    return state(index).compare_exchange_strong(
        from, word_of(epoch_of(from), ParticipantState::kFree), std::memory_order_acq_rel,
        std::memory_order_relaxed);
  }

  // Some participant that is active has pinned the slot with this generation. Asked by whoever has
  // just made the slot dying: the exchange of pin() that came before has published its cell.
  bool is_pinned(std::uint32_t slot, std::uint32_t generation) const noexcept {
    const std::uint64_t cell = pin_cell(slot, generation);
    for (std::uint32_t index = 0; index < participants_; ++index) {
      const std::uint64_t word = state(index).load(std::memory_order_acquire);
      if (state_of(word) != ParticipantState::kActive) continue;
      const std::uint64_t used = pins_used(index).load(std::memory_order_acquire);
      for (std::uint32_t i = 0; i < used && i < pins_; ++i) {
        // Acquires the reads of who unpinned, which must be over before the bytes change.
        if (pin(index, i).load(std::memory_order_acquire) == cell) return true;
      }
    }
    return false;
  }

  // The pins of all that are active, for a look at them; they go on changing meanwhile.
  std::vector<std::uint64_t> pins_in_order() const {
    std::vector<std::uint64_t> cells;
    for (std::uint32_t index = 0; index < participants_; ++index) {
      const std::uint64_t word = state(index).load(std::memory_order_acquire);
      if (state_of(word) != ParticipantState::kActive) continue;
      const std::uint64_t used = pins_used(index).load(std::memory_order_acquire);
      for (std::uint32_t i = 0; i < used && i < pins_; ++i) {
        const std::uint64_t cell = pin(index, i).load(std::memory_order_relaxed);
        if (cell != 0) cells.push_back(cell);
      }
    }
    std::sort(cells.begin(), cells.end());
    return cells;
  }

 private:
  Word* record(std::uint32_t index) const noexcept {
    return records_ + std::size_t{index} * record_words_;
  }

  void clear_pins(std::uint32_t index) const noexcept {
    const std::uint64_t used = pins_used(index).load(std::memory_order_relaxed);
    for (std::uint32_t i = 0; i < used && i < pins_; ++i) {
      pin(index, i).store(0, std::memory_order_relaxed);
    }
    pins_used(index).store(0, std::memory_order_relaxed);
  }

  Word* records_;
  std::uint32_t participants_;
  std::uint32_t pins_;
  std::uint32_t record_words_;
};

}  // namespace hymcache::region
