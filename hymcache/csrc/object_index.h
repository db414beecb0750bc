// The index of objects: rows of 64 bytes found by key, one for each node that holds the object.
//
// Rows stand in chunks that never move, so a pointer to a row stays good until that row is erased.
// They are found through 256 small hash tables of 32-bit words, each with a row number and a few
// bits of the key's hash; a table grows on its own, so that no insertion ever waits for the whole
// index to be rehashed. Keys come from the network: the hash is keyed with a secret of the
// process, so nobody can make them collide on purpose.
//
// Not for use by several threads at once: an index belongs to one event loop.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "hymcache/csrc/entry.h"

namespace hymcache {

class ObjectIndex {
 public:
  static constexpr std::uint32_t kRowsLimit = 1u << 28;  // 16 GiB of rows

  // Never holds more than rows_max rows. Throws kConfig unless 1 <= rows_max <= kRowsLimit.
  // A seed makes a run repeatable; by default it is drawn from the operating system.
  explicit ObjectIndex(std::uint32_t rows_max);
  ObjectIndex(std::uint32_t rows_max, std::array<std::uint64_t, 2> seed);
  ~ObjectIndex();
  ObjectIndex(const ObjectIndex&) = delete;
  ObjectIndex& operator=(const ObjectIndex&) = delete;

  // The row of this key and node, or null. Callers may change a row but for its key and node.
  Entry* find(const ObjectKey& key, NodeId node) noexcept;
  const Entry* find(const ObjectKey& key, NodeId node) const noexcept;

  // The first row of this key for which pred(const Entry&) holds, or null. The order of the rows of
  // one key is unspecified.
  template <class Pred>
  Entry* find_if(const ObjectKey& key, Pred pred);
  template <class Pred>
  const Entry* find_if(const ObjectKey& key, Pred pred) const;

  // Batches of up to kBatchMax keys (more are left out) wait for memory twice, not twice a key.
  static constexpr std::size_t kBatchMax = 64;
  // As find_if() for each key; calls visit(i, const Entry*) in their order.
  template <class Pred, class Visit>
  void find_each(std::span<const ObjectKey> keys, Pred pred, Visit visit) const;
  // Starts loading what find() will touch.
  void prefetch(std::span<const ObjectKey> keys) const noexcept;

  // Inserts the row, or replaces the one with its key and node. Null when the index is full. Throws
  // kProtocol where the node is 0, and std::bad_alloc; then the index is as it was.
  Entry* upsert(const Entry& entry);

  // False if there is no such row.
  bool erase(const ObjectKey& key, NodeId node) noexcept;

  // Visits at most rows_max rows from cursor on (0 to start), free ones included, and erases those
  // for which erase_it(Entry&) returns true; erase_it may itself upsert, and erase other rows.
  // Returns true when the end was reached, with cursor back at 0. A row that lives through a whole
  // sweep is visited exactly once; one that was inserted meanwhile, at most once.
  template <class EraseIt>
  bool sweep(std::uint32_t& cursor, std::uint32_t rows_max, EraseIt erase_it);

  std::uint32_t size() const noexcept { return size_; }
  std::uint32_t rows_max() const noexcept { return rows_max_; }
  std::size_t bytes() const noexcept;  // of memory held by rows and tables

 private:
  // 2 MiB: a huge page where the system gives one, which saves most TLB misses of find().
  static constexpr std::uint32_t kChunkRowsLog2 = 15;
  static constexpr std::uint32_t kChunkRows = 1u << kChunkRowsLog2;
  static constexpr std::size_t kTables = 256;
  static constexpr std::uint32_t kNone = ~0u;

  struct ChunkDeleter {
    void operator()(Entry* rows) const noexcept;
  };
  using Chunk = std::unique_ptr<Entry[], ChunkDeleter>;

  // Open addressing with linear probing. A word is 0 when free, else a row number
  // plus 1 in the bits of row_mask_, and some of the bits of the key's hash in the others.
  struct Table {
    std::unique_ptr<std::uint32_t[]> words;
    std::uint32_t capacity = 0;
    std::uint32_t used = 0;
  };

  // Where a key is looked for.
  struct Place {
    std::uint32_t table;
    std::uint32_t home;  // scaled to the capacity by home_slot()
    std::uint32_t tag;   // the hash's bits in a word
  };

  Place place_of(const ObjectKey& key) const noexcept;
  static std::uint32_t home_slot(const Table& table, const Place& place) noexcept {
    return static_cast<std::uint32_t>((std::uint64_t{place.home} * table.capacity) >> 32);
  }
  static std::uint32_t next_slot(const Table& table, std::uint32_t slot) noexcept {
    return slot + 1 == table.capacity ? 0 : slot + 1;
  }
  Entry& row_at(std::uint32_t row) const noexcept {
    return chunks_[row >> kChunkRowsLog2][row & (kChunkRows - 1)];
  }
  std::uint32_t row_of(std::uint32_t word) const noexcept { return (word & row_mask_) - 1; }

  // Where the search for a key has got to without a look at any row.
  struct Approach {
    const Table* table;
    std::uint32_t tag;
    std::uint32_t slot;  // the first with this tag, or kNone
  };
  std::uint32_t first_with_tag(const Table& table, std::uint32_t slot,
                               std::uint32_t tag) const noexcept;
  // Starts loading the rows that the slots name.
  void approach(std::span<const ObjectKey> keys, Approach* out) const noexcept;

  // The slot of the first row of this key for which pred holds, or kNone.
  template <class Pred>
  std::uint32_t find_slot(const Place& place, const ObjectKey& key, Pred pred) const;
  // The same from `slot` on, of a table that is not empty.
  template <class Pred>
  std::uint32_t find_slot_from(const Table& table, std::uint32_t slot, std::uint32_t tag,
                               const ObjectKey& key, Pred pred) const;
  void insert_word(Table& table, const Place& place, std::uint32_t row) noexcept;
  void grow(Table& table);
  std::uint32_t take_row();
  void erase_slot(Table& table, std::uint32_t slot) noexcept;
  void erase_row(std::uint32_t row) noexcept;

  const std::uint32_t rows_max_;
  const std::uint32_t row_mask_;  // the bits of a word that hold row + 1
  const std::array<std::uint64_t, 2> seed_;
  std::uint32_t size_ = 0;
  std::uint32_t rows_used_ = 0;     // rows ever taken: those above were never written
  std::uint32_t free_row_ = kNone;  // first of the list of erased rows, linked by `address`
  std::vector<Chunk> chunks_;
  std::array<Table, kTables> tables_;
};

template <class Pred>
std::uint32_t ObjectIndex::find_slot(const Place& place, const ObjectKey& key, Pred pred) const {
  const Table& table = tables_[place.table];
  if (table.used == 0) return kNone;
  return find_slot_from(table, home_slot(table, place), place.tag, key, pred);
}

template <class Pred>
std::uint32_t ObjectIndex::find_slot_from(const Table& table, std::uint32_t slot, std::uint32_t tag,
                                          const ObjectKey& key, Pred pred) const {
  // Ends at a free word: a table is never full.
  for (;; slot = next_slot(table, slot)) {
    const std::uint32_t word = table.words[slot];
    if (word == 0) return kNone;
    if ((word & ~row_mask_) != tag) continue;
    const Entry& row = row_at(row_of(word));
    if (row.key == key && pred(row)) return slot;
  }
}

template <class Pred, class Visit>
void ObjectIndex::find_each(std::span<const ObjectKey> keys, Pred pred, Visit visit) const {
  std::array<Approach, kBatchMax> found;
  keys = keys.first(std::min(keys.size(), found.size()));
  approach(keys, found.data());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const Approach& at = found[i];
    const std::uint32_t slot =
        at.slot == kNone ? kNone : find_slot_from(*at.table, at.slot, at.tag, keys[i], pred);
    visit(i, slot == kNone ? nullptr : &row_at(row_of(at.table->words[slot])));
  }
}

template <class Pred>
const Entry* ObjectIndex::find_if(const ObjectKey& key, Pred pred) const {
  const Place place = place_of(key);
  const std::uint32_t slot = find_slot(place, key, pred);
  return slot == kNone ? nullptr : &row_at(row_of(tables_[place.table].words[slot]));
}

template <class Pred>
Entry* ObjectIndex::find_if(const ObjectKey& key, Pred pred) {
  return const_cast<Entry*>(std::as_const(*this).find_if(key, pred));
}

template <class EraseIt>
bool ObjectIndex::sweep(std::uint32_t& cursor, std::uint32_t rows_max, EraseIt erase_it) {
  for (; rows_max > 0 && cursor < rows_used_; --rows_max, ++cursor) {
    Entry& row = row_at(cursor);
    if (row.node == 0) continue;  // free
    if (erase_it(row)) erase_row(cursor);
  }
  if (cursor < rows_used_) return false;
  cursor = 0;
  return true;
}

}  // namespace hymcache
