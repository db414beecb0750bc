// Who stores objects: the nodes of a service, each with its lease and the epochs of its rows.
//
//                 REGISTER                       lease lapses
//    (unknown) ------------> alive -------------------------------------> lost
//        ^                   |  ^  \__ heartbeat, publish, ...: renewed    |  |
//        |                   |  |                                         |  |
//        |                   |  +------------- REGISTER ------------------+  |
//        |                   +-- REGISTER (the next epoch begins)            |
//        +---- forgotten, once the index holds no row of it <----------------+
//
// A node's rows carry the epoch in which they were published: each REGISTER begins a new one, with
// a number that no node had before. A row is shown while its node is alive and its epoch is not
// below the node's epoch_shown_min. A process that registers again (the connection broke) keeps
// showing what it had published before until it says SYNCED; a new process starts from nothing.
// Both are a change of one number here, however many rows there are.
//
// Time comes in from outside. Not for use by several threads at once.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>

#include "hymcache/csrc/entry.h"
#include "transport/csrc/event_loop.h"
#include "transport/csrc/wire.h"

namespace hymcache {

using PeerId = std::uint64_t;  // of a connection; 0: none

enum class NodeState : std::uint8_t { kAlive, kLost, kForgotten };

struct NodeRecord {
  wire::Member member{};
  NodeState state = NodeState::kAlive;
  bool draining = false;
  std::uint32_t epoch = 0;            // of its latest REGISTER
  std::uint32_t epoch_shown_min = 0;  // rows of earlier ones are as if they were not there
  PeerId peer = 0;
  TimePoint lease_until{};
  TimePoint state_since{};
  std::uint64_t objects = 0;   // in the node's own words
  std::uint64_t sessions = 0;  // likewise
  std::uint64_t refused = 0;   // rows since REGISTER for which there was no room
  // Rows of the index with this node's id, kept by ObjectDirectory.
  std::uint64_t rows = 0;
  std::uint64_t rows_shown = 0;    // of an epoch that is shown; so they are while it is alive
  std::uint64_t rows_current = 0;  // of the present epoch

  bool alive() const noexcept { return state == NodeState::kAlive; }
  bool shows(const Entry& row) const noexcept { return alive() && row.epoch >= epoch_shown_min; }
};

enum class EnrollState : std::uint8_t {
  kEnrolled,
  kNameTaken,  // another live process has this name
  kIdTaken,    // a live node of another name has this id
  kFull,       // kNodesMax nodes are alive
};
struct Enrolled {
  EnrollState state = EnrollState::kEnrolled;
  NodeRecord* node = nullptr;  // the new one, or the one in the way; null when full
  PeerId replaced = 0;         // the connection that it had before, if another
};

class MemberTable {
 public:
  // Lost nodes are kept to be seen, for so long and so many at most.
  static constexpr std::chrono::hours kLostKept{1};
  static constexpr std::size_t kLostMax = wire::kNodesMax;

  // Versions go up from first_version: where that is drawn at random, those of a master and of its
  // successor do not meet.
  explicit MemberTable(Clock::duration lease, std::uint64_t first_version = 1)
      : lease_(lease), version_(first_version) {}

  // REGISTER by the process at `peer`.
  Enrolled enroll(const wire::Member& member, PeerId peer, TimePoint now);
  // The node whose process is at `peer`, with its lease renewed; null if it is not registered.
  NodeRecord* renew(PeerId peer, TimePoint now);
  // The connection is gone; the node has until its lease lapses to come back.
  void detach(PeerId peer);
  // SYNCED: what was not published in this epoch is no longer shown.
  void end_sync(NodeRecord& node) noexcept;
  // Nodes whose lease is over are lost; those lost for long are forgotten. Returns how many lapsed.
  std::size_t expire(TimePoint now);
  // When expire() is due next, if ever.
  std::optional<TimePoint> next_expiry() const;

  void set_draining(NodeRecord& node, bool draining) noexcept;
  void forget(NodeRecord& node, TimePoint now);  // must be lost; the record may be gone after it
  // A row of this node has left the index. Drops a forgotten record with its last row.
  void row_left(NodeRecord& node, const Entry& row);

  // Forgotten ones included, while the index holds rows of theirs.
  NodeRecord* find(NodeId id) noexcept {
    const auto found = nodes_.find(id);
    return found == nodes_.end() ? nullptr : &found->second;
  }
  const std::unordered_map<NodeId, NodeRecord>& nodes() const noexcept { return nodes_; }
  std::size_t alive_count() const noexcept { return alive_count_; }
  // Changes with whatever MEMBERS would answer, but for the use of space.
  std::uint64_t version() const noexcept { return version_; }
  Clock::duration lease() const noexcept { return lease_; }

 private:
  void set_state(NodeRecord& node, NodeState state, TimePoint now);
  void disconnect(NodeRecord& node);
  void drop_longest_lost(TimePoint now);

  const Clock::duration lease_;
  std::unordered_map<NodeId, NodeRecord> nodes_;
  std::unordered_map<PeerId, NodeId> by_peer_;
  std::size_t alive_count_ = 0;
  std::size_t lost_count_ = 0;
  std::uint32_t epoch_ = 0;  // the last one given
  std::uint64_t version_;
};

}  // namespace hymcache
