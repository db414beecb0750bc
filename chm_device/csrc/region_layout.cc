#include "chm_device/csrc/region_layout.h"

#include <algorithm>
#include <cstring>

#include "hymcache/csrc/error.h"
#include "transport/csrc/crc32c.h"

namespace hymcache::region {
namespace {

constexpr std::uint64_t kLineBytes = 64;
constexpr std::uint64_t kControlBytes = 64;
constexpr std::uint64_t kRecordHeaderBytes = 64;
constexpr std::uint64_t kPinBytes = 8;
constexpr std::uint64_t kWordBytes = 8;
constexpr std::uint64_t kEntryBytes = 64;

constexpr std::uint64_t round_up(std::uint64_t bytes, std::uint64_t to) {
  return (bytes + to - 1) / to * to;
}

[[noreturn]] void refuse(const std::string& place, const std::string& what) {
  throw Error(ErrorKind::kConfig, place + ": " + what);
}

void check_range(const std::string& place, const char* name, std::uint64_t value,
                 std::uint64_t least, std::uint64_t most) {
  if (value >= least && value <= most) return;
  refuse(place, std::string(name) + " " + std::to_string(value) + " is out of range; write " +
                    std::to_string(least) + " to " + std::to_string(most));
}

std::uint32_t header_crc(const MagicHeader& magic, const LayoutHeader& header,
                         std::string_view config) {
  std::uint32_t crc = crc32c(0, &magic, offsetof(MagicHeader, claim));
  crc = crc32c(crc, &header, offsetof(LayoutHeader, crc32c));
  return crc32c(crc, config.data(), config.size());
}

MagicHeader our_magic() {
  MagicHeader magic{};
  std::memcpy(magic.magic, MagicHeader::kMagic, sizeof magic.magic);
  magic.version = MagicHeader::kVersion;
  return magic;
}

// What is wrong with the numbers of a header; empty where nothing is.
std::string fault_of(const LayoutHeader& header) {
  const auto outside = [](std::uint64_t value, std::uint64_t least, std::uint64_t most) {
    return value < least || value > most;
  };
  if (outside(header.slots, 1, kSlotsMax)) return "slots";
  if (outside(header.slot_bytes, 1, kSlotBytesMax) || header.slot_bytes % kSlotAlignment != 0) {
    return "slot_bytes";
  }
  if (header.config_bytes > kConfigBytesMax) return "config_bytes";
  if (outside(header.lease_ms, kLeaseMsMin, kLeaseMsMax)) return "lease_ms";
  if (outside(header.participants, 1, kParticipantsMax)) return "participants";
  if (outside(header.pins, 1, kPinsMax)) return "pins";
  if (outside(header.probe_slots, 1, 4096)) return "probe_slots";
  if (header.reserved != 0) return "reserved bytes";
  if (header.data_offset % kRegionAlignment != 0) return "data_offset";
  return "";
}

}  // namespace

void RegionLayout::place_parts() {
  control_offset = round_up(kConfigOffset + header.config_bytes, kLineBytes);
  participants_offset = control_offset + kControlBytes;
  participant_bytes = round_up(kRecordHeaderBytes + kPinBytes * header.pins, kLineBytes);
  words_offset = participants_offset + participant_bytes * header.participants;
  entries_offset = round_up(words_offset + kWordBytes * header.slots, kLineBytes);
}

RegionLayout RegionLayout::plan(const RegionForm& form, std::uint64_t region_bytes,
                                const std::string& place) {
  check_range(place, "slot_bytes", form.slot_bytes, 1, kSlotBytesMax);
  check_range(place, "participants", form.participants, 1, kParticipantsMax);
  check_range(place, "pins", form.pins, 1, kPinsMax);
  check_range(place, "lease_ms", form.lease_ms, kLeaseMsMin, kLeaseMsMax);
  check_range(place, "bytes of the configuration", form.config.size(), 0, kConfigBytesMax);
  RegionLayout layout;
  layout.config = form.config;
  LayoutHeader& header = layout.header;
  header.region_bytes = region_bytes;
  header.slot_bytes = round_up(form.slot_bytes, kSlotAlignment);
  header.config_bytes = static_cast<std::uint32_t>(form.config.size());
  header.lease_ms = form.lease_ms;
  header.participants = static_cast<std::uint16_t>(form.participants);
  header.pins = static_cast<std::uint16_t>(form.pins);
  header.probe_slots = kProbeSlots;
  const auto data_offset_for = [&](std::uint64_t slots) {
    header.slots = static_cast<std::uint32_t>(slots);
    layout.place_parts();
    return round_up(layout.entries_offset + kEntryBytes * slots, kRegionAlignment);
  };
  // The directory grows with the slots, so the first guess may be too many by a few.
  const std::uint64_t fixed = data_offset_for(0);
  std::uint64_t slots =
      region_bytes > fixed
          ? std::min<std::uint64_t>((region_bytes - fixed) / header.slot_bytes, kSlotsMax)
          : 0;
  while (slots > 0) {
    const std::uint64_t data_offset = data_offset_for(slots);
    if (data_offset < region_bytes && (region_bytes - data_offset) / header.slot_bytes >= slots) {
      header.data_offset = data_offset;
      return layout;
    }
    const std::uint64_t room = region_bytes > data_offset ? region_bytes - data_offset : 0;
    slots = std::min(slots - 1, room / header.slot_bytes);
  }
  refuse(place, std::to_string(region_bytes) + " bytes have no room for a slot of " +
                    std::to_string(header.slot_bytes) + " behind a directory of " +
                    std::to_string(fixed) + "; give it more, or fewer participants and pins");
}

RegionLayout RegionLayout::parse(std::span<const std::byte> head, std::uint64_t available_bytes,
                                 const std::string& place) {
  MagicHeader magic;
  RegionLayout layout;
  if (head.size() < kConfigOffset) refuse(place, "is too short for a region");
  std::memcpy(&magic, head.data(), sizeof magic);
  std::memcpy(&layout.header, head.data() + sizeof magic, sizeof layout.header);
  if (std::memcmp(magic.magic, MagicHeader::kMagic, sizeof magic.magic) != 0) {
    refuse(place,
           "holds something that is not a region of HyMCache; to give it up: hymcache "
           "region format --force");
  }
  if (magic.version != MagicHeader::kVersion) {
    refuse(place, "has region format " + std::to_string(magic.version) + ", this is " +
                      std::to_string(MagicHeader::kVersion) +
                      "; use the same release everywhere, or give it up: hymcache region format "
                      "--force");
  }
  const LayoutHeader& header = layout.header;
  const auto corrupt = [&](const std::string& what) {
    throw Error(ErrorKind::kCorrupt, place + ": its header is damaged (" + what +
                                         "); format it anew: hymcache region format --force");
  };
  const std::string fault = fault_of(header);
  if (!fault.empty()) corrupt(fault);
  if (head.size() < kConfigOffset + header.config_bytes) corrupt("config_bytes");
  layout.config.assign(reinterpret_cast<const char*>(head.data()) + kConfigOffset,
                       header.config_bytes);
  if (header_crc(magic, header, layout.config) != header.crc32c) corrupt("crc32c");
  layout.place_parts();
  if (layout.entries_offset + kEntryBytes * header.slots > header.data_offset ||
      header.data_offset >= header.region_bytes ||
      (header.region_bytes - header.data_offset) / header.slot_bytes < header.slots) {
    corrupt("the parts overlap");
  }
  if (header.region_bytes > available_bytes) {
    refuse(place, "is a region of " + std::to_string(header.region_bytes) + " bytes, of which " +
                      std::to_string(available_bytes) +
                      " are here; give the size it was formatted "
                      "with, on every host");
  }
  return layout;
}

std::string RegionLayout::encode() const {
  const MagicHeader magic = our_magic();
  LayoutHeader sealed = header;
  sealed.crc32c = header_crc(magic, sealed, config);
  std::string bytes(reinterpret_cast<const char*>(&magic), sizeof magic);
  bytes.append(reinterpret_cast<const char*>(&sealed), sizeof sealed);
  return bytes + config;
}

}  // namespace hymcache::region
