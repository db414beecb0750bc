// The directory of a shared region, in threads and processes' stead: what is found is right, what
// is pinned stays, what the dead have left is taken back.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "hymcache/csrc/error.h"
#include "tests/cpp/region_fixture.h"

namespace {

using namespace hymcache::region_testing;
using hymcache::Error;
using hymcache::ErrorKind;
using hymcache::ObjectKey;
using namespace std::chrono_literals;

constexpr std::size_t kBytes = 4096;
constexpr std::uint64_t kRegionBytes = (2u << 20) + 64 * kBytes;  // 64 slots

}  // namespace

TEST_SUITE("region directory") {
  TEST_CASE("what one has stored another finds, whole") {
    const MemoryFile file(kRegionBytes);
    RegionDirectory writer(open_region(file, small_form()), {});
    RegionDirectory reader(open_region(file, small_form()), {});
    CHECK(writer.region()->formatted_here());
    CHECK_FALSE(reader.region()->formatted_here());
    CHECK(store(writer, 1, bytes_of_object(1, kBytes)) == RegionStatus::kOk);
    CHECK(store(reader, 1, bytes_of_object(1, kBytes)) == RegionStatus::kStoredAlready);
    CHECK(look_up(reader, 1) == RegionStatus::kOk);
    CHECK(look_up(reader, 2) == RegionStatus::kMiss);
    std::vector<std::byte> into(kBytes);
    CHECK(load(reader, 1, into) == RegionStatus::kOk);
    CHECK(into == bytes_of_object(1, kBytes));
    CHECK(load(reader, 2, into) == RegionStatus::kMiss);
    std::vector<std::byte> shorter(kBytes - 1);
    CHECK(load(reader, 1, shorter) == RegionStatus::kWrongSize);
    CHECK(store(writer, 3, std::vector<std::byte>(kBytes + 1)) == RegionStatus::kWrongSize);
    CHECK(store(writer, 3, {}) == RegionStatus::kWrongSize);
  }

  TEST_CASE("a full region evicts, but never what is pinned") {
    const MemoryFile file(kRegionBytes);
    RegionDirectory directory(open_region(file, small_form()), {});
    const std::uint32_t slots = directory.region()->layout().header.slots;
    CHECK(slots == 64);
    std::vector<ObjectKey> pinned;
    for (std::uint64_t i = 0; i < 8; ++i) {
      REQUIRE(store(directory, i, bytes_of_object(i, kBytes)) == RegionStatus::kOk);
      pinned.push_back(key_of(i));
    }
    std::vector<RegionStatus> found(pinned.size());
    const auto ticket = directory.pin(pinned, found);
    CHECK(found == std::vector(pinned.size(), RegionStatus::kOk));
    for (std::uint64_t i = 100; i < 100 + 10 * slots; ++i) {
      REQUIRE(store(directory, i, bytes_of_object(i, kBytes)) == RegionStatus::kOk);
    }
    CHECK(directory.stats().evicted_for_room > 8 * slots);
    std::vector<std::byte> into(kBytes);
    for (std::uint64_t i = 0; i < 8; ++i) {
      CHECK(look_up(directory, i) == RegionStatus::kOk);
    }
    // All pins are taken: a load does without, and is none the worse.
    CHECK(load(directory, 3, into) == RegionStatus::kOk);
    std::vector<RegionStatus> one(1);
    const auto second = directory.pin({&pinned[0], 1}, one);
    CHECK(one[0] == RegionStatus::kFull);
    directory.unpin(second);
    directory.unpin(ticket);
    CHECK_THROWS_AS(directory.unpin(ticket), Error);
    for (std::uint64_t i = 1000; i < 1000 + 20 * slots; ++i) {
      REQUIRE(store(directory, i, bytes_of_object(i, kBytes)) == RegionStatus::kOk);
    }
    for (std::uint64_t i = 0; i < 8; ++i) CHECK(look_up(directory, i) == RegionStatus::kMiss);
  }

  TEST_CASE("a removed object leaves a tombstone: what was stored behind it is still found") {
    const MemoryFile file(kRegionBytes);
    RegionDirectory directory(open_region(file, small_form()), {});
    // Keys with one home: their first words differ in what is below the slot number.
    std::vector<ObjectKey> keys(5);
    for (std::uint64_t i = 0; i < keys.size(); ++i) {
      const std::uint64_t words[2] = {i, i};
      std::memcpy(keys[i].data(), words, sizeof words);
    }
    std::vector<std::byte> content(kBytes, std::byte{7});
    const hymcache::Segment segment{content.data(), content.size()};
    std::vector<RegionStatus> out(keys.size());
    directory.store(keys, [&](std::size_t) { return std::span(&segment, 1); }, 0, out);
    REQUIRE(out == std::vector(keys.size(), RegionStatus::kOk));
    directory.remove({&keys[1], 1}, {out.data(), 1});
    CHECK(out[0] == RegionStatus::kOk);
    directory.lookup(keys, out);
    CHECK(out[1] == RegionStatus::kMiss);
    for (const std::size_t i : {0u, 2u, 3u, 4u}) CHECK(out[i] == RegionStatus::kOk);
    const auto entries = directory.entries(0, 64);
    CHECK(entries.size() == 4);
    CHECK(entries[1].slot == 2);
  }

  TEST_CASE("a flipped bit is found, told once, and the object is gone") {
    const MemoryFile file(kRegionBytes);
    const auto region = open_region(file, small_form());
    RegionDirectory directory(region, {});
    REQUIRE(store(directory, 1, bytes_of_object(1, kBytes)) == RegionStatus::kOk);
    const std::uint32_t slot = directory.entries(0, 64).at(0).slot;
    region->slot(slot)[kBytes / 2] ^= std::byte{1};
    RegionDirectory trusting(region, {.checksums = false});
    std::vector<std::byte> into(kBytes);
    CHECK(load(trusting, 1, into) == RegionStatus::kOk);
    CHECK(load(directory, 1, into) == RegionStatus::kCorrupt);
    CHECK(load(directory, 1, into) == RegionStatus::kMiss);
  }

  TEST_CASE("what a dead writer has begun is taken back after its lease") {
    const MemoryFile file(kRegionBytes);
    RegionForm form = small_form();
    form.lease_ms = 50;
    const auto region = open_region(file, form);
    {
      // A participant that claims a slot and is never heard of again.
      const RegionLayout& layout = region->layout();
      const auto words_at = [&](std::uint64_t offset) {
        return reinterpret_cast<SharedWord*>(region->at(offset));
      };
      const ParticipantTable<SharedWord> table(words_at(layout.participants_offset), 8, 8,
                                               layout.participant_bytes / 8);
      const auto owner = table.join();
      REQUIRE(owner);
      SlotProtocol<SharedWord> protocol({.words = words_at(layout.words_offset),
                                         .entries = words_at(layout.entries_offset),
                                         .slots = layout.header.slots,
                                         .probe_slots = layout.header.probe_slots},
                                        table);
      const auto claimed = protocol.claim(KeyWords::of(key_of(1)), *owner);
      REQUIRE(claimed.status == ClaimStatus::kClaimed);
    }
    {
      RegionDirectory idle(region, {.maintain = false});
      CHECK(look_up(idle, 1) == RegionStatus::kPending);
      CHECK(store(idle, 1, bytes_of_object(1, kBytes)) == RegionStatus::kPending);
    }
    RegionDirectory directory(region, {});
    const auto deadline = std::chrono::steady_clock::now() + 10s;
    while (look_up(directory, 1) == RegionStatus::kPending) {
      REQUIRE(std::chrono::steady_clock::now() < deadline);
      std::this_thread::sleep_for(5ms);
    }
    CHECK(directory.stats().reclaimed == 1);
    CHECK(store(directory, 1, bytes_of_object(1, kBytes)) == RegionStatus::kOk);
    CHECK(directory.usage().by_state[0] == 63);
  }

  TEST_CASE("a watermark keeps slots free") {
    const MemoryFile file(kRegionBytes);
    RegionDirectory directory(open_region(file, small_form()),
                              {.high_watermark = 0.5, .low_watermark = 0.25});
    for (std::uint64_t i = 0; i < 60; ++i) {
      REQUIRE(store(directory, i, bytes_of_object(i, kBytes)) == RegionStatus::kOk);
    }
    const auto deadline = std::chrono::steady_clock::now() + 30s;
    while (directory.usage().by_state[0] < 32) {
      REQUIRE(std::chrono::steady_clock::now() < deadline);
      std::this_thread::sleep_for(20ms);
    }
    CHECK(directory.stats().evicted_by_watermark > 0);
  }

  TEST_CASE("threads store, load, pin and remove, and see nothing but whole objects") {
    const MemoryFile file(kRegionBytes);
    // One mapping for all: TSan knows memory by its address.
    const auto region = open_region(file, small_form());
    RegionDirectory directories[] = {{region, {}}, {region, {.threads = 2}}};
    std::atomic<std::uint64_t> wrong{0};
    std::atomic<std::uint64_t> loaded{0};
    const auto work = [&](unsigned seed) {
      std::mt19937 random(seed);
      std::vector<std::byte> into(kBytes);
      RegionDirectory& directory = directories[seed % 2];
      for (int i = 0; i < 3000; ++i) {
        const std::uint64_t number = random() % 96;
        switch (random() % 4) {
          case 0:
            store(directory, number, bytes_of_object(number, kBytes));
            break;
          case 1: {
            const ObjectKey key = key_of(number);
            RegionStatus found{};
            const auto ticket = directory.pin({&key, 1}, {&found, 1});
            const RegionStatus status = load(directory, number, into);
            if (found == RegionStatus::kOk) {
              wrong += status != RegionStatus::kOk || into != bytes_of_object(number, kBytes);
            }
            directory.unpin(ticket);
            break;
          }
          case 2:
            if (load(directory, number, into) == RegionStatus::kOk) {
              ++loaded;
              wrong += into != bytes_of_object(number, kBytes);
            }
            break;
          default: {
            const ObjectKey key = key_of(number);
            RegionStatus status{};
            directory.remove({&key, 1}, {&status, 1});
          }
        }
        wrong += look_up(directory, 1000 + number) == RegionStatus::kOk;
      }
    };
    {
      std::vector<std::jthread> threads;
      for (unsigned seed = 1; seed <= 4; ++seed) threads.emplace_back(work, seed);
    }
    CHECK(wrong == 0);
    CHECK(loaded > 0);
    const auto usage = directories[0].usage();
    CHECK(usage.by_state[1] == 0);
    CHECK(usage.by_state[3] == 0);
    CHECK(usage.pinned == 0);
  }

  TEST_CASE("an adversary that replaces the object during the copy never gets its bytes taken") {
    constexpr std::uint64_t kLargeBytes = 2u << 20;
    const MemoryFile file((2u << 20) + kLargeBytes);  // one slot, so every store replaces it
    RegionDirectory adversary(open_region(file, small_form(kLargeBytes)), {});
    REQUIRE(adversary.region()->layout().header.slots == 1);
    // Read-only, so that it cannot pin, and without a checksum: the generation alone decides.
    RegionDirectory reader(open_region(file, {}, /*writable=*/false), {.checksums = false});
    std::atomic<bool> done{false};
    std::jthread replacing([&] {
      for (std::uint64_t i = 0; !done; ++i) {
        store(adversary, i % 2, std::vector<std::byte>(kLargeBytes, static_cast<std::byte>(i % 2)));
      }
    });
    std::vector<std::byte> into(kLargeBytes);
    std::uint64_t right = 0, taken_wrong = 0, refused_wrong = 0;
    const auto deadline = std::chrono::steady_clock::now() + 20s;
    while ((refused_wrong < 20 || right < 20) && std::chrono::steady_clock::now() < deadline) {
      std::fill(into.begin(), into.end(), std::byte{0});
      const RegionStatus status = load(reader, 0, into);
      const bool is_right = std::all_of(into.begin(), into.end(),
                                        [](std::byte byte) { return byte == std::byte{0}; });
      if (status == RegionStatus::kOk) {
        right += is_right;
        taken_wrong += !is_right;
      } else {
        refused_wrong += !is_right;
      }
    }
    done = true;
    CHECK(taken_wrong == 0);
    // The window was hit: without the look at the generation these would have been taken.
    CHECK(refused_wrong > 0);
    CHECK(reader.stats().loads_overtaken >= refused_wrong);
  }
}
