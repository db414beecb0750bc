// This process as a participant of a shared region: its record, its pins, and what it has seen of
// the others. There is no clock that hosts share: a lease is over for an observer when it has seen
// no beat for that long by its own clock.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "lookup/csrc/participant_table.h"

namespace hymcache::region {

class RegionMember {
 public:
  using Clock = std::chrono::steady_clock;
  using Table = ParticipantTable<SharedWord>;

  // Throws kUnavailable, naming `place`, where every record is taken.
  RegionMember(const Table& table, std::string name, std::chrono::milliseconds lease,
               std::string place);

  // Who acts; joins anew where others have held this process for dead. Throws as above.
  Owner owner();
  // The same without joining: what is left behind under it will be reclaimed.
  Owner last_owner() noexcept;

  // A pin's cell; null when all are taken, or while others hold this process for dead. It stays
  // this caller's until give_back().
  struct Cell {
    SharedWord* word = nullptr;
    std::uint32_t index = 0;
    Owner owner;
  };
  Cell take_cell() noexcept;
  // After the pin was published in it, or not: clears it, unless the record is another's by now.
  void give_back(const Cell& cell);

  // Tells the others that this process lives.
  void beat();
  // Looks at all beats; the participants that are dead now, to be reclaimed and freed. Where this
  // process has not looked for half a lease, the others may have stood still with it (a host that
  // was paused): their time begins anew.
  std::vector<std::uint32_t> observe(Clock::time_point now);
  // Clears what somebody who was held for dead may have left in our cells.
  void audit();
  // No record in front of ours has been seen to beat of late: some things only one needs to do.
  bool is_first(Clock::time_point now);
  std::chrono::milliseconds silent(std::uint32_t index, Clock::time_point now);

  // Gives the record back, with all pins. What is still `writing` is left to the others.
  void leave();

  std::uint64_t rejoined();

 private:
  struct Seen {
    std::uint64_t state = 0;
    std::uint64_t beats = 0;
    Clock::time_point since;
  };

  void join();

  const Table table_;
  const std::string name_;
  const std::chrono::milliseconds lease_;
  const std::string place_;
  std::mutex mutex_;
  Owner owner_;
  bool joined_ = false;
  std::uint64_t rejoined_ = 0;
  std::vector<std::uint32_t> free_cells_;
  std::vector<Seen> seen_;
  Clock::time_point observed_;
};

}  // namespace hymcache::region
