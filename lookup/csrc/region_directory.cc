#include "lookup/csrc/region_directory.h"

#include <algorithm>
#include <chrono>
#include <exception>

#include "hymcache/csrc/error.h"
#include "lookup/csrc/object_checksum.h"
#include "lookup/csrc/segment_cursor.h"

namespace hymcache::region {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;
// A writer that was held for dead and comes back writes no more than this into a slot of others.
constexpr std::uint64_t kStoreStepBytes = 1u << 20;
constexpr std::size_t kPrefetchKeys = 64;
constexpr int kLoadAttempts = 16;

SharedWord* words_at(const Region& region, std::uint64_t offset) {
  return reinterpret_cast<SharedWord*>(region.at(offset));
}

ParticipantTable<SharedWord> table_of(const Region& region) {
  const RegionLayout& layout = region.layout();
  return {words_at(region, layout.participants_offset), layout.header.participants,
          layout.header.pins, static_cast<std::uint32_t>(layout.participant_bytes / 8)};
}

RegionDirectory::Protocol::Memory slots_of(const Region& region) {
  const RegionLayout& layout = region.layout();
  return {.words = words_at(region, layout.words_offset),
          .entries = words_at(region, layout.entries_offset),
          .slots = layout.header.slots,
          .probe_slots = layout.header.probe_slots};
}

std::uint64_t unix_ms() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(now).count());
}

template <class T>
void count(std::atomic<T>& counter, T more = 1) {
  counter.fetch_add(more, kRelaxed);
}

}  // namespace

// A pin for as long as a load takes.
class RegionDirectory::Pinned {
 public:
  Pinned(RegionDirectory& directory, const FoundSlot& found) : member_(directory.member_.get()) {
    if (member_ == nullptr) return;
    cell_ = member_->take_cell();
    holds_ = cell_.word != nullptr && directory.protocol_.pin(found, *cell_.word);
  }
  ~Pinned() {
    if (cell_.word != nullptr) member_->give_back(cell_);
  }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

  bool holds() const noexcept { return holds_; }
  bool was_refused() const noexcept { return cell_.word != nullptr && !holds_; }

 private:
  RegionMember* member_;
  RegionMember::Cell cell_;
  bool holds_ = false;
};

RegionDirectory::RegionDirectory(std::shared_ptr<Region> region, DirectoryOptions options)
    : region_(std::move(region)),
      options_(std::move(options)),
      table_(table_of(*region_)),
      protocol_(slots_of(*region_), table_),
      hand_(words_at(*region_, region_->layout().control_offset)) {
  if (!(0 < options_.low_watermark && options_.low_watermark <= options_.high_watermark &&
        options_.high_watermark <= 1)) {
    throw Error(ErrorKind::kConfig, "watermarks must be 0 < low <= high <= 1");
  }
  if (!region_->memory().is_writable()) return;
  member_ = std::make_unique<RegionMember>(
      table_, options_.name, std::chrono::milliseconds(region_->layout().header.lease_ms),
      region_->memory().place());
  if (options_.maintain) maintaining_ = std::thread([this] { maintain(); });
}

RegionDirectory::~RegionDirectory() { close(); }

void RegionDirectory::close() {
  {
    const std::lock_guard lock(wake_mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  const std::unique_lock alone(open_mutex_);
  if (!std::exchange(open_, false)) return;
  if (maintaining_.joinable()) maintaining_.join();
  // After that, its place in the table may be that of somebody else with the same epoch.
  if (member_ && region_->is_unchanged()) member_->leave();
}

RegionDirectory::Operation RegionDirectory::begin() {
  Operation operation(open_mutex_);
  if (!open_) {
    throw Error(ErrorKind::kUnavailable, region_->memory().place() + ": this directory is closed");
  }
  region_->require_unchanged();
  return operation;
}

RegionMember& RegionDirectory::member() {
  if (member_) return *member_;
  throw Error(ErrorKind::kConfig, region_->memory().place() + ": is open for reading only");
}

int RegionDirectory::participant() {
  const Operation operation = begin();
  return member_ ? member_->owner().index : -1;
}

void RegionDirectory::lookup(std::span<const ObjectKey> keys, std::span<RegionStatus> out) {
  const Operation operation = begin();
  std::uint64_t hits = 0;
  for (std::size_t first = 0; first < keys.size(); first += kPrefetchKeys) {
    const std::size_t end = std::min(keys.size(), first + kPrefetchKeys);
    // Waits for memory twice a batch, not twice a key.
    for (std::size_t i = first; i < end; ++i) {
      const std::uint32_t home = KeyWords::of(keys[i]).home(protocol_.slots());
      __builtin_prefetch(protocol_.word_address(home));
    }
    for (std::size_t i = first; i < end; ++i) {
      const std::uint32_t slot = protocol_.first_with_tag(KeyWords::of(keys[i]));
      if (slot < protocol_.slots()) __builtin_prefetch(protocol_.entry_address(slot));
    }
    for (std::size_t i = first; i < end; ++i) {
      const Protocol::Search search = protocol_.find(KeyWords::of(keys[i]));
      const bool valid = search.found && search.found->word.state() == SlotState::kValid;
      hits += valid;
      out[i] = valid            ? RegionStatus::kOk
               : search.pending ? RegionStatus::kPending
                                : RegionStatus::kMiss;
    }
  }
  count(stats_.lookups);
  count(stats_.lookup_keys, std::uint64_t{keys.size()});
  count(stats_.lookup_hits, hits);
}

void RegionDirectory::touch(std::span<const ObjectKey> keys) {
  const Operation operation = begin();
  member();
  for (const ObjectKey& key : keys) {
    const Protocol::Search search = protocol_.find(KeyWords::of(key));
    if (search.found) protocol_.touch(*search.found);
  }
}

void RegionDirectory::for_each_in_threads(std::size_t count,
                                          const std::function<void(std::size_t)>& visit) {
  std::atomic<std::size_t> next{0};
  std::mutex failure_mutex;
  std::exception_ptr failure;
  const auto work = [&] {
    try {
      for (std::size_t i = next++; i < count; i = next++) visit(i);
    } catch (...) {
      next = count;  // what has not begun is left
      const std::lock_guard lock(failure_mutex);
      if (!failure) failure = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> helpers;
    const std::size_t wanted = std::min<std::size_t>(options_.threads, count);
    for (std::size_t i = 1; i < wanted; ++i) helpers.emplace_back(work);
    work();
  }
  if (failure) std::rethrow_exception(failure);
}

void RegionDirectory::store(std::span<const ObjectKey> keys, const SegmentsOf& from,
                            std::uint64_t name_space, std::span<RegionStatus> out) {
  const Operation operation = begin();
  const Owner owner = member().owner();
  if (!region_->has_data()) throw Error(ErrorKind::kConfig, "the data slots are not mapped");
  for_each_in_threads(keys.size(), [&](std::size_t i) {
    out[i] = store_one(keys[i], from(i), name_space, owner);
    count(stats_.stored[static_cast<std::size_t>(out[i])]);
  });
}

RegionStatus RegionDirectory::store_one(const ObjectKey& key, std::span<const Segment> from,
                                        std::uint64_t name_space, Owner owner) {
  const std::uint64_t bytes = bytes_of(from);
  if (bytes == 0 || bytes > region_->layout().header.slot_bytes) return RegionStatus::kWrongSize;
  const KeyWords words = KeyWords::of(key);
  const ClaimedSlot claimed = protocol_.claim(words, owner);
  if (claimed.evicted) count(stats_.evicted_for_room);
  switch (claimed.status) {
    case ClaimStatus::kClaimed:
      break;
    case ClaimStatus::kStoredAlready:
      return RegionStatus::kStoredAlready;
    case ClaimStatus::kPending:
      return RegionStatus::kPending;
    case ClaimStatus::kFull:
      return RegionStatus::kFull;
  }
  try {
    return publish(claimed, words, from, name_space);
  } catch (...) {
    // Its owner lives, so nobody else would ever take it back. Once it is committed this does
    // nothing.
    protocol_.abandon(claimed);
    throw;
  }
}

RegionStatus RegionDirectory::publish(const ClaimedSlot& claimed, KeyWords key,
                                      std::span<const Segment> from, std::uint64_t name_space) {
  const std::uint64_t bytes = bytes_of(from);
  const auto length = static_cast<std::uint32_t>(bytes);
  std::uint32_t crc = checksum_seed(key, claimed.word.generation(), length);
  if (!fill(claimed, from, options_.checksums ? &crc : nullptr)) return RegionStatus::kLost;
  const ObjectInfo info{.name_space = name_space,
                        .length = length,
                        .crc32c = crc,
                        .has_crc = options_.checksums,
                        .stored_at_ms = unix_ms()};
  protocol_.describe(claimed, key, info);
  // Bytes and entry in front of the word: a word on the disk never speaks of what is not there.
  const bool durable = region_->is_durable();
  if (durable) sync(protocol_.entry_address(claimed.slot), kEntryWords);
  if (!protocol_.commit(claimed)) return RegionStatus::kLost;
  if (durable) sync(protocol_.word_address(claimed.slot), 1);
  count(stats_.stored_bytes, bytes);
  return RegionStatus::kOk;
}

void RegionDirectory::sync(const SharedWord* from, std::uint64_t words) {
  const auto* const place = reinterpret_cast<const std::byte*>(from);
  region_->memory().sync(static_cast<std::uint64_t>(place - region_->at(0)),
                         words * sizeof(SharedWord));
}

// False once the slot is not ours any more.
bool RegionDirectory::fill(const ClaimedSlot& claimed, std::span<const Segment> from,
                           std::uint32_t* crc) {
  std::byte* const to = region_->slot(claimed.slot);
  SegmentCursor cursor(from);
  std::uint64_t at = 0;
  for (;;) {
    const std::span<const Segment> step = cursor.take(kStoreStepBytes);
    if (step.empty()) break;
    if (!protocol_.is_claimed(claimed)) return false;
    copy_gather(to + at, step, crc);
    at += bytes_of(step);
  }
  if (region_->is_durable()) {
    region_->memory().sync(
        region_->layout().header.data_offset + claimed.slot * region_->layout().header.slot_bytes,
        at);
  }
  // The last step may have taken longer than the lease, and the entry is written next.
  return protocol_.is_claimed(claimed);
}

void RegionDirectory::load(std::span<const ObjectKey> keys, const SegmentsOf& into,
                           std::span<RegionStatus> out) {
  const Operation operation = begin();
  if (member_) member_->owner();  // joins anew if need be: else nothing could be pinned
  if (!region_->has_data()) throw Error(ErrorKind::kConfig, "the data slots are not mapped");
  for_each_in_threads(keys.size(), [&](std::size_t i) {
    out[i] = load_one(keys[i], into(i));
    count(stats_.loaded[static_cast<std::size_t>(out[i])]);
  });
}

RegionStatus RegionDirectory::load_one(const ObjectKey& key, std::span<const Segment> into) {
  for (int attempt = 1;; ++attempt) {
    const Protocol::Search search = protocol_.find(KeyWords::of(key));
    if (!search.found) return RegionStatus::kMiss;
    const Pinned pinned(*this, *search.found);
    if (!pinned.was_refused() || attempt == kLoadAttempts) {
      // Where it is not pinned the generation alone decides, after the copy.
      return load_found(key, *search.found, into);
    }
    // Somebody is about to evict it, and may yet find that another has it pinned.
    std::this_thread::yield();
  }
}

RegionStatus RegionDirectory::load_found(const ObjectKey& key, const FoundSlot& found,
                                         std::span<const Segment> into) {
  const std::uint32_t length = found.info.length;
  if (length != bytes_of(into) || length > region_->layout().header.slot_bytes) {
    return RegionStatus::kWrongSize;
  }
  const bool check = options_.checksums && found.info.has_crc;
  std::uint32_t crc = checksum_seed(KeyWords::of(key), found.word.generation(), length);
  copy_scatter(into, region_->slot(found.slot), check ? &crc : nullptr);
  if (!protocol_.is_unchanged(found)) {
    count(stats_.loads_overtaken);
    return RegionStatus::kMiss;
  }
  if (check && crc != found.info.crc32c) {
    drop(found);
    return RegionStatus::kCorrupt;
  }
  count(stats_.loaded_bytes, std::uint64_t{length});
  return RegionStatus::kOk;
}

// A corrupt object goes, whoever has it pinned: nobody can use it.
void RegionDirectory::drop(const FoundSlot& found) {
  if (member_) protocol_.drop(found, member_->last_owner());
}

RegionDirectory::Ticket RegionDirectory::pin(std::span<const ObjectKey> keys,
                                             std::span<RegionStatus> out) {
  const Operation operation = begin();
  RegionMember& me = member();
  std::vector<RegionMember::Cell> cells;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    out[i] = RegionStatus::kMiss;
    const Protocol::Search search = protocol_.find(KeyWords::of(keys[i]));
    if (!search.found) {
      count(stats_.pins_missed);
      continue;
    }
    const RegionMember::Cell cell = me.take_cell();
    if (cell.word == nullptr) {
      out[i] = RegionStatus::kFull;
      count(stats_.pins_full);
    } else if (protocol_.pin(*search.found, *cell.word)) {
      out[i] = RegionStatus::kOk;
      cells.push_back(cell);
      count(stats_.pins);
    } else {
      me.give_back(cell);
      count(stats_.pins_missed);
    }
  }
  const std::lock_guard lock(tickets_mutex_);
  tickets_.emplace(++last_ticket_, std::move(cells));
  return last_ticket_;
}

void RegionDirectory::unpin(Ticket ticket) {
  const Operation operation = begin();
  std::vector<RegionMember::Cell> cells;
  {
    const std::lock_guard lock(tickets_mutex_);
    const auto found = tickets_.find(ticket);
    if (found == tickets_.end()) {
      throw Error(ErrorKind::kConfig, "there is no pin with ticket " + std::to_string(ticket));
    }
    cells = std::move(found->second);
    tickets_.erase(found);
  }
  for (const RegionMember::Cell& cell : cells) member().give_back(cell);
}

void RegionDirectory::remove(std::span<const ObjectKey> keys, std::span<RegionStatus> out) {
  const Operation operation = begin();
  const Owner owner = member().owner();
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const Protocol::Search search = protocol_.find(KeyWords::of(keys[i]));
    if (!search.found) {
      out[i] = RegionStatus::kMiss;
      continue;
    }
    const FoundSlot& found = *search.found;
    const bool gone =
        found.word.state() == SlotState::kValid && protocol_.evict(found.slot, found.word, owner);
    if (gone) count(stats_.removed);
    out[i] = gone ? RegionStatus::kOk : RegionStatus::kFull;
  }
}

std::uint64_t RegionDirectory::clear() {
  const Operation operation = begin();
  const Owner owner = member().owner();
  std::uint64_t removed = 0;
  for (std::uint32_t slot = 0; slot < protocol_.slots(); ++slot) {
    const SlotWord seen = protocol_.word(slot);
    if (seen.state() == SlotState::kValid) removed += protocol_.evict(slot, seen, owner);
  }
  count(stats_.removed, removed);
  return removed;
}

}  // namespace hymcache::region
