// A region that somebody else has written: whatever its bytes are, attaching refuses it or every
// operation on it comes to an end within its memory.
//
// The first byte of an input chooses: bytes as they are; a layout header with a checksum that fits;
// a good region, over whose directory parts of the input are laid (place, length, bytes); or the
// first page as whoever formats or attaches finds it (its claim, and parts laid over the page).
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "hymcache/csrc/error.h"
#include "lookup/csrc/region_directory.h"

namespace hymcache::region {
namespace {

using Input = std::span<const std::uint8_t>;

constexpr std::uint64_t kBytes = 4u << 20;
constexpr std::uint32_t kSlots = 128;

void require(bool holds) {
  if (!holds) std::abort();
}

std::string make_file() {
  static const int fd = ::memfd_create("fuzz", 0);
  require(fd >= 0 && ::ftruncate(fd, kBytes) == 0);
  return "/proc/self/fd/" + std::to_string(fd);
}

void parse(std::span<const std::byte> head) {
  try {
    const RegionLayout layout = RegionLayout::parse(head, kBytes, "fuzz");
    // Each part starts where the one before it ends, and all are inside.
    require(layout.control_offset >= kConfigOffset + layout.config.size());
    require(layout.participants_offset > layout.control_offset);
    require(layout.words_offset > layout.participants_offset);
    require(layout.entries_offset >= layout.words_offset + 8ull * layout.header.slots);
    require(layout.header.data_offset >= layout.entries_offset + 64ull * layout.header.slots);
    require(layout.data_end() <= layout.header.region_bytes);
    require(layout.header.region_bytes <= kBytes);
    const std::string again = layout.encode();
    require(std::memcmp(again.data() + 16, head.data() + 16, again.size() - 16) == 0);
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::kConfig || error.kind() == ErrorKind::kCorrupt);
  }
}

void parse_sealed(Input input) {
  RegionLayout layout;
  if (input.size() < sizeof layout.header) return;
  std::memcpy(&layout.header, input.data(), sizeof layout.header);
  const Input rest = input.subspan(sizeof layout.header);
  layout.config.assign(rest.begin(), rest.end());
  const std::string head = layout.encode();
  parse(std::as_bytes(std::span(head)));
}

RegionOptions options_for(bool writable) {
  RegionOptions options;
  options.path = make_file();
  options.writable = writable;
  return options;
}

// A region with some objects, as bytes up to its data.
const std::vector<std::byte>& good_region() {
  static const std::vector<std::byte> image = [] {
    RegionOptions options = options_for(true);
    options.form = RegionForm{
        .slot_bytes = 16384, .config = "{}", .participants = 4, .pins = 4, .lease_ms = 1000};
    const auto region = std::make_shared<Region>(options);
    require(region->layout().header.slots == kSlots);
    RegionDirectory directory(region, {.name = "fuzz", .maintain = false});
    std::vector<ObjectKey> keys(kSlots / 2);
    for (std::size_t i = 0; i < keys.size(); ++i) keys[i].fill(static_cast<std::uint8_t>(i * 4));
    std::byte content[64] = {};
    const Segment segment{content, sizeof content};
    std::vector<RegionStatus> out(keys.size());
    directory.store(keys, [&](std::size_t) { return std::span(&segment, 1); }, 1, out);
    const std::byte* const from = region->at(0);
    return std::vector(from, from + region->layout().header.data_offset);
  }();
  return image;
}

void lay_over(Input input, std::byte* to, std::uint64_t bytes) {
  while (input.size() > 3) {
    const std::uint64_t place = (input[0] | input[1] << 8) % bytes;
    const std::size_t length = std::min<std::size_t>({input[2], input.size() - 3, bytes - place});
    std::memcpy(to + place, input.data() + 3, length);
    input = input.subspan(3 + length);
  }
}

void use(const std::shared_ptr<Region>& region, Input input) {
  try {
    RegionDirectory directory(region, {.maintain = false});
    std::vector<ObjectKey> keys(16);
    for (std::size_t i = 0; i < keys.size(); ++i) keys[i].fill(static_cast<std::uint8_t>(i * 4));
    if (input.size() >= sizeof(ObjectKey)) std::memcpy(&keys[0], input.data(), sizeof(ObjectKey));
    std::vector<RegionStatus> out(keys.size());
    std::byte into[64];
    const Segment segment{into, sizeof into};
    const SegmentsOf segments = [&](std::size_t) { return std::span(&segment, 1); };
    directory.lookup(keys, out);
    directory.load(keys, segments, out);
    directory.verify(0, kSlots);
    directory.usage();
    directory.entries(0, kSlots);
    directory.participants();
    if (!region->memory().is_writable()) return;
    directory.unpin(directory.pin(keys, out));
    directory.store(keys, segments, 1, out);
    directory.reclaim();
    directory.remove(keys, out);
    directory.clear();
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::kUnavailable);
  }
}

void attach(Input input) {
  const std::vector<std::byte>& image = good_region();
  const auto region = std::make_shared<Region>(options_for(true));
  std::memcpy(region->at(0), image.data(), image.size());
  const RegionLayout& layout = region->layout();
  lay_over(input, region->at(layout.control_offset),
           layout.entries_offset + 64ull * layout.header.slots - layout.control_offset);
  use(std::make_shared<Region>(options_for(false)), input);
  use(region, input);
  std::memcpy(region->at(0), image.data(), image.size());
}

// Whatever the first page holds, whoever comes with a form ends at once: with a region that is
// ready, or a refusal that has changed nothing.
void settle(Input input) {
  constexpr std::size_t kPage = 4096;
  const std::vector<std::byte>& image = good_region();
  std::uint64_t claim = 0;
  if (input.size() < 1 + sizeof claim) return;
  const bool blank = input[0] % 2 == 0;
  std::memcpy(&claim, input.data() + 1, sizeof claim);
  RegionOptions options = options_for(true);
  RegionMemory memory(options.path, 0, 0, false, true);
  memory.map(kPage);
  std::byte* const page = memory.base();
  std::memcpy(page, image.data(), kPage);
  if (blank) std::memset(page, 0, kPage);
  std::memcpy(page + offsetof(MagicHeader, claim), &claim, sizeof claim);
  lay_over(input.subspan(1 + sizeof claim), page, kPage);
  const std::vector<std::byte> before(page, page + kPage);
  options.form = RegionForm{
      .slot_bytes = 16384, .config = "{}", .participants = 4, .pins = 4, .lease_ms = 1000};
  options.wait = std::chrono::milliseconds(0);
  try {
    const Region region(options);
    std::memcpy(&claim, page + offsetof(MagicHeader, claim), sizeof claim);
    require(region.claim() == claim);
    require(region.layout().data_end() <= kBytes);
    // Only what was blank is formatted: nothing but zeros behind the magic header.
    if (region.formatted_here()) {
      require(ClaimWord::state(claim) == ClaimWord::kReady);
      require(std::memcmp(before.data(), "HYMCRGN", 7) == 0 ||
              std::all_of(before.begin() + sizeof(MagicHeader), before.end(),
                          [](std::byte byte) { return byte == std::byte{0}; }));
    } else {
      require(std::memcmp(before.data(), page, kPage) == 0);
    }
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::kConfig || error.kind() == ErrorKind::kCorrupt ||
            error.kind() == ErrorKind::kUnavailable);
    require(std::memcmp(before.data(), page, kPage) == 0);
  }
  std::memcpy(page, image.data(), kPage);
}

}  // namespace
}  // namespace hymcache::region

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace hymcache::region;
  if (size == 0) return 0;
  const Input input = Input(data, size).subspan(1);
  switch (data[0] % 4) {
    case 0:
      parse(std::as_bytes(input));
      break;
    case 1:
      parse_sealed(input);
      break;
    case 2:
      attach(input);
      break;
    default:
      settle(input);
  }
  return 0;
}
