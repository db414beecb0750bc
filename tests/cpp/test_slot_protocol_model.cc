// The protocol of a shared region in every interleaving: the code that runs in production, over
// words that the explorer watches. What each scenario shows is in docs/region-format.md.
#include <doctest/doctest.h>

#include <optional>

#include "lookup/csrc/slot_protocol.h"
#include "tests/cpp/interleaving_explorer.h"

namespace {

using namespace hymcache::region;
using namespace hymcache::testing;

constexpr std::uint32_t kParticipants = 3;
constexpr std::uint32_t kRecordWords = kRecordHeaderWords + 1;  // one pin each
constexpr std::uint32_t kDataWords = 2;                         // a slot
constexpr std::uint64_t kStatesMax = 6'000'000;

// With a home of 0 each, and tags that differ.
constexpr KeyWords kKey{.first = 1, .second = 0x111};
constexpr KeyWords kOther{.first = 2, .second = 0x222};

using Protocol = SlotProtocol<ModelWord>;
using Table = ParticipantTable<ModelWord>;

// The memory of a region of a few slots, and operations on it.
class World {
 public:
  explicit World(std::uint32_t slots) : slots_(slots) {
    words_.resize(words_at(slots) + slots + std::size_t{slots} * (kEntryWords + kDataWords));
    for (std::uint32_t i = 0; i < words_.size(); ++i) words_[i].index = i;
    for (std::uint32_t slot = 0; slot < slots; ++slot) {
      // Namespace, flags, date and what is reserved say nothing about an order.
      for (const std::uint32_t field : {2u, 4u, 5u, 6u, 7u}) entry(slot, field).quiet = true;
    }
    start.memory.resize(words_.size());
    for (std::uint32_t i = 0; i < kParticipants; ++i) {
      start.memory[std::size_t{i} * kRecordWords] =
          Table::word_of(kEpoch, ParticipantState::kActive);
    }
  }
  World(const World&) = delete;

  Table table() { return {words_.data(), kParticipants, 1, kRecordWords}; }
  // Anew for each operation: it has a hand of its own, which would be a state that is not seen.
  Protocol protocol() {
    return Protocol({.words = &words_[words_at(slots_)],
                     .entries = &words_[words_at(slots_) + slots_],
                     .slots = slots_,
                     .probe_slots = slots_},
                    table());
  }
  ModelWord& data(std::uint32_t slot, std::uint32_t word) {
    return words_[words_at(slots_) + slots_ + std::size_t{slots_} * kEntryWords +
                  std::size_t{slot} * kDataWords + word];
  }
  ModelWord& pin_of(std::uint32_t participant) { return table().pin(participant, 0); }

  // Puts a valid object there from the start.
  void put(std::uint32_t slot, KeyWords key, std::uint64_t value, bool referenced) {
    const SlotWord claimed =
        SlotWord{}.claimed(key.tag(), Owner{.index = 0, .epoch = kEpoch}).committed();
    start.memory[words_at(slots_) + slot] = (referenced ? claimed : claimed.unreferenced()).bits();
    start.memory[entry(slot, 0).index] = key.first;
    start.memory[entry(slot, 1).index] = key.second;
    start.memory[entry(slot, 3).index] = checksum(value, claimed) << 32 | 1;
    for (std::uint32_t i = 0; i < kDataWords; ++i) start.memory[data(slot, i).index] = value;
  }

  SlotWord word(const ModelState& state, std::uint32_t slot) const {
    return SlotWord(state.memory[words_at(slots_) + slot]);
  }
  std::uint64_t data_of(const ModelState& state, std::uint32_t slot, std::uint32_t i) {
    return state.memory[data(slot, i).index];
  }
  std::uint32_t slots() const { return slots_; }

  // As the real one, a checksum says for which generation it was made.
  static std::uint64_t checksum(std::uint64_t value, SlotWord word) {
    return value + 1000 * std::uint64_t{word.generation()};
  }

  // Stores an object whose words are all `value`.
  Operation store(KeyWords key, std::uint8_t participant, std::uint64_t value) {
    return {[=, this](Locals& locals) {
              Protocol protocol = this->protocol();
              const ClaimedSlot claimed =
                  protocol.claim(key, Owner{.index = participant, .epoch = kEpoch});
              if (claimed.status != ClaimStatus::kClaimed) return;
              for (std::uint32_t i = 0; i < kDataWords; ++i) {
                data(claimed.slot, i).store(value, std::memory_order_relaxed);
              }
              // As RegionDirectory does: who lost the slot while copying leaves the entry alone.
              if (!protocol.is_claimed(claimed)) {
                require_in_model(participant == 0, "one that lives lost its slot");
                return;
              }
              const ObjectInfo info{
                  .name_space = 0,
                  .length = 1,
                  .crc32c = static_cast<std::uint32_t>(checksum(value, claimed.word)),
                  .has_crc = true,
                  .stored_at_ms = 0};
              protocol.describe(claimed, key, info);
              const bool committed = protocol.commit(claimed);
              require_in_model(committed || participant == 0, "one that lives lost its slot");
              locals[0] = committed;
            },
            {}};
  }

  // Copies an object as a load does, without a pin. What was copied is right, or is refused.
  Operation load(KeyWords key, bool check_generation, bool check_crc) {
    return {
        [=, this](Locals&) {
          Protocol protocol = this->protocol();
          const Protocol::Search search = protocol.find(key);
          if (!search.found) return;
          const std::uint64_t first = data(search.found->slot, 0).load(std::memory_order_relaxed);
          const std::uint64_t second = data(search.found->slot, 1).load(std::memory_order_relaxed);
          if (check_generation && !protocol.is_unchanged(*search.found)) return;
          const std::uint64_t crc = search.found->info.crc32c;
          const SlotWord seen = search.found->word;
          if (check_crc && (checksum(first, seen) != crc || checksum(second, seen) != crc)) {
            return;
          }
          require_in_model(first == second, "a load got half of an object");
          require_in_model(is_of(key, first), "a load got the bytes of another key");
        },
        {}};
  }

  // Pins, copies, and unpins. While the pin holds, nobody changes the bytes.
  std::vector<Operation> pinned_load(KeyWords key, std::uint8_t participant) {
    const auto pin = [=, this](Locals& locals) {
      Protocol protocol = this->protocol();
      const Protocol::Search search = protocol.find(key);
      if (!search.found) return;
      table().pins_used(participant).store(1, std::memory_order_release);
      if (!protocol.pin(*search.found, pin_of(participant))) return;
      locals = {1, search.found->slot, search.found->word.generation()};
    };
    const auto copy = [=, this](Locals& locals) {
      if (locals[0] == 0) return;
      const auto slot = static_cast<std::uint32_t>(locals[1]);
      for (std::uint32_t i = 0; i < kDataWords; ++i) {
        const std::uint64_t value = data(slot, i).load(std::memory_order_relaxed);
        require_in_model(is_of(key, value), "bytes changed under a pin");
      }
      require_in_model(protocol().word(slot).generation() == locals[2], "a pin was passed over");
    };
    const auto unpin = [=, this](Locals& locals) {
      if (std::exchange(locals[0], 0) != 0) Protocol::unpin(pin_of(participant));
    };
    return {{pin, {}}, {copy, {}}, {unpin, {}}};
  }

  // Takes back what participant 0 has left, as soon as `may_begin`.
  std::vector<Operation> reclaim(std::function<bool(const ModelState&)> may_begin) {
    std::vector<Operation> operations{{[this](Locals&) {
                                         const std::uint64_t word =
                                             table().state(0).load(std::memory_order_acquire);
                                         table().bury(0, word);
                                       },
                                       std::move(may_begin)}};
    for (std::uint32_t slot = 0; slot < slots_; ++slot) {
      operations.push_back({[this, slot](Locals&) { protocol().reclaim(slot); }, {}});
    }
    operations.push_back({[this](Locals&) {
                            const std::uint64_t word =
                                table().state(0).load(std::memory_order_acquire);
                            table().free(0, word);
                          },
                          {}});
    return operations;
  }

  // What must hold in every state, and at the end: every slot is free or whole.
  std::string check(const ModelState& state, bool is_end) {
    int valid = 0;
    for (std::uint32_t slot = 0; slot < slots_; ++slot) {
      const SlotWord seen = word(state, slot);
      const bool is_key = state.memory[entry(slot, 0).index] == kKey.first;
      valid += seen.state() == SlotState::kValid && is_key;
      if (!is_end) continue;
      if (seen.state() == SlotState::kWriting || seen.state() == SlotState::kDying) {
        return "a slot was lost";
      }
      if (seen.state() == SlotState::kFree || zombies) continue;
      const KeyWords key = is_key ? kKey : kOther;
      for (std::uint32_t i = 0; i < kDataWords; ++i) {
        if (!is_of(key, data_of(state, slot, i))) return "a slot holds the bytes of another";
      }
    }
    return valid > 1 ? "a key has two slots" : "";
  }

  Exploration explore_all(const std::vector<ModelThread>& threads) {
    start.threads.resize(threads.size());
    return explore(
        start, threads,
        [this](const ModelState& state, bool is_end) { return check(state, is_end); }, kStatesMax);
  }

  // The values of a key are those of its hundred.
  static bool is_of(KeyWords key, std::uint64_t value) { return value / 100 == key.first; }

  static constexpr std::uint32_t kEpoch = 7;
  ModelState start;
  bool zombies = false;  // a writer may go on after it was held for dead

 private:
  static constexpr std::size_t words_at(std::uint32_t) { return kParticipants * kRecordWords; }
  ModelWord& entry(std::uint32_t slot, std::uint32_t field) {
    return words_[words_at(slots_) + slots_ + std::size_t{slot} * kEntryWords + field];
  }

  std::uint32_t slots_;
  std::vector<ModelWord> words_;
};

void report(const char* scenario, const Exploration& result) {
  MESSAGE(std::string(scenario), ": ", result.states, " states, ", result.ends, " ends");
}

bool died(const ModelState& state) { return state.threads[0].dead; }

}  // namespace

TEST_SUITE("model of the slot protocol") {
  TEST_CASE("two writers of one key and a reader") {
    World world(2);
    const Exploration result = world.explore_all({{{world.store(kKey, 0, 100)}, false},
                                                  {{world.store(kKey, 1, 101)}, false},
                                                  {{world.load(kKey, true, false)}, false}});
    report("two writers of one key", result);
    CHECK(result.violation == "");
    CHECK(result.ends > 1);
  }

  TEST_CASE("two writers of one key, while a slot in front of the one that is free becomes free") {
    World world(2);
    world.put(0, kOther, 299, false);
    const auto remove = [&world](Locals&) {
      Protocol protocol = world.protocol();
      protocol.evict(0, protocol.word(0), Owner{.index = 2, .epoch = World::kEpoch});
    };
    const Exploration result = world.explore_all({{{world.store(kKey, 0, 100)}, false},
                                                  {{world.store(kKey, 1, 101)}, false},
                                                  {{{remove, {}}}, false},
                                                  {{world.load(kKey, true, false)}, false}});
    report("two writers of one key and two slots", result);
    CHECK(result.violation == "");
    CHECK(result.ends > 1);
  }

  TEST_CASE("two writers of two keys in one slot, which evict each other, and a reader") {
    World world(1);
    world.put(0, kOther, 299, false);
    const Exploration result = world.explore_all(
        {{{world.store(kKey, 0, 100)}, false},
         {{world.store(kOther, 1, 201)}, false},
         {{world.load(kOther, true, false), world.load(kKey, true, false)}, false}});
    report("two writers in one slot", result);
    CHECK(result.violation == "");
    CHECK(result.ends > 1);
  }

  TEST_CASE("without a look at the generation after the copy a reader gets another's bytes") {
    World world(1);
    world.put(0, kOther, 299, false);
    const Exploration result =
        world.explore_all({{{world.store(kKey, 0, 100)}, false},
                           {{world.load(kOther, /*check_generation=*/false, false)}, false}});
    CHECK_MESSAGE(result.violation != "", "the alias window is not there: the model sees nothing");
  }

  TEST_CASE("nobody changes what is pinned") {
    World world(1);
    world.put(0, kOther, 299, false);
    const Exploration result = world.explore_all({{{world.store(kKey, 0, 100)}, false},
                                                  {{world.store(kKey, 1, 101)}, false},
                                                  {world.pinned_load(kOther, 2), false}});
    report("two writers and a pin", result);
    CHECK(result.violation == "");
    CHECK(result.ends > 1);
  }

  TEST_CASE("a writer dies at any access, and its slot is taken back") {
    World world(2);
    world.put(0, kOther, 299, false);
    world.put(1, kOther, 298, true);  // nothing is free: the writer has to evict
    world.start.memory[world.data(1, 0).index] = 298;
    const Exploration result = world.explore_all({{{world.store(kKey, 0, 100)}, true},
                                                  {world.reclaim(died), false},
                                                  {{world.store(kKey, 1, 101)}, false}});
    report("a writer that dies", result);
    CHECK(result.violation == "");
    CHECK(result.ends > 1);
  }

  TEST_CASE("an evictor dies in the middle, and the object that is pinned stays") {
    World world(1);
    world.put(0, kOther, 299, false);
    const Exploration result = world.explore_all({{{world.store(kKey, 0, 100)}, true},
                                                  {world.reclaim(died), false},
                                                  {world.pinned_load(kOther, 2), false}});
    report("an evictor that dies", result);
    CHECK(result.violation == "");
    CHECK(result.ends > 1);
  }

  TEST_CASE("a writer that is held for dead and goes on is caught by the checksum") {
    World world(1);
    world.zombies = true;
    const auto always = [](const ModelState&) { return true; };
    const Exploration with_crc =
        world.explore_all({{{world.store(kKey, 0, 100)}, false},
                           {world.reclaim(always), false},
                           {{world.store(kOther, 1, 201), world.load(kOther, true, true)}, false}});
    report("a writer that comes back", with_crc);
    CHECK(with_crc.violation == "");

    World without(1);
    without.zombies = true;
    const Exploration no_crc = without.explore_all(
        {{{without.store(kKey, 0, 100)}, false},
         {without.reclaim(always), false},
         {{without.store(kOther, 1, 201), without.load(kOther, true, false)}, false}});
    CHECK_MESSAGE(no_crc.violation != "", "docs/region-format.md says that only the crc sees it");
  }
}
