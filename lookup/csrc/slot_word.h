// The word of a slot of a shared region: the one place where its state changes.
//
//   bits   0-1   state          12-19  low bits of the owner's epoch
//          2     referenced     20-31  tag: 12 bits of the key
//          3     held           32-63  generation
//          4-11  owner: the participant that is writing it, has written it, or evicts it
//
//            claim                 commit                  retire
//     free ─────────▶ writing ───────────────▶ valid ─────────────▶ dying
//       ▲               │  abandon, reclaim      ▲  somebody pins it  │ │
//       ├───────────────┘                        └────────────────────┘ │
//       └───────────────────────────────────────────────────────────────┘
//
// The generation grows with every claim, and in no other way. A word of 0 is a slot that was never
// used; one that was used and is free again keeps its generation, so it is not 0, and a search
// goes on behind it: it is a tombstone. docs/region-format.md has the protocol and its proof.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "hymcache/csrc/entry.h"

namespace hymcache::region {

// What the memory of a region is made of, as processes share it.
using SharedWord = std::atomic<std::uint64_t>;
static_assert(sizeof(SharedWord) == 8 && SharedWord::is_always_lock_free);

enum class SlotState : std::uint8_t { kFree = 0, kWriting = 1, kValid = 2, kDying = 3 };

// A participant as slot words name it.
struct Owner {
  std::uint8_t index = 0;
  std::uint32_t epoch = 0;
};

class SlotWord {
 public:
  constexpr SlotWord() = default;
  constexpr explicit SlotWord(std::uint64_t bits) : bits_(bits) {}

  constexpr std::uint64_t bits() const noexcept { return bits_; }
  constexpr bool never_used() const noexcept { return bits_ == 0; }
  constexpr SlotState state() const noexcept { return static_cast<SlotState>(bits_ & 3); }
  constexpr bool referenced() const noexcept { return (bits_ & kReferenced) != 0; }
  constexpr bool held() const noexcept { return (bits_ & kHeld) != 0; }
  constexpr std::uint8_t owner() const noexcept { return static_cast<std::uint8_t>(bits_ >> 4); }
  constexpr std::uint8_t epoch() const noexcept { return static_cast<std::uint8_t>(bits_ >> 12); }
  constexpr std::uint32_t tag() const noexcept { return (bits_ >> 20) & 0xfff; }
  constexpr std::uint32_t generation() const noexcept {
    return static_cast<std::uint32_t>(bits_ >> 32);
  }
  // An object can be found here, though a dying one cannot be pinned any more.
  constexpr bool is_object() const noexcept { return (bits_ & 2) != 0; }

  constexpr SlotWord claimed(std::uint32_t tag, Owner by) const noexcept {
    const std::uint32_t next = generation() + 1 == 0 ? 1 : generation() + 1;
    return SlotWord(std::uint64_t{next} << 32 | std::uint64_t{tag & 0xfff} << 20 |
                    std::uint64_t{by.epoch & 0xff} << 12 | std::uint64_t{by.index} << 4 |
                    static_cast<std::uint64_t>(SlotState::kWriting));
  }
  // New objects count as used: they get one round of the clock to be asked for.
  constexpr SlotWord committed() const noexcept {
    return with_state(SlotState::kValid).with(kReferenced);
  }
  constexpr SlotWord dying(Owner by) const noexcept {
    const std::uint64_t kept = bits_ & ~(std::uint64_t{0xffff} << 4);
    return SlotWord(kept | std::uint64_t{by.epoch & 0xff} << 12 | std::uint64_t{by.index} << 4)
        .with_state(SlotState::kDying);
  }
  constexpr SlotWord revived() const noexcept {
    return with_state(SlotState::kValid).with(kReferenced | kHeld);
  }
  constexpr SlotWord pinned() const noexcept { return with(kReferenced | kHeld); }
  constexpr SlotWord touched() const noexcept { return with(kReferenced); }
  constexpr SlotWord unreferenced() const noexcept { return SlotWord(bits_ & ~kReferenced); }
  constexpr SlotWord freed() const noexcept { return SlotWord(bits_ >> 32 << 32); }

  constexpr bool operator==(const SlotWord&) const = default;

 private:
  static constexpr std::uint64_t kReferenced = 1u << 2;
  static constexpr std::uint64_t kHeld = 1u << 3;

  constexpr SlotWord with(std::uint64_t flags) const noexcept { return SlotWord(bits_ | flags); }
  constexpr SlotWord with_state(SlotState state) const noexcept {
    return SlotWord((bits_ & ~std::uint64_t{3}) | static_cast<std::uint64_t>(state));
  }

  std::uint64_t bits_ = 0;
};

// A key as two little-endian numbers, and what follows from them.
struct KeyWords {
  std::uint64_t first;
  std::uint64_t second;

  static KeyWords of(const ObjectKey& key) noexcept {
    KeyWords words;
    static_assert(sizeof words == sizeof key);
    std::memcpy(&words, key.data(), sizeof words);
    return words;
  }
  ObjectKey key() const noexcept {
    ObjectKey key;
    std::memcpy(key.data(), this, sizeof key);
    return key;
  }
  // Where its search starts: keys are uniform, so they spread over the slots as they are.
  std::uint32_t home(std::uint32_t slots) const noexcept {
    __extension__ using Wide = unsigned __int128;
    return static_cast<std::uint32_t>((Wide{first} * slots) >> 64);
  }
  std::uint32_t tag() const noexcept { return second & 0xfff; }
  bool operator==(const KeyWords&) const = default;
};

// A pin as its participant publishes it; 0 is none.
constexpr std::uint64_t pin_cell(std::uint32_t slot, std::uint32_t generation) noexcept {
  return std::uint64_t{generation} << 32 | (std::uint64_t{slot} + 1);
}

}  // namespace hymcache::region
