// What a node holds: pending and valid rows, stale locations, and who is told.
#include <doctest/doctest.h>

#include <set>
#include <vector>

#include "kv_manager/csrc/object_directory.h"
#include "tests/cpp/store_fixture.h"

namespace hymcache::testing {
namespace {

constexpr std::uint32_t kBlock = 64 * kKiB;

TEST_CASE("directory: only what is committed can be found by readers") {
  Store store;
  store.call([&] {
    ObjectDirectory& directory = store.directory();
    const ObjectKey key = numbered_key(1);
    REQUIRE(directory.add_pending(key, 9, 4096, 100));
    CHECK(directory.find(key) != nullptr);
    CHECK(directory.find_valid(key) == nullptr);
    CHECK(directory.verify(key, 4096, 0) == nullptr);
    CHECK(directory.objects() == 0);
    directory.make_valid(key, 77, Entry::kHasCrc);
    const Entry* const entry = directory.find_valid(key);
    REQUIRE(entry != nullptr);
    CHECK(entry->generation > 1000);  // the incarnation
    CHECK(entry->node == 7);
    CHECK(directory.verify(key, 4096, entry->generation) == entry);
    CHECK(directory.verify(key, 4096, entry->generation + 1) == nullptr);
    CHECK(directory.verify(key, 0, entry->generation) == nullptr);
    CHECK(directory.objects() == 1);
    CHECK(directory.object_bytes() == 100);
    CHECK(store.stored.size() == 1);
  });
}

TEST_CASE("directory: a pending row that is given up was never there") {
  Store store;
  store.call([&] {
    REQUIRE(store.directory().add_pending(numbered_key(1), 0, 0, 10));
    store.directory().forget_pending(numbered_key(1));
    CHECK(store.directory().find(numbered_key(1)) == nullptr);
    CHECK(store.stored.empty());
    CHECK(store.gone.empty());
    CHECK_FALSE(store.directory().drop(numbered_key(1), 0));
  });
}

TEST_CASE("directory: a drop frees the address and is told with the object's generation") {
  Store store;
  const Entry first = store.put(1, kBlock);
  store.call([&] {
    CHECK_FALSE(store.directory().drop(first.key, first.generation + 1));
    CHECK(store.directory().drop(first.key, first.generation));
    CHECK_FALSE(store.directory().drop(first.key, first.generation));
    CHECK(store.gone == std::vector{std::pair{first.key, first.generation}});
    CHECK(store.directory().objects() == 0);
    CHECK(store.directory().object_bytes() == 0);
  });
  const Entry again = store.put(1, kBlock);
  CHECK(again.generation > first.generation);
  store.call([&] {
    CHECK(store.directory().verify(first.key, first.address, first.generation) == nullptr);
  });
}

TEST_CASE("directory: an object that the device loses is gone, by its address") {
  Store store({.faults = {.fail_flush = 1}});
  store.may_flush = false;
  const Entry lost = store.put(1, kBlock);
  store.call([&] {
    store.device().on_flush_failed = [&](std::uint64_t address, int) {
      CHECK(address == lost.address);
      CHECK(store.directory().forget_lost(address));
      CHECK_FALSE(store.directory().forget_lost(address));
    };
    store.device().drive(true);
    CHECK(store.directory().find(lost.key) == nullptr);
    CHECK(store.gone == std::vector{std::pair{lost.key, lost.generation}});
    CHECK(store.device().stats().live_bytes == 0);
  });
}

TEST_CASE("directory: it holds as many rows as it was made for") {
  Store store({.objects_max = 3});
  store.call([&] {
    for (std::uint64_t i = 0; i < 3; ++i) {
      CHECK(store.directory().add_pending(numbered_key(i), 0, 4096 * i, 10));
    }
    CHECK_FALSE(store.directory().add_pending(numbered_key(3), 0, 0, 10));
    store.directory().forget_pending(numbered_key(1));
    CHECK(store.directory().add_pending(numbered_key(3), 0, 0, 10));
  });
}

TEST_CASE("directory: copying takes every valid row once, in pieces of any size") {
  Store store;
  store.call([&] {
    ObjectDirectory& directory = store.directory();
    for (std::uint64_t i = 0; i < 1000; ++i) {
      REQUIRE(directory.add_pending(numbered_key(i), 0, 4096 * i, 10));
      if (i % 3 != 0) directory.make_valid(numbered_key(i), 0, 0);
    }
    for (const std::size_t piece : {1, 7, 256, 1000, 5000}) {
      std::vector<Entry> rows(piece);
      std::set<ObjectKey> seen;
      std::uint32_t cursor = 0;
      do {
        const std::size_t count = directory.copy_rows(cursor, rows);
        REQUIRE(count <= piece);
        for (std::size_t i = 0; i < count; ++i) {
          CHECK(rows[i].valid());
          CHECK(seen.insert(rows[i].key).second);
        }
      } while (cursor != 0);
      CHECK(seen.size() == directory.objects());
    }
  });
}

}  // namespace
}  // namespace hymcache::testing
