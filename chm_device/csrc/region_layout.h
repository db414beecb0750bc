// Where everything lies in a shared region; docs/region-format.md, to the last byte.
//
//   0     16     64       + config    + 64
//   | magic | layout | config JSON | control | participants | slot words | entries | data slots
//
// All of it in front of the data slots is mapped by everybody; the data slots start at a multiple
// of 2 MiB, the page of a device-dax, so that they can be left out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace hymcache::region {

inline constexpr std::uint64_t kRegionAlignment = 2u << 20;
inline constexpr std::uint64_t kSlotAlignment = 4096;
inline constexpr std::uint32_t kConfigBytesMax = 64u << 10;
inline constexpr std::uint32_t kParticipantsMax = 256;  // an owner is 8 bits of a slot word
inline constexpr std::uint32_t kPinsMax = 65528;
inline constexpr std::uint32_t kSlotsMax = 1u << 31;
inline constexpr std::uint64_t kSlotBytesMax = std::uint64_t{1} << 31;  // a length is 32 bits
inline constexpr std::uint32_t kLeaseMsMin = 20;
inline constexpr std::uint32_t kLeaseMsMax = 3'600'000;
inline constexpr std::uint32_t kProbeSlots = 32;  // four cache lines of slot words

struct MagicHeader {
  static constexpr char kMagic[7] = {'H', 'Y', 'M', 'C', 'R', 'G', 'N'};
  static constexpr std::uint8_t kVersion = 1;

  char magic[7];
  std::uint8_t version;
  std::uint64_t claim;  // ClaimWord; an atomic of its own
};
static_assert(sizeof(MagicHeader) == 16);

struct LayoutHeader {
  std::uint64_t region_bytes;
  std::uint64_t slot_bytes;  // from one data slot to the next
  std::uint64_t data_offset;
  std::uint32_t slots;
  std::uint32_t config_bytes;
  std::uint32_t lease_ms;
  std::uint16_t participants;
  std::uint16_t pins;
  std::uint16_t probe_slots;
  std::uint16_t reserved;
  std::uint32_t crc32c;  // of the magic's 8 bytes, the layout header up to here, and the JSON
};
static_assert(sizeof(LayoutHeader) == 48);

inline constexpr std::uint64_t kConfigOffset = sizeof(MagicHeader) + sizeof(LayoutHeader);

// Who formats the region, or did; the word of a region that is ready never changes.
//   bits 0-1 state, 2-15 progress of the formatting, 16-63 random number of the one that formats
struct ClaimWord {
  enum State : std::uint64_t { kBlank = 0, kFormatting = 1, kReady = 2 };

  static constexpr std::uint64_t kProgress = 4;
  static constexpr std::uint64_t state(std::uint64_t word) { return word & 3; }
  static constexpr std::uint64_t formatting(std::uint64_t nonce) {
    return nonce << 16 | kFormatting;
  }
  static constexpr std::uint64_t next(std::uint64_t word) {  // formatting goes on
    return (word & ~std::uint64_t{0xffff}) | ((word + kProgress) & 0xfffc) | kFormatting;
  }
  static constexpr std::uint64_t ready(std::uint64_t word) { return word >> 16 << 16 | kReady; }
};

// What a region is formatted with.
struct RegionForm {
  std::uint64_t slot_bytes = 0;
  std::string config;
  std::uint32_t participants = kParticipantsMax;
  std::uint32_t pins = 1016;
  std::uint32_t lease_ms = 10'000;
};

struct RegionLayout {
  LayoutHeader header{};
  std::string config;
  std::uint64_t control_offset = 0;
  std::uint64_t participants_offset = 0;
  std::uint64_t participant_bytes = 0;
  std::uint64_t words_offset = 0;
  std::uint64_t entries_offset = 0;

  std::uint64_t data_end() const noexcept {
    return header.data_offset + header.slots * header.slot_bytes;
  }

  // As many slots as region_bytes have room for. Throws kConfig, naming `place`, where a number of
  // the form is out of range or there is no room for a slot.
  static RegionLayout plan(const RegionForm& form, std::uint64_t region_bytes,
                           const std::string& place);

  // Of the first bytes of a region that is ready. Throws kConfig where they are of another version
  // or not a region's, kCorrupt where they contradict themselves or `available_bytes`.
  static RegionLayout parse(std::span<const std::byte> head, std::uint64_t available_bytes,
                            const std::string& place);

  // Magic (with claim 0), layout header and JSON.
  std::string encode() const;

 private:
  void place_parts();
};

// The first bytes that parse() may need.
inline constexpr std::uint64_t kHeadBytesMax = kConfigOffset + kConfigBytesMax;

}  // namespace hymcache::region
