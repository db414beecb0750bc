#include "master/csrc/member_table.h"

#include <algorithm>
#include <cassert>

namespace hymcache {

Enrolled MemberTable::enroll(const wire::Member& member, PeerId peer, TimePoint now) {
  NodeRecord* const known = find(member.node);
  if (known != nullptr && known->alive()) {
    if (known->member.name != member.name) return {EnrollState::kIdTaken, known, 0};
    // A process that was killed leaves no connection behind, so its successor need not wait.
    const bool other_process = known->member.incarnation != member.incarnation;
    if (other_process && known->peer != 0 && known->peer != peer && known->lease_until > now) {
      return {EnrollState::kNameTaken, known, 0};
    }
  } else if (alive_count_ >= wire::kNodesMax) {
    return {EnrollState::kFull, nullptr, 0};
  }
  NodeRecord& node = known != nullptr ? *known : nodes_[member.node];
  const bool is_new = known == nullptr || node.state == NodeState::kForgotten;
  const bool same_name = !is_new && node.member.name == member.name;
  const bool same_process = same_name && node.member.incarnation == member.incarnation;
  const PeerId replaced = node.peer != peer ? node.peer : 0;

  disconnect(node);
  node.peer = peer;
  by_peer_[peer] = member.node;
  node.member = member;
  node.epoch = ++epoch_;
  node.rows_current = 0;
  node.refused = 0;
  if (!same_process) {
    node.epoch_shown_min = node.epoch;
    node.rows_shown = 0;
    node.objects = node.sessions = 0;
  }
  node.lease_until = now + lease_;
  if (known == nullptr) {
    node.state_since = now;
    ++alive_count_;
  } else {
    set_state(node, NodeState::kAlive, now);
  }
  // What an operator wants of a node outlives its process.
  set_draining(node, same_name && node.draining);
  ++version_;
  return {EnrollState::kEnrolled, &node, replaced};
}

NodeRecord* MemberTable::renew(PeerId peer, TimePoint now) {
  const auto found = by_peer_.find(peer);
  if (found == by_peer_.end()) return nullptr;
  NodeRecord& node = nodes_.at(found->second);
  node.lease_until = now + lease_;
  return &node;
}

void MemberTable::detach(PeerId peer) {
  const auto found = by_peer_.find(peer);
  if (found != by_peer_.end()) disconnect(nodes_.at(found->second));
}

void MemberTable::disconnect(NodeRecord& node) {
  by_peer_.erase(node.peer);
  node.peer = 0;
}

void MemberTable::end_sync(NodeRecord& node) noexcept {
  node.epoch_shown_min = node.epoch;
  node.rows_shown = node.rows_current;
}

void MemberTable::set_state(NodeRecord& node, NodeState state, TimePoint now) {
  if (node.state == state) return;
  if (node.state == NodeState::kAlive) --alive_count_;
  if (node.state == NodeState::kLost) --lost_count_;
  if (state == NodeState::kAlive) ++alive_count_;
  if (state == NodeState::kLost) ++lost_count_;
  node.state = state;
  node.state_since = now;
  ++version_;
}

std::size_t MemberTable::expire(TimePoint now) {
  std::size_t lapsed = 0;
  std::vector<NodeRecord*> stale;
  for (auto& [id, node] : nodes_) {
    if (node.alive() && node.lease_until <= now) {
      disconnect(node);  // whatever it says next is answered with "register first"
      set_state(node, NodeState::kLost, now);
      ++lapsed;
    } else if (node.state == NodeState::kLost && node.state_since + kLostKept <= now) {
      stale.push_back(&node);
    }
  }
  for (NodeRecord* const node : stale) forget(*node, now);
  while (lost_count_ > kLostMax) drop_longest_lost(now);
  return lapsed;
}

void MemberTable::drop_longest_lost(TimePoint now) {
  NodeRecord* longest = nullptr;
  for (auto& [id, node] : nodes_) {
    if (node.state != NodeState::kLost) continue;
    if (longest == nullptr || node.state_since < longest->state_since) longest = &node;
  }
  forget(*longest, now);
}

std::optional<TimePoint> MemberTable::next_expiry() const {
  std::optional<TimePoint> next;
  for (const auto& [id, node] : nodes_) {
    if (node.state == NodeState::kForgotten) continue;
    const TimePoint due = node.alive() ? node.lease_until : node.state_since + kLostKept;
    next = next ? std::min(*next, due) : due;
  }
  return next;
}

void MemberTable::set_draining(NodeRecord& node, bool draining) noexcept {
  if (node.draining != draining) ++version_;
  node.draining = draining;
  node.member.state = draining ? wire::MemberState::kDraining : wire::MemberState::kAlive;
}

void MemberTable::forget(NodeRecord& node, TimePoint now) {
  assert(node.state == NodeState::kLost);
  set_state(node, NodeState::kForgotten, now);
  if (node.rows == 0) nodes_.erase(node.member.node);
}

void MemberTable::row_left(NodeRecord& node, const Entry& row) {
  assert(node.rows > 0);
  --node.rows;
  if (row.epoch >= node.epoch_shown_min) --node.rows_shown;
  if (row.epoch == node.epoch) --node.rows_current;
  if (node.rows == 0 && node.state == NodeState::kForgotten) nodes_.erase(node.member.node);
}

}  // namespace hymcache
