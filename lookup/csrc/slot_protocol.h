// How the participants of a shared region find, claim, publish, pin, evict and take back slots.
//
// Every change of a slot is one compare-exchange on its word (slot_word.h); nothing ever waits for
// another participant. Entries and data are written by whoever has the slot in `writing`, and are
// read as under a sequence lock whose counter is the generation. docs/region-format.md has the
// proof sketch; its steps P1 to P6 are named here where they are taken.
//
// Written over a word type, so that the explorer of interleavings runs this very code.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <utility>

#include "lookup/csrc/participant_table.h"
#include "lookup/csrc/slot_word.h"

namespace hymcache::region {

inline constexpr std::uint32_t kEntryWords = 8;
inline constexpr std::uint64_t kEntryHasCrc = 1;

// The entry of a slot but for its key.
struct ObjectInfo {
  std::uint64_t name_space = 0;
  std::uint32_t length = 0;
  std::uint32_t crc32c = 0;
  bool has_crc = false;
  std::uint64_t stored_at_ms = 0;  // Unix time of the writer's clock; for people only
};

struct FoundSlot {
  std::uint32_t slot = 0;
  SlotWord word{};
  ObjectInfo info;
};

enum class ClaimStatus : std::uint8_t { kClaimed, kStoredAlready, kPending, kFull };

struct ClaimedSlot {
  ClaimStatus status = ClaimStatus::kFull;
  std::uint32_t slot = 0;
  SlotWord word{};
  bool evicted = false;  // an older object had to go
};

template <class Word>
class SlotProtocol {
 public:
  struct Memory {
    Word* words;    // one a slot
    Word* entries;  // kEntryWords a slot
    std::uint32_t slots;
    std::uint32_t probe_slots;
  };

  SlotProtocol(const Memory& memory, const ParticipantTable<Word>& participants)
      : memory_(memory),
        participants_(participants),
        window_(std::min(memory.slots, memory.probe_slots)) {}

  std::uint32_t slots() const noexcept { return memory_.slots; }
  SlotWord word(std::uint32_t slot) const noexcept {
    return SlotWord(memory_.words[slot].load(std::memory_order_acquire));
  }

  // ---- finding ----

  struct Search {
    std::optional<FoundSlot> found;  // a valid one if there is any, else one that is dying
    bool pending = false;            // somebody writes this key, or one with its tag
  };

  Search find(KeyWords key) const noexcept {
    Search search;
    for_window(key, std::memory_order_acquire, [&](std::uint32_t slot, SlotWord seen) {
      if (seen.tag() != key.tag()) return true;
      if (seen.state() == SlotState::kWriting) search.pending = true;
      if (!seen.is_object()) return true;
      std::optional<FoundSlot> found = read_entry(slot, seen, key);
      if (!found) return true;
      const bool is_valid = found->word.state() == SlotState::kValid;
      if (is_valid || !search.found) search.found = found;
      return !is_valid;
    });
    return search;
  }

  // The first slot whose tag fits, for a prefetch of its entry; none is `slots()`.
  std::uint32_t first_with_tag(KeyWords key) const noexcept {
    std::uint32_t first = memory_.slots;
    for_window(key, std::memory_order_relaxed, [&](std::uint32_t slot, SlotWord seen) {
      if (seen.tag() != key.tag() || !seen.is_object()) return true;
      first = slot;
      return false;
    });
    return first;
  }

  const Word* word_address(std::uint32_t slot) const noexcept { return memory_.words + slot; }
  const Word* entry_address(std::uint32_t slot) const noexcept { return entry(slot); }

  // P4: true if no byte of the slot was changed since it was found. Asked after the bytes were
  // copied; pairs with the release fence of claim().
  bool is_unchanged(const FoundSlot& found) const noexcept {
    std::atomic_thread_fence(std::memory_order_acquire);
    const SlotWord now(memory_.words[found.slot].load(std::memory_order_relaxed));
    return now.generation() == found.word.generation() && now.is_object();
  }

  // Key and entry of a slot, if it holds an object.
  std::optional<std::pair<KeyWords, FoundSlot>> object_at(std::uint32_t slot) const noexcept {
    const SlotWord seen = word(slot);
    if (!seen.is_object()) return std::nullopt;
    const KeyWords key = read_key(slot);
    FoundSlot found{.slot = slot, .word = seen, .info = read_info(slot)};
    if (!is_unchanged(found)) return std::nullopt;
    return std::pair{key, found};
  }

  void touch(const FoundSlot& found) noexcept {
    if (found.word.referenced() || found.word.state() != SlotState::kValid) return;
    // Lost where the word has changed meanwhile: then somebody else uses it, or it is gone.
    exchange(found.slot, found.word, found.word.touched());
  }

  // ---- storing ----

  // Makes a slot `writing` for this key. P1: no two can both do so for one key.
  ClaimedSlot claim(KeyWords key, Owner owner) noexcept {
    for (int attempt = 0; attempt < kClaimAttempts; ++attempt) {
      const Scan scan = scan_for_claim(key, kNoSlot);
      if (scan.status != ClaimStatus::kClaimed) return {.status = scan.status};
      std::optional<Candidate> candidate = scan.free;
      const bool evict = !candidate;
      if (evict) candidate = evict_in_window(key, owner);
      if (!candidate) return {.status = ClaimStatus::kFull};
      const SlotWord taken = candidate->word.claimed(key.tag(), owner);
      if (!exchange(candidate->slot, candidate->word, taken)) continue;
      // P4: who reads a byte of what is written from here on sees the new generation too; pairs
      // with the acquire fence of is_unchanged().
      std::atomic_thread_fence(std::memory_order_release);
      const ClaimedSlot claimed{ClaimStatus::kClaimed, candidate->slot, taken, evict};
      // P1: of two that claim at once, one at least finds the other's claim here.
      const Scan again = scan_for_claim(key, claimed.slot);
      if (again.status == ClaimStatus::kClaimed) return claimed;
      abandon(claimed);
      return {.status = again.status, .evicted = evict};
    }
    return {.status = ClaimStatus::kPending};
  }

  // The entry of a slot that is claimed; nobody reads it before commit().
  void describe(const ClaimedSlot& claimed, KeyWords key, const ObjectInfo& info) noexcept {
    Word* const words = entry(claimed.slot);
    const std::uint64_t values[kEntryWords] = {key.first,
                                               key.second,
                                               info.name_space,
                                               std::uint64_t{info.crc32c} << 32 | info.length,
                                               info.has_crc ? kEntryHasCrc : 0,
                                               info.stored_at_ms,
                                               0,
                                               0};
    for (std::uint32_t i = 0; i < kEntryWords; ++i) {
      words[i].store(values[i], std::memory_order_relaxed);
    }
  }

  // False once the slot was taken back from a writer that was held for dead.
  bool is_claimed(const ClaimedSlot& claimed) const noexcept {
    return word(claimed.slot) == claimed.word;
  }
  // P2: releases entry and data to whoever acquires the word. False as above; then nothing was
  // published.
  bool commit(const ClaimedSlot& claimed) noexcept {
    return exchange(claimed.slot, claimed.word, claimed.word.committed());
  }
  bool abandon(const ClaimedSlot& claimed) noexcept {
    return exchange(claimed.slot, claimed.word, claimed.word.freed());
  }

  // ---- pinning ----

  // Publishes the pin in `cell`, then makes sure that the object was still there: P3.
  bool pin(const FoundSlot& found, Word& cell) noexcept {
    cell.store(pin_cell(found.slot, found.word.generation()), std::memory_order_release);
    std::uint64_t bits = memory_.words[found.slot].load(std::memory_order_acquire);
    for (int attempt = 0; attempt < kPinAttempts; ++attempt) {
      const SlotWord now(bits);
      if (now.generation() != found.word.generation() || now.state() != SlotState::kValid) break;
      // Also where no bit changes: it is the exchange that orders the cell before a later retire().
      if (memory_.words[found.slot].compare_exchange_strong(
              bits, now.pinned().bits(), std::memory_order_acq_rel, std::memory_order_acquire)) {
        return true;
      }
    }
    unpin(cell);
    return false;
  }
  // Releases the reads of the data to whoever evicts it next: is_pinned().
  static void unpin(Word& cell) noexcept { cell.store(0, std::memory_order_release); }

  // ---- evicting ----

  // Makes a valid slot dying; nothing where it has changed or is pinned.
  std::optional<SlotWord> retire(std::uint32_t slot, SlotWord seen, Owner owner) noexcept {
    const SlotWord dying = seen.dying(owner);
    if (!exchange(slot, seen, dying)) return std::nullopt;
    // P3: without the bit nobody has pinned this object, or the exchange would have failed.
    if (!seen.held() || !participants_.is_pinned(slot, seen.generation())) return dying;
    exchange(slot, dying, seen.revived());
    return std::nullopt;
  }
  bool evict(std::uint32_t slot, SlotWord seen, Owner owner) noexcept {
    const std::optional<SlotWord> dying = retire(slot, seen, owner);
    return dying && exchange(slot, *dying, dying->freed());
  }

  // Frees an object that nobody can use, whoever has it pinned: they find the generation changed.
  bool drop(const FoundSlot& found, Owner owner) noexcept {
    for (int attempt = 0; attempt < kPinAttempts; ++attempt) {
      const SlotWord seen = word(found.slot);
      if (seen.generation() != found.word.generation()) return false;
      if (seen.state() != SlotState::kValid) return false;
      const SlotWord dying = seen.dying(owner);
      if (exchange(found.slot, seen, dying)) return exchange(found.slot, dying, dying.freed());
    }
    return false;
  }

  // One look of the clock at a slot: takes its reference bit, or evicts it.
  bool tick(std::uint32_t slot, Owner owner) noexcept {
    const SlotWord seen = word(slot);
    if (seen.state() != SlotState::kValid) return false;
    if (!seen.referenced()) return evict(slot, seen, owner);
    exchange(slot, seen, seen.unreferenced());
    return false;
  }

  // ---- taking back ----

  // P5: frees a slot whose owner is not there any more; true if it did.
  bool reclaim(std::uint32_t slot) noexcept {
    const SlotWord seen = word(slot);
    if (seen.state() != SlotState::kWriting && seen.state() != SlotState::kDying) return false;
    if (participants_.owns(seen)) return false;
    if (seen.state() == SlotState::kDying && seen.held() &&
        participants_.is_pinned(slot, seen.generation())) {
      return exchange(slot, seen, seen.revived());
    }
    return exchange(slot, seen, seen.freed());
  }

 private:
  static constexpr int kClaimAttempts = 8;
  static constexpr int kPinAttempts = 64;
  static constexpr std::uint32_t kNoSlot = ~0u;

  struct Candidate {
    std::uint32_t slot;
    SlotWord word;
  };
  struct Scan {
    ClaimStatus status = ClaimStatus::kClaimed;
    std::optional<Candidate> free;
  };

  Word* entry(std::uint32_t slot) const noexcept {
    return memory_.entries + std::size_t{slot} * kEntryWords;
  }

  bool exchange(std::uint32_t slot, SlotWord from, SlotWord to) noexcept {
    std::uint64_t expected = from.bits();
    // seq_cst for P1; the rest needs acquire and release.
    return memory_.words[slot].compare_exchange_strong(
        expected, to.bits(), std::memory_order_seq_cst, std::memory_order_relaxed);
  }

  // Visits the slots where the key may be until visit(slot, word) returns false. P6: behind a slot
  // that was never used there is nothing, since no word goes back to 0.
  template <class Visit>
  void for_window(KeyWords key, std::memory_order order, Visit visit) const noexcept {
    std::uint32_t slot = key.home(memory_.slots);
    for (std::uint32_t i = 0; i < window_; ++i) {
      const SlotWord seen(memory_.words[slot].load(order));
      if (!visit(slot, seen) || seen.never_used()) return;
      slot = slot + 1 == memory_.slots ? 0 : slot + 1;
    }
  }

  KeyWords read_key(std::uint32_t slot) const noexcept {
    const Word* const words = entry(slot);
    return {.first = words[0].load(std::memory_order_relaxed),
            .second = words[1].load(std::memory_order_relaxed)};
  }
  ObjectInfo read_info(std::uint32_t slot) const noexcept {
    const Word* const words = entry(slot);
    const std::uint64_t length_crc = words[3].load(std::memory_order_relaxed);
    return {.name_space = words[2].load(std::memory_order_relaxed),
            .length = static_cast<std::uint32_t>(length_crc),
            .crc32c = static_cast<std::uint32_t>(length_crc >> 32),
            .has_crc = (words[4].load(std::memory_order_relaxed) & kEntryHasCrc) != 0,
            .stored_at_ms = words[5].load(std::memory_order_relaxed)};
  }
  std::optional<FoundSlot> read_entry(std::uint32_t slot, SlotWord seen,
                                      KeyWords key) const noexcept {
    if (!(read_key(slot) == key)) return std::nullopt;
    FoundSlot found{.slot = slot, .word = seen, .info = read_info(slot)};
    if (!is_unchanged(found)) return std::nullopt;
    return found;
  }

  // The key is there already, or somebody is at it, or the first slot that is free.
  Scan scan_for_claim(KeyWords key, std::uint32_t except) const noexcept {
    Scan scan;
    for_window(key, std::memory_order_seq_cst, [&](std::uint32_t slot, SlotWord seen) {
      if (slot == except) return true;
      if (seen.state() == SlotState::kFree && !scan.free) scan.free = Candidate{slot, seen};
      if (seen.tag() != key.tag()) return true;
      if (seen.state() == SlotState::kWriting) {
        // Its key may not be there yet, so the tag has to do.
        scan.status = ClaimStatus::kPending;
      } else if (seen.is_object() && read_entry(slot, seen, key)) {
        // One that is dying may yet come back.
        scan.status =
            seen.state() == SlotState::kValid ? ClaimStatus::kStoredAlready : ClaimStatus::kPending;
      }
      return scan.status == ClaimStatus::kClaimed;
    });
    return scan;
  }

  // Twice round the window at most: the first round takes reference bits.
  std::optional<Candidate> evict_in_window(KeyWords key, Owner owner) noexcept {
    const std::uint32_t start = hand_.fetch_add(1, std::memory_order_relaxed) % window_;
    const std::uint32_t home = key.home(memory_.slots);
    for (std::uint32_t i = 0; i < 2 * window_; ++i) {
      const std::uint32_t slot =
          static_cast<std::uint32_t>((std::uint64_t{home} + (start + i) % window_) % memory_.slots);
      const SlotWord seen = word(slot);
      if (seen.state() != SlotState::kValid) continue;
      if (seen.referenced()) {
        exchange(slot, seen, seen.unreferenced());
      } else if (const auto dying = retire(slot, seen, owner)) {
        return Candidate{slot, *dying};
      }
    }
    return std::nullopt;
  }

  Memory memory_;
  ParticipantTable<Word> participants_;
  std::uint32_t window_;
  std::atomic<std::uint32_t> hand_{0};  // this process's; it only spreads where victims are sought
};

}  // namespace hymcache::region
