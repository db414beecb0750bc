// What a participant of a region makes of the beats that it sees, at times that the test names.
#include <doctest/doctest.h>

#include <array>

#include "lookup/csrc/region_member.h"

namespace {

using namespace hymcache::region;
using namespace std::chrono_literals;

constexpr auto kLease = 1000ms;
constexpr std::uint32_t kParticipants = 3;
constexpr std::uint32_t kRecordWords = kRecordHeaderWords + 1;

struct Records {
  std::array<SharedWord, kParticipants * kRecordWords> words{};
  RegionMember::Table table() { return {words.data(), kParticipants, 1, kRecordWords}; }
};

}  // namespace

TEST_SUITE("region member") {
  TEST_CASE("who is silent for a lease is dead") {
    Records records;
    RegionMember peer(records.table(), "peer", kLease, "place");
    RegionMember me(records.table(), "me", kLease, "place");
    const auto start = RegionMember::Clock::now();
    for (auto at = 100ms; at < kLease; at += 100ms) CHECK(me.observe(start + at).empty());
    CHECK(me.observe(start + kLease + 100ms) == std::vector<std::uint32_t>{0});
  }

  TEST_CASE("who stood still itself gives the others their lease anew") {
    Records records;
    RegionMember peer(records.table(), "peer", kLease, "place");
    RegionMember me(records.table(), "me", kLease, "place");
    const auto start = RegionMember::Clock::now();
    CHECK(me.observe(start + 100ms).empty());
    // The host was paused, and the peer with it.
    const auto woke = start + 10 * kLease;
    CHECK(me.observe(woke).empty());
    for (auto at = 100ms; at < kLease; at += 100ms) CHECK(me.observe(woke + at).empty());
    CHECK(me.observe(woke + kLease + 100ms) == std::vector<std::uint32_t>{0});
  }

  TEST_CASE("one that does not beat keeps nobody from being the first") {
    Records records;
    RegionMember command(records.table(), "a command", kLease, "place");
    RegionMember me(records.table(), "me", kLease, "place");
    const auto start = RegionMember::Clock::now();
    CHECK_FALSE(me.is_first(start));
    for (auto at = 100ms; at <= 600ms; at += 100ms) me.observe(start + at);
    CHECK(me.is_first(start + 600ms));
    command.beat();
    me.observe(start + 700ms);
    CHECK_FALSE(me.is_first(start + 700ms));
  }
}
