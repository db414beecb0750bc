// Who formats a region on a disk that is slow, or refuses; what such a disk does to a store; and
// pages that are not there.
#include <doctest/doctest.h>

#include <cerrno>
#include <chrono>
#include <future>
#include <thread>

#include "hymcache/csrc/error.h"
#include "tests/cpp/region_fixture.h"

namespace {

using namespace hymcache::region_testing;
using hymcache::Error;
using hymcache::ErrorKind;
using namespace std::chrono_literals;

constexpr std::size_t kBytes = 4096;
constexpr std::uint64_t kHeadBytes = 2u << 20;
constexpr std::uint64_t kRegionBytes = kHeadBytes + 64 * kBytes;

int synced(std::byte*, std::uint64_t) { return 0; }

}  // namespace

TEST_SUITE("region on a disk") {
  TEST_CASE("who formats it on a slow disk is not taken for dead") {
    const DiskFile file(kRegionBytes);
    // All of the head takes half as long again as a claim may stand still.
    const auto slowly = [](std::byte*, std::uint64_t bytes) {
      std::this_thread::sleep_for(Region::kTakeOver * 3 / 2 * bytes / kHeadBytes);
      return 0;
    };
    const auto open = [&] { return open_durable(file, small_form(), slowly); };
    auto first = std::async(std::launch::async, open);
    auto second = std::async(std::launch::async, open);
    const auto one = first.get();
    const auto two = second.get();
    CHECK(one->formatted_here() != two->formatted_here());
    CHECK(one->claim() == two->claim());
  }

  TEST_CASE("who is overtaken while formatting stops, and attaches to what the other has made") {
    const DiskFile file(kRegionBytes);
    std::promise<void> reached, go_on;
    bool first_call = true;
    auto slow = std::async(std::launch::async, [&] {
      return open_durable(file, small_form(), [&](std::byte*, std::uint64_t) {
        if (std::exchange(first_call, false)) {
          reached.set_value();
          go_on.get_future().wait_for(30s);
        }
        return 0;
      });
    });
    REQUIRE(reached.get_future().wait_for(30s) == std::future_status::ready);
    RegionDirectory fast(open_durable(file, small_form(), synced), {.maintain = false});
    CHECK(fast.region()->formatted_here());
    REQUIRE(store(fast, 1, bytes_of_object(1, kBytes)) == RegionStatus::kOk);
    go_on.set_value();
    RegionDirectory overtaken(slow.get(), {.maintain = false});
    CHECK_FALSE(overtaken.region()->formatted_here());
    CHECK(overtaken.region()->claim() == fast.region()->claim());
    std::vector<std::byte> into(kBytes);
    CHECK(load(overtaken, 1, into) == RegionStatus::kOk);
    CHECK(into == bytes_of_object(1, kBytes));
  }

  TEST_CASE("what is durable is on the disk before its word speaks of it") {
    const DiskFile file(kRegionBytes);
    using Call = std::pair<const std::byte*, SlotState>;
    std::vector<Call> calls;
    RegionDirectory* watched = nullptr;
    const auto region = open_durable(file, small_form(), [&](std::byte* from, std::uint64_t) {
      if (watched != nullptr) {
        const auto states = watched->slots_by_state();
        calls.emplace_back(from, states[2] > 0 ? SlotState::kValid : SlotState::kWriting);
      }
      return 0;
    });
    RegionDirectory directory(region, {.maintain = false});
    watched = &directory;
    REQUIRE(store(directory, 1, bytes_of_object(1, kBytes)) == RegionStatus::kOk);
    watched = nullptr;
    const std::uint32_t slot = directory.entries(0, 64).at(0).slot;
    const auto page_of = [&](const std::byte* place) {
      return region->at(static_cast<std::uint64_t>(place - region->at(0)) / 4096 * 4096);
    };
    const std::byte* const entry = region->at(region->layout().entries_offset + slot * 64);
    const std::byte* const word = region->at(region->layout().words_offset + slot * 8);
    REQUIRE(calls.size() == 3);
    CHECK(calls[0] == Call{region->slot(slot), SlotState::kWriting});
    CHECK(calls[1] == Call{page_of(entry), SlotState::kWriting});
    CHECK(calls[2] == Call{page_of(word), SlotState::kValid});
  }

  TEST_CASE("a disk that refuses is told to whoever stores, and costs no slot") {
    for (const unsigned threads : {1u, 2u}) {
      CAPTURE(threads);
      const DiskFile file(kRegionBytes);
      bool broken = false;
      RegionDirectory directory(open_durable(file, small_form(),
                                             [&](std::byte*, std::uint64_t) {
                                               errno = EIO;
                                               return broken ? -1 : 0;
                                             }),
                                {.threads = threads, .maintain = false});
      broken = true;
      std::vector<hymcache::ObjectKey> keys;
      for (std::uint64_t i = 0; i < 8; ++i) keys.push_back(key_of(i));
      std::vector<RegionStatus> out(keys.size());
      std::vector<std::byte> content(kBytes, std::byte{7});
      const hymcache::Segment segment{content.data(), content.size()};
      const auto from = [&](std::size_t) { return std::span(&segment, 1); };
      try {
        directory.store(keys, from, 1, out);
        FAIL("nothing was told");
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::kDevice);
        CHECK(error.error_number() == EIO);
      }
      CHECK(directory.slots_by_state() == RegionDirectory::StateCounts{64, 0, 0, 0});
      broken = false;
      directory.store(keys, from, 1, out);
      CHECK(out == std::vector(keys.size(), RegionStatus::kOk));
    }
  }

  TEST_CASE("a writer that lost its slot to its disk leaves the next owner's entry alone") {
    const DiskFile file(kHeadBytes + kBytes);  // one slot
    RegionDirectory next(open_durable(file, small_form(), synced), {.maintain = false});
    bool reached = false;
    RegionDirectory slow(
        open_durable(file, small_form(),
                     [&](std::byte*, std::uint64_t) {
                       if (std::exchange(reached, true)) return 0;
                       const auto table = table_of(*next.region());
                       const auto me = next.participant() == 0 ? 1u : 0u;
                       REQUIRE(table.bury(me, table.state(me).load()));
                       REQUIRE(next.reclaim() == 1);
                       REQUIRE(store(next, 2, bytes_of_object(2, kBytes)) == RegionStatus::kOk);
                       return 0;
                     }),
        {.maintain = false});
    CHECK(store(slow, 1, bytes_of_object(1, kBytes)) == RegionStatus::kLost);
    REQUIRE(reached);
    std::vector<std::byte> into(kBytes);
    CHECK(load(next, 2, into) == RegionStatus::kOk);
    CHECK(into == bytes_of_object(2, kBytes));
  }

  TEST_CASE("a page that is not to be had is told, not a signal") {
    const MemoryFile file(2 * kHeadBytes);
    RegionMemory memory(file.path(), 0, 0, /*create=*/false, /*writable=*/true);
    memory.map(2 * kHeadBytes);
    memory.prefault();
    REQUIRE(::ftruncate(file.fd(), kHeadBytes) == 0);
    CHECK_THROWS_WITH_AS(memory.prefault(), doctest::Contains("has not all of its pages"), Error);
  }
}
