#include "chm_device/csrc/region.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>

#include "hymcache/csrc/error.h"

namespace hymcache::region {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr std::uint64_t kBlankBytes = 4096;
constexpr std::chrono::milliseconds kPoll{2};

std::uint64_t random_nonce() {
  std::random_device random;
  return (std::uint64_t{random()} << 32 | random()) >> 16;
}

bool all_zero(const std::byte* from, std::uint64_t bytes) {
  return std::all_of(from, from + bytes, [](std::byte byte) { return byte == std::byte{0}; });
}

}  // namespace

Region::Region(const RegionOptions& options)
    : options_(options),
      memory_(options.path, options.offset, options.bytes, options.form.has_value(),
              options.writable, options.sync_to_disk) {
  memory_.map(kRegionAlignment);
  if (memory_.mapped_bytes() < kBlankBytes) {
    throw Error(ErrorKind::kConfig, memory_.place() + ": " +
                                        std::to_string(memory_.available_bytes()) +
                                        " bytes are too few for a region");
  }
  if (memory_.is_writable()) memory_.reserve(kBlankBytes);  // it is looked at now
  settle();
  const std::uint64_t data_end =
      (layout_.data_end() + kRegionAlignment - 1) / kRegionAlignment * kRegionAlignment;
  memory_.map(options.map_data ? data_end : layout_.header.data_offset);
  if (options.prefault) memory_.prefault();
}

std::atomic<std::uint64_t>& Region::claim_word() const noexcept {
  return *reinterpret_cast<std::atomic<std::uint64_t>*>(memory_.base() +
                                                        offsetof(MagicHeader, claim));
}

bool Region::is_unchanged() const noexcept {
  return claim_word().load(std::memory_order_relaxed) == claim_;
}

void Region::require_unchanged() const {
  if (is_unchanged()) return;
  throw Error(ErrorKind::kUnavailable,
              memory_.place() + ": the region was formatted anew; restart this process");
}

// Nothing is there but perhaps our own magic, which a claim that was broken off may have left.
bool Region::is_blank() const noexcept {
  const std::byte* const head = memory_.base();
  const bool ours = std::memcmp(head, MagicHeader::kMagic, sizeof MagicHeader::kMagic) == 0;
  if (ours) return true;
  return all_zero(head, offsetof(MagicHeader, claim)) &&
         all_zero(head + sizeof(MagicHeader), kBlankBytes - sizeof(MagicHeader));
}

void Region::settle() {
  const auto deadline = SteadyClock::now() + options_.wait;
  std::uint64_t watched = 0;
  auto watched_since = SteadyClock::now();
  bool force = options_.force;
  for (;;) {
    const std::uint64_t claim = claim_word().load(std::memory_order_acquire);
    const auto now = SteadyClock::now();
    if (claim != watched) {
      watched = claim;
      watched_since = now;
    }
    const std::uint64_t state = ClaimWord::state(claim);
    const bool stands_still = now - watched_since >= kTakeOver;
    if (force) {
      if (!options_.form) throw Error(ErrorKind::kConfig, memory_.place() + ": nothing to format");
      force = !format(claim);
    } else if (state == ClaimWord::kFormatting && is_blank() && !(stands_still && options_.form)) {
      if (now >= deadline) {
        throw Error(ErrorKind::kUnavailable,
                    memory_.place() +
                        ": another process has begun to format it and does not end; "
                        "try again, or: hymcache region format --force");
      }
      std::this_thread::sleep_for(kPoll);
    } else if (state == ClaimWord::kReady || !is_blank()) {
      const std::span<const std::byte> head(memory_.base(),
                                            std::min(kHeadBytesMax, memory_.mapped_bytes()));
      layout_ = RegionLayout::parse(head, memory_.available_bytes(), memory_.place());
      claim_ = claim;
      return;
    } else {
      format_if_blank(claim);
    }
  }
}

void Region::format_if_blank(std::uint64_t claim) {
  if (!options_.form) {
    throw Error(ErrorKind::kConfig,
                memory_.place() +
                    ": is not formatted; start an engine on it, or: hymcache region "
                    "format");
  }
  formatted_here_ = format(claim);
}

// The regions that lie in front of this one, each behind the other, end in front of it: a blank
// first page may as well be the inside of somebody's data slot. Throws kConfig.
void Region::require_room() const {
  for (std::uint64_t at = 0; at < options_.offset;) {
    const std::vector<std::byte> head = memory_.head_at(at, kHeadBytesMax);
    std::uint64_t bytes = 0;
    try {
      bytes = RegionLayout::parse(head, ~std::uint64_t{0}, memory_.place()).header.region_bytes;
    } catch (const Error&) {
      return;  // no region, so nothing is known of what follows
    }
    if (bytes > options_.offset - at) {
      throw Error(ErrorKind::kConfig,
                  memory_.place() + ": lies inside the region at " + std::to_string(at) +
                      ", which ends at " + std::to_string(at + bytes) +
                      "; name an offset behind it, or give each region its size");
    }
    at += (bytes + kRegionAlignment - 1) / kRegionAlignment * kRegionAlignment;
  }
}

// False where another was faster; then nothing of the other's was touched, unless this process
// stood still for kTakeOver in the middle of a step.
bool Region::format(std::uint64_t claim) {
  constexpr std::uint64_t kStepBytes = 256u << 10;
  if (!memory_.is_writable()) {
    throw Error(ErrorKind::kConfig, memory_.place() + ": is not formatted, and open for reading");
  }
  const RegionLayout planned =
      RegionLayout::plan(*options_.form, memory_.available_bytes(), memory_.place());
  std::uint64_t mine = ClaimWord::formatting(random_nonce());
  require_room();
  memory_.reserve(
      memory_.available_bytes());  // before the claim, which must not stand still for so long
  if (!claim_word().compare_exchange_strong(claim, mine, std::memory_order_acq_rel)) return false;
  memory_.map(planned.header.data_offset);
  const auto go_on = [&](std::uint64_t next) {
    std::uint64_t expected = mine;
    mine = next;
    return claim_word().compare_exchange_strong(expected, next, std::memory_order_acq_rel);
  };
  const std::string head = planned.encode();
  // The magic first: whoever takes over knows by it that nothing else was here.
  std::memcpy(memory_.base(), head.data(), offsetof(MagicHeader, claim));
  for (std::uint64_t at = sizeof(MagicHeader); at < planned.header.data_offset; at += kStepBytes) {
    if (!go_on(ClaimWord::next(mine))) return false;
    std::memset(memory_.base() + at, 0, std::min(kStepBytes, planned.header.data_offset - at));
  }
  if (!go_on(ClaimWord::next(mine))) return false;
  std::memcpy(memory_.base() + sizeof(MagicHeader), head.data() + sizeof(MagicHeader),
              head.size() - sizeof(MagicHeader));
  // In steps too: a slow disk must not look like a death.
  for (std::uint64_t at = 0; at < planned.header.data_offset; at += kStepBytes) {
    memory_.sync(at, std::min(kStepBytes, planned.header.data_offset - at));
    if (!go_on(ClaimWord::next(mine))) return false;
  }
  // Releases all of it to whoever acquires `ready`.
  if (!go_on(ClaimWord::ready(mine))) return false;
  memory_.sync(0, kBlankBytes);
  formatted_here_ = true;
  return true;
}

}  // namespace hymcache::region
