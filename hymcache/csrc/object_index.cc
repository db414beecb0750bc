#include "hymcache/csrc/object_index.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <string>

#include "hymcache/csrc/error.h"

namespace hymcache {
namespace {

constexpr std::uint32_t kCapacityMin = 16;

// At most 4 of 5 words are used: an absent key costs 13 words on average, which share a cache line
// or two. Tables grow by half, so that 5 to 7.5 bytes of them go with a row.
constexpr bool too_full(std::uint32_t used, std::uint32_t capacity) noexcept {
  return std::uint64_t{used} * 5 > std::uint64_t{capacity} * 4;
}

std::array<std::uint64_t, 2> random_seed() {
  std::random_device random;
  const auto word = [&random] { return (std::uint64_t{random()} << 32) | random(); };
  return {word(), word()};
}

std::uint32_t checked_rows_max(std::uint32_t rows_max) {
  if (rows_max >= 1 && rows_max <= ObjectIndex::kRowsLimit) return rows_max;
  throw Error(ErrorKind::kConfig, "an index must hold from 1 to " +
                                      std::to_string(ObjectIndex::kRowsLimit) + " objects, not " +
                                      std::to_string(rows_max));
}

// SipHash-1-3 (Aumasson and Bernstein) of 16 bytes, without the block of the length, which is
// always the same. A hash that anyone can compute would let a peer fill one table, or one run of
// slots, by its choice of keys.
class SipHash {
 public:
  explicit SipHash(const std::array<std::uint64_t, 2>& seed) noexcept
      : a_(seed[0] ^ 0x736F6D6570736575),
        b_(seed[1] ^ 0x646F72616E646F6D),
        c_(seed[0] ^ 0x6C7967656E657261),
        d_(seed[1] ^ 0x7465646279746573) {}

  std::uint64_t hash(std::uint64_t first, std::uint64_t second) noexcept {
    for (const std::uint64_t word : {first, second}) {
      d_ ^= word;
      round();
      a_ ^= word;
    }
    c_ ^= 0xFF;
    for (int i = 0; i < 3; ++i) round();
    return a_ ^ b_ ^ c_ ^ d_;
  }

 private:
  void round() noexcept {
    a_ += b_;
    b_ = std::rotl(b_, 13) ^ a_;
    a_ = std::rotl(a_, 32);
    c_ += d_;
    d_ = std::rotl(d_, 16) ^ c_;
    a_ += d_;
    d_ = std::rotl(d_, 21) ^ a_;
    c_ += b_;
    b_ = std::rotl(b_, 17) ^ c_;
    c_ = std::rotl(c_, 32);
  }

  std::uint64_t a_, b_, c_, d_;
};

}  // namespace

ObjectIndex::ObjectIndex(std::uint32_t rows_max) : ObjectIndex(rows_max, random_seed()) {}

ObjectIndex::ObjectIndex(std::uint32_t rows_max, std::array<std::uint64_t, 2> seed)
    : rows_max_(checked_rows_max(rows_max)),
      row_mask_((1u << std::bit_width(rows_max)) - 1),
      seed_(seed) {}

ObjectIndex::~ObjectIndex() = default;

void ObjectIndex::ChunkDeleter::operator()(Entry* rows) const noexcept { std::free(rows); }

ObjectIndex::Place ObjectIndex::place_of(const ObjectKey& key) const noexcept {
  std::array<std::uint64_t, 2> words;
  static_assert(sizeof words == sizeof key);
  std::memcpy(words.data(), key.data(), sizeof words);
  const std::uint64_t hash = SipHash(seed_).hash(words[0], words[1]);
  return {static_cast<std::uint32_t>(hash >> 56), static_cast<std::uint32_t>(hash),
          static_cast<std::uint32_t>(hash >> 24) & ~row_mask_};
}

Entry* ObjectIndex::find(const ObjectKey& key, NodeId node) noexcept {
  return find_if(key, [node](const Entry& row) { return row.node == node; });
}

const Entry* ObjectIndex::find(const ObjectKey& key, NodeId node) const noexcept {
  return find_if(key, [node](const Entry& row) { return row.node == node; });
}

std::uint32_t ObjectIndex::first_with_tag(const Table& table, std::uint32_t slot,
                                          std::uint32_t tag) const noexcept {
  for (; table.words[slot] != 0; slot = next_slot(table, slot)) {
    if ((table.words[slot] & ~row_mask_) == tag) return slot;
  }
  return kNone;
}

void ObjectIndex::approach(std::span<const ObjectKey> keys, Approach* out) const noexcept {
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const Place place = place_of(keys[i]);
    const Table& table = tables_[place.table];
    out[i] = {&table, place.tag, home_slot(table, place)};
    __builtin_prefetch(table.words.get() + out[i].slot);
  }
  for (Approach& at : std::span(out, keys.size())) {
    const Table& table = *at.table;
    at.slot = table.used == 0 ? kNone : first_with_tag(table, at.slot, at.tag);
    if (at.slot != kNone) __builtin_prefetch(&row_at(row_of(table.words[at.slot])));
  }
}

void ObjectIndex::prefetch(std::span<const ObjectKey> keys) const noexcept {
  std::array<Approach, kBatchMax> unused;
  approach(keys.first(std::min(keys.size(), unused.size())), unused.data());
}

Entry* ObjectIndex::upsert(const Entry& entry) {
  if (entry.node == 0) throw Error(ErrorKind::kProtocol, "an entry names no node");
  if (Entry* row = find(entry.key, entry.node)) {
    *row = entry;
    return row;
  }
  if (size_ == rows_max_) return nullptr;
  const Place place = place_of(entry.key);
  Table& table = tables_[place.table];
  if (too_full(table.used + 1, table.capacity)) grow(table);
  const std::uint32_t row = take_row();
  row_at(row) = entry;
  insert_word(table, place, row);
  ++table.used;
  ++size_;
  return &row_at(row);
}

bool ObjectIndex::erase(const ObjectKey& key, NodeId node) noexcept {
  const Place place = place_of(key);
  const std::uint32_t slot =
      find_slot(place, key, [node](const Entry& row) { return row.node == node; });
  if (slot == kNone) return false;
  erase_slot(tables_[place.table], slot);
  return true;
}

std::size_t ObjectIndex::bytes() const noexcept {
  std::size_t bytes = sizeof *this + chunks_.size() * kChunkRows * sizeof(Entry);
  for (const Table& table : tables_) bytes += table.capacity * sizeof(std::uint32_t);
  return bytes;
}

void ObjectIndex::insert_word(Table& table, const Place& place, std::uint32_t row) noexcept {
  std::uint32_t slot = home_slot(table, place);
  while (table.words[slot] != 0) slot = next_slot(table, slot);
  table.words[slot] = place.tag | (row + 1);
}

void ObjectIndex::grow(Table& table) {
  // Rows of words this far ahead are being loaded while one is placed anew.
  constexpr std::uint32_t kAhead = 16;
  Table grown;
  grown.capacity = std::max(kCapacityMin, table.capacity + table.capacity / 2);
  grown.words = std::make_unique<std::uint32_t[]>(grown.capacity);
  grown.used = table.used;
  for (std::uint32_t slot = 0; slot < table.capacity; ++slot) {
    if (slot + kAhead < table.capacity && table.words[slot + kAhead] != 0) {
      __builtin_prefetch(&row_at(row_of(table.words[slot + kAhead])));
    }
    if (table.words[slot] == 0) continue;
    const std::uint32_t row = row_of(table.words[slot]);
    insert_word(grown, place_of(row_at(row).key), row);
  }
  table = std::move(grown);
}

std::uint32_t ObjectIndex::take_row() {
  if (free_row_ != kNone) {
    const std::uint32_t row = free_row_;
    free_row_ = static_cast<std::uint32_t>(row_at(row).address);
    return row;
  }
  if (rows_used_ == chunks_.size() * kChunkRows) {
    constexpr std::size_t kBytes = kChunkRows * sizeof(Entry);
    chunks_.reserve(chunks_.size() + 1);
    Chunk chunk(static_cast<Entry*>(std::aligned_alloc(kBytes, kBytes)));
    if (chunk == nullptr) throw std::bad_alloc();
    // Advice that may be declined: then the rows lie in small pages.
    static_cast<void>(madvise(chunk.get(), kBytes, MADV_HUGEPAGE));
    chunks_.push_back(std::move(chunk));
  }
  return rows_used_++;
}

// Closes the gap by moving back the words after it that may stand nearer to their home, so that no
// tombstones pile up in a table that lives for months.
void ObjectIndex::erase_slot(Table& table, std::uint32_t slot) noexcept {
  const std::uint32_t row = row_of(table.words[slot]);
  row_at(row) = Entry{};
  row_at(row).address = free_row_;
  free_row_ = row;

  const auto distance = [&table](std::uint32_t from, std::uint32_t to) {
    return to >= from ? to - from : to + table.capacity - from;
  };
  std::uint32_t gap = slot;
  for (std::uint32_t at = next_slot(table, gap); table.words[at] != 0; at = next_slot(table, at)) {
    const Place place = place_of(row_at(row_of(table.words[at])).key);
    if (distance(home_slot(table, place), at) < distance(gap, at)) continue;
    table.words[gap] = table.words[at];
    gap = at;
  }
  table.words[gap] = 0;
  --table.used;
  --size_;
}

void ObjectIndex::erase_row(std::uint32_t row) noexcept {
  const Place place = place_of(row_at(row).key);
  Table& table = tables_[place.table];
  std::uint32_t slot = home_slot(table, place);
  while (row_of(table.words[slot]) != row) slot = next_slot(table, slot);
  erase_slot(table, slot);
}

}  // namespace hymcache
