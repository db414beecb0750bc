#include "kv_manager/csrc/verbs_peers.h"

#include <algorithm>

namespace hymcache {

VerbsPeers::VerbsPeers(std::shared_ptr<VerbsAcceptor> acceptor, std::uint64_t address,
                       std::uint64_t region_bytes)
    : acceptor_(std::move(acceptor)), address_(address), region_bytes_(region_bytes) {}

wire::PayloadWriter VerbsPeers::connect(std::uint64_t peer, const wire::LinkEndpoint& endpoint) {
  close(peer);
  VerbsAcceptor::Accepted accepted;
  try {
    accepted = acceptor_->accept(peer, endpoint);
  } catch (const Error&) {
    ++stats_.refused;
    throw;
  }
  ++stats_.connects;
  peers_.insert(peer);
  if (accepted.block_keys) keyed_.insert(peer);
  accepted.regions.resize(std::min<std::size_t>(accepted.regions.size(), wire::kLinkRegionsMax));
  wire::PayloadWriter payload;
  payload.put(wire::LinkReply{.endpoint = accepted.endpoint,
                              .address = address_,
                              .region_bytes = region_bytes_,
                              .flags = accepted.block_keys ? wire::LinkReply::kBlockKeys : 0u,
                              .count = static_cast<std::uint32_t>(accepted.regions.size())});
  for (const wire::LinkRegion& region : accepted.regions) payload.put(region);
  return payload;
}

void VerbsPeers::close(std::uint64_t peer) {
  if (peers_.erase(peer) == 0) return;
  keyed_.erase(peer);
  acceptor_->drop(peer);  // its keys with it
  for (auto session = read_keys_.begin(); session != read_keys_.end();) {
    std::erase_if(session->second, [peer](const Held& held) { return held.peer == peer; });
    session = session->second.empty() ? read_keys_.erase(session) : std::next(session);
  }
  std::erase_if(write_keys_, [peer](const auto& entry) { return entry.second.peer == peer; });
}

std::vector<wire::VerbsKey> VerbsPeers::make_keys(std::uint64_t peer,
                                                  std::span<const VerbsAcceptor::Range> ranges,
                                                  bool writable) {
  if (ranges.empty()) return {};
  std::vector<wire::VerbsKey> keys = acceptor_->bind(peer, ranges, writable);
  keys.resize(ranges.size(), 0);
  const auto missing = static_cast<std::uint64_t>(std::count(keys.begin(), keys.end(), 0u));
  stats_.keys_missing += missing;
  stats_.keys_made += keys.size() - missing;
  return keys;
}

void VerbsPeers::put_read_keys(std::uint64_t peer, const wire::SessionId& session,
                               std::uint32_t first, std::span<const wire::WaitRow> rows,
                               wire::PayloadWriter& payload) {
  release(session, first, static_cast<std::uint32_t>(rows.size()));
  std::vector<VerbsAcceptor::Range> ranges;
  for (const wire::WaitRow& row : rows) {
    if (row.state != wire::BlockState::kReady) continue;
    ranges.push_back({.region_offset = row.region_offset, .bytes = row.length});
  }
  const std::vector<wire::VerbsKey> keys = make_keys(peer, ranges, /*writable=*/false);
  std::size_t next = 0;
  for (std::uint32_t i = 0; i < rows.size(); ++i) {
    const bool ready = rows[i].state == wire::BlockState::kReady;
    const wire::VerbsKey key = ready ? keys[next++] : 0;
    payload.put(key);
    if (key == 0) continue;
    read_keys_[session].push_back({.peer = peer, .key = key, .index = first + i});
  }
}

void VerbsPeers::put_write_keys(std::uint64_t peer, std::span<const wire::OfferReplyRow> rows,
                                std::span<const std::uint32_t> lengths,
                                wire::PayloadWriter& payload) {
  std::vector<VerbsAcceptor::Range> ranges;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].state != wire::OfferState::kGranted) continue;
    ranges.push_back({.region_offset = rows[i].region_offset, .bytes = lengths[i]});
  }
  const std::vector<wire::VerbsKey> keys = make_keys(peer, ranges, /*writable=*/true);
  std::size_t next = 0;
  for (const wire::OfferReplyRow& row : rows) {
    const bool granted = row.state == wire::OfferState::kGranted;
    const wire::VerbsKey key = granted ? keys[next++] : 0;
    payload.put(key);
    if (key != 0) write_keys_[row.grant] = {.peer = peer, .key = key};
  }
}

void VerbsPeers::unbind(std::span<const Held> held) {
  std::unordered_map<std::uint64_t, std::vector<wire::VerbsKey>> by_peer;
  for (const Held& one : held) by_peer[one.peer].push_back(one.key);
  for (const auto& [peer, keys] : by_peer) {
    if (!acceptor_->unbind(peer, keys)) ++stats_.keys_stuck;
  }
}

void VerbsPeers::release(const wire::SessionId& session, std::uint32_t first, std::uint32_t count) {
  const auto found = read_keys_.find(session);
  if (found == read_keys_.end()) return;
  std::vector<Held>& held = found->second;
  const auto gone = std::partition(held.begin(), held.end(), [&](const Held& one) {
    return one.index < first || one.index - first >= count;
  });
  unbind({gone, held.end()});
  held.erase(gone, held.end());
  if (held.empty()) read_keys_.erase(found);
}

void VerbsPeers::end(const wire::SessionId& session) {
  const auto found = read_keys_.find(session);
  if (found == read_keys_.end()) return;
  unbind(found->second);
  read_keys_.erase(found);
}

void VerbsPeers::end_grant(std::uint64_t grant) {
  const auto found = write_keys_.find(grant);
  if (found == write_keys_.end()) return;
  unbind({&found->second, 1});
  write_keys_.erase(found);
}

VerbsPeerStats VerbsPeers::stats() const {
  VerbsPeerStats stats = stats_;
  stats.peers = static_cast<std::uint32_t>(peers_.size());
  stats.keys_held = static_cast<std::uint32_t>(write_keys_.size());
  for (const auto& [session, held] : read_keys_) {
    stats.keys_held += static_cast<std::uint32_t>(held.size());
  }
  return stats;
}

}  // namespace hymcache
