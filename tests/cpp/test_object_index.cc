// ObjectIndex against a map of the standard library, and what it promises about rows and memory.
#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <random>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hymcache/csrc/error.h"
#include "hymcache/csrc/object_index.h"

namespace {

using hymcache::Entry;
using hymcache::Error;
using hymcache::NodeId;
using hymcache::ObjectIndex;
using hymcache::ObjectKey;

ObjectKey key_of(std::uint64_t first, std::uint64_t second = 0) {
  ObjectKey key;
  std::memcpy(key.data(), &first, sizeof first);
  std::memcpy(key.data() + sizeof first, &second, sizeof second);
  return key;
}

Entry entry_of(const ObjectKey& key, NodeId node, std::uint64_t address = 0) {
  Entry entry;
  entry.key = key;
  entry.node = node;
  entry.address = address;
  entry.generation = address + 1;
  entry.flags = Entry::kValid;
  return entry;
}

bool same(const Entry& a, const Entry& b) { return std::memcmp(&a, &b, sizeof a) == 0; }

struct HashOfKey {
  std::size_t operator()(const ObjectKey& key) const noexcept {
    std::size_t hash;
    std::memcpy(&hash, key.data(), sizeof hash);
    return hash;
  }
};

// The index and its model, given the same operations.
class Pair {
 public:
  Pair(std::uint32_t rows_max, std::mt19937_64& random)
      : random_(random), index_(rows_max, {random(), random()}) {}

  void upsert(const Entry& entry) {
    Entry* row = index_.upsert(entry);
    auto* known = find_in_model(entry.key, entry.node);
    if (known != nullptr) {
      REQUIRE(row == known->row);
      known->entry = entry;
    } else if (model_.size() == index_.rows_max()) {
      REQUIRE(row == nullptr);
    } else {
      REQUIRE(row != nullptr);
      model_.emplace(entry.key, Known{entry, row});
    }
    REQUIRE(index_.size() == model_.size());
  }

  void erase(const ObjectKey& key, NodeId node) {
    REQUIRE(index_.erase(key, node) == erase_in_model(key, node));
    REQUIRE(index_.size() == model_.size());
  }

  void check(const ObjectKey& key, NodeId node) const {
    const Entry* row = index_.find(key, node);
    const auto* known = find_in_model(key, node);
    REQUIRE((row == nullptr) == (known == nullptr));
    if (row == nullptr) return;
    REQUIRE(row == known->row);  // rows never move
    REQUIRE(same(*row, known->entry));
  }

  void check_rows_of(const ObjectKey& key) const {
    std::vector<NodeId> seen;
    const Entry* none = index_.find_if(key, [&seen](const Entry& row) {
      seen.push_back(row.node);
      return false;
    });
    REQUIRE(none == nullptr);
    std::vector<NodeId> expected;
    const auto [begin, end] = model_.equal_range(key);
    for (auto it = begin; it != end; ++it) expected.push_back(it->second.entry.node);
    std::sort(seen.begin(), seen.end());
    std::sort(expected.begin(), expected.end());
    REQUIRE(seen == expected);
  }

  // A whole sweep in steps that erases about one row in `erase_one_in`, some of them other rows
  // than the one being visited.
  void sweep(std::uint64_t erase_one_in) {
    std::uint32_t cursor = 0;
    std::size_t turns = 0;
    bool done = false;
    while (!done) {
      REQUIRE(++turns < 1'000'000);
      const auto rows_max = static_cast<std::uint32_t>(1 + random_() % 50);
      done = index_.sweep(cursor, rows_max, [&](Entry& row) {
        REQUIRE(find_in_model(row.key, row.node) != nullptr);
        REQUIRE(same(row, find_in_model(row.key, row.node)->entry));
        if (random_() % (4 * erase_one_in) == 0) {
          const auto other = model_.begin()->second.entry;
          if (other.key != row.key) erase(other.key, other.node);
        }
        if (random_() % erase_one_in != 0) return false;
        return erase_in_model(row.key, row.node);
      });
      REQUIRE(index_.size() == model_.size());
    }
    REQUIRE(cursor == 0);
  }

  void check_batch(std::span<const ObjectKey> keys) const {
    const auto is_odd = [](const Entry& row) { return row.node % 2 == 1; };
    std::size_t visited = 0;
    index_.find_each(keys, is_odd, [&](std::size_t i, const Entry* row) {
      REQUIRE(i == visited++);
      REQUIRE(row == index_.find_if(keys[i], is_odd));
    });
    REQUIRE(visited == keys.size());
  }

  void check_all() const {
    std::array<ObjectKey, 33> batch;
    batch.back() = key_of(0, 8);  // absent
    std::size_t batched = 0;
    for (const auto& [key, known] : model_) {
      batch[batched++] = key;
      if (batched == 32) {
        check_batch(batch);
        batched = 0;
      }
      check(key, known.entry.node);
    }
    std::uint32_t cursor = 0;
    std::map<std::pair<ObjectKey, NodeId>, int> visits;
    const bool done =
        const_cast<ObjectIndex&>(index_).sweep(cursor, ~0u, [&visits](const Entry& row) {
          ++visits[{row.key, row.node}];
          return false;
        });
    REQUIRE(done);
    REQUIRE(visits.size() == model_.size());
    REQUIRE(std::all_of(visits.begin(), visits.end(), [](auto& v) { return v.second == 1; }));
  }

  std::size_t size() const { return model_.size(); }

 private:
  struct Known {
    Entry entry;
    Entry* row;
  };

  const Known* find_in_model(const ObjectKey& key, NodeId node) const {
    const auto [begin, end] = model_.equal_range(key);
    const auto it = std::find_if(
        begin, end, [node](const auto& known) { return known.second.entry.node == node; });
    return it == end ? nullptr : &it->second;
  }
  Known* find_in_model(const ObjectKey& key, NodeId node) {
    return const_cast<Known*>(std::as_const(*this).find_in_model(key, node));
  }
  bool erase_in_model(const ObjectKey& key, NodeId node) {
    const auto [begin, end] = model_.equal_range(key);
    for (auto it = begin; it != end; ++it) {
      if (it->second.entry.node != node) continue;
      model_.erase(it);
      return true;
    }
    return false;
  }

  std::mt19937_64& random_;
  ObjectIndex index_;
  std::unordered_multimap<ObjectKey, Known, HashOfKey> model_;
};

// Random operations over `keys` keys and `nodes` nodes; `growth` of 10 of the changes insert.
void run(std::mt19937_64& random, Pair& pair, std::uint64_t keys, NodeId nodes, unsigned growth,
         int operations) {
  for (int i = 0; i < operations; ++i) {
    const ObjectKey key = key_of(random() % keys, 7);
    const auto node = static_cast<NodeId>(1 + random() % nodes);
    if (random() % 10 < growth) {
      pair.upsert(entry_of(key, node, random()));
    } else {
      pair.erase(key, node);
    }
    const ObjectKey other = key_of(random() % keys, 7);
    pair.check(other, static_cast<NodeId>(1 + random() % nodes));
    if (i % 16 == 0) pair.check_rows_of(other);
  }
}

std::size_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::size_t total = 0;
  std::size_t resident = 0;
  statm >> total >> resident;
  return resident * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kResidentIsOurs = false;  // shadow memory and quarantine count too
#else
constexpr bool kResidentIsOurs = true;
#endif

}  // namespace

TEST_CASE("object index: behaves as a multimap through growth, churn, shrinking and sweeps") {
  const std::uint64_t seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  for (const auto& [keys, nodes, rows_max] :
       {std::tuple{std::uint64_t{40}, NodeId{3}, 100u},
        std::tuple{std::uint64_t{5'000}, NodeId{4}, 1u << 20},
        std::tuple{std::uint64_t{1'000'000'000}, NodeId{2}, ObjectIndex::kRowsLimit},
        std::tuple{std::uint64_t{6}, NodeId{50}, 1'000u}}) {
    CAPTURE(keys);
    Pair pair(rows_max, random);
    run(random, pair, keys, nodes, 8, 6'000);
    pair.check_all();
    pair.sweep(10);
    run(random, pair, keys, nodes, 5, 6'000);
    pair.sweep(2);
    pair.check_all();
    run(random, pair, keys, nodes, 2, 4'000);
    pair.check_all();
    pair.sweep(1);
    CHECK(pair.size() == 0);
    run(random, pair, keys, nodes, 9, 2'000);
    pair.check_all();
  }
}

TEST_CASE("object index: full is a value, and room comes back") {
  ObjectIndex index(3);
  for (std::uint64_t i = 0; i < 3; ++i) CHECK(index.upsert(entry_of(key_of(i), 1)) != nullptr);
  CHECK(index.upsert(entry_of(key_of(3), 1)) == nullptr);
  CHECK(index.upsert(entry_of(key_of(2), 2)) == nullptr);
  CHECK(index.upsert(entry_of(key_of(2), 1, 99)) == index.find(key_of(2), 1));  // a replacement
  CHECK(index.find(key_of(2), 1)->address == 99);
  CHECK(index.size() == 3);
  CHECK(index.erase(key_of(0), 1));
  CHECK_FALSE(index.erase(key_of(0), 1));
  CHECK(index.upsert(entry_of(key_of(3), 1)) != nullptr);
  CHECK(index.size() == 3);
}

TEST_CASE("object index: limits are checked") {
  CHECK_THROWS_AS(ObjectIndex(0), Error);
  CHECK_THROWS_AS(ObjectIndex(ObjectIndex::kRowsLimit + 1), Error);
  ObjectIndex index(1);
  CHECK_THROWS_AS(index.upsert(entry_of(key_of(1), 0)), Error);
  CHECK(index.size() == 0);
  CHECK(index.find(key_of(1), 0) == nullptr);
  std::uint32_t cursor = 0;
  CHECK(index.sweep(cursor, 10, [](Entry&) { return true; }));
  index.prefetch({});
  std::array<ObjectKey, ObjectIndex::kBatchMax + 1> many;
  many.fill(key_of(1));
  index.prefetch(many);
  std::size_t visited = 0;
  index.find_each(
      many, [](const Entry&) { return true; },
      [&visited](std::size_t, const Entry* row) { visited += row == nullptr ? 1 : 0; });
  CHECK(visited == ObjectIndex::kBatchMax);
}

TEST_CASE("object index: find_if takes the first row that pleases, and a row can be changed") {
  ObjectIndex index(100);
  for (NodeId node = 1; node <= 5; ++node) index.upsert(entry_of(key_of(1), node, 10 * node));
  index.upsert(entry_of(key_of(2), 4, 77));
  Entry* row = index.find_if(key_of(1), [](const Entry& entry) { return entry.address > 35; });
  REQUIRE(row != nullptr);
  CHECK((row->node == 4 || row->node == 5));
  row->epoch = 3;
  CHECK(index.find(key_of(1), row->node)->epoch == 3);
  CHECK(index.find_if(key_of(3), [](const Entry&) { return true; }) == nullptr);
}

TEST_CASE("object index: a sweep in steps visits every row that stays, once") {
  ObjectIndex index(1u << 20);
  constexpr std::uint64_t kRows = 50'000;  // more than a chunk
  for (std::uint64_t i = 0; i < kRows; ++i) index.upsert(entry_of(key_of(i), 1, i));
  std::vector<int> visits(2 * kRows, 0);
  std::uint32_t cursor = 0;
  std::uint64_t inserted = kRows;
  while (!index.sweep(cursor, 1'000, [&](Entry& row) {
    ++visits[row.address];
    const bool erase_it = row.address % 3 == 0;
    if (row.address % 5 == 0 && inserted < 2 * kRows) {
      REQUIRE(index.upsert(entry_of(key_of(inserted), 1, inserted)) != nullptr);
      ++inserted;
    }
    return erase_it;
  })) {
  }
  for (std::uint64_t i = 0; i < kRows; ++i) REQUIRE(visits[i] == 1);
  for (std::uint64_t i = kRows; i < inserted; ++i) REQUIRE(visits[i] <= 1);
  for (std::uint64_t i = 0; i < kRows; ++i) {
    REQUIRE((index.find(key_of(i), 1) == nullptr) == (i % 3 == 0));
  }
}

TEST_CASE("object index: keys that differ in few bits are no slower to find or heavier to hold") {
  constexpr std::uint32_t kRows = 60'000;
  ObjectIndex index(kRows);
  for (std::uint64_t i = 0; i < kRows; ++i) {
    REQUIRE(index.upsert(entry_of(key_of(0, i << 40), 1, i)) != nullptr);
  }
  for (std::uint64_t i = 0; i < kRows; ++i) {
    REQUIRE(index.find(key_of(0, i << 40), 1)->address == i);
  }
  // Two chunks, and the tables: all in one of them, or none in some, would stand out.
  CHECK(index.bytes() < (4u << 20) + 8 * kRows + sizeof index);
}

TEST_CASE("object index: 10 TB of 16 MiB objects take at most 64 MiB") {
  constexpr std::uint32_t kRows = 655'360;
  constexpr std::size_t kBytesMax = 64u << 20;
  const std::size_t before = resident_bytes();
  ObjectIndex index(1u << 24);
  std::mt19937_64 random(4);
  for (std::uint32_t i = 0; i < kRows; ++i) {
    REQUIRE(index.upsert(entry_of(key_of(random(), random()), 1, i)) != nullptr);
  }
  CHECK(index.size() == kRows);
  const std::size_t resident = resident_bytes() - before;
  MESSAGE("bytes a row: " << static_cast<double>(index.bytes()) / kRows << " held, "
                          << static_cast<double>(resident) / kRows << " resident");
  CHECK(index.bytes() <= kBytesMax);
  if (kResidentIsOurs) CHECK(resident <= kBytesMax);
}
