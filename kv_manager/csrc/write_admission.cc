#include "kv_manager/csrc/write_admission.h"

namespace hymcache {
namespace {

wire::OfferState refusal(ReserveStatus status) {
  switch (status) {
    case ReserveStatus::kDeviceFull:
      return wire::OfferState::kDeviceFull;
    case ReserveStatus::kTooLarge:
      return wire::OfferState::kTooLarge;
    case ReserveStatus::kGranted:
    case ReserveStatus::kBufferFull:
      break;
  }
  return wire::OfferState::kBufferFull;
}

}  // namespace

WriteAdmission::WriteAdmission(EventLoop& loop, Device& device, ObjectDirectory& directory,
                               Clock::duration grant_lease)
    : loop_(loop), device_(device), directory_(directory), grant_lease_(grant_lease) {}

wire::OfferReplyRow WriteAdmission::offer(std::uint64_t peer, std::uint64_t name_space,
                                          const wire::OfferRow& row) {
  ++stats_.offered;
  wire::OfferReplyRow reply;
  const auto refuse = [&](wire::OfferState state) {
    reply.state = state;
    ++stats_.refused[static_cast<std::size_t>(state)];
    return reply;
  };
  if (directory_.find(row.key) != nullptr) return refuse(wire::OfferState::kStored);
  if (draining_) return refuse(wire::OfferState::kDraining);
  if (row.length == 0) return refuse(wire::OfferState::kTooLarge);
  const Reservation reservation = device_.reserve(row.length);
  if (reservation.status != ReserveStatus::kGranted) return refuse(refusal(reservation.status));
  if (!directory_.add_pending(row.key, name_space, reservation.address, row.length)) {
    device_.abort(reservation.write);
    return refuse(wire::OfferState::kDeviceFull);
  }
  Grant& grant = open_grant();
  grant.peer = peer;
  grant.key = row.key;
  grant.region_offset = reservation.region_offset;
  grant.length = row.length;
  grant.write = reservation.write;
  grant.granted_at = loop_.now();
  ++stats_.granted;
  reply.state = wire::OfferState::kGranted;
  reply.grant = grant.id;
  reply.region_offset = reservation.region_offset;
  return reply;
}

WriteAdmission::Grant& WriteAdmission::open_grant() {
  if (free_.empty()) {
    free_.push_back(static_cast<std::uint32_t>(grants_.size()));
    grants_.emplace_back();
  }
  const std::uint32_t place = free_.back();
  free_.pop_back();
  grants_[place] = {};
  grants_[place].id = (++serial_ << 32) | place;
  ++stats_.open;
  return grants_[place];
}

WriteAdmission::Grant* WriteAdmission::find(std::uint64_t id) {
  const auto place = static_cast<std::uint32_t>(id);
  if (id == 0 || place >= grants_.size() || grants_[place].id != id) return nullptr;
  return &grants_[place];
}

WriteAdmission::Grant* WriteAdmission::find(std::uint64_t id, std::uint64_t peer) {
  Grant* const grant = find(id);
  return grant != nullptr && grant->peer == peer ? grant : nullptr;
}

bool WriteAdmission::begin_write(std::uint64_t peer, const wire::WriteRow& row, iovec* where) {
  Grant* const grant = find(row.grant, peer);
  if (grant == nullptr || grant->length != row.length || grant->receiving || grant->written) {
    return false;
  }
  grant->receiving = true;
  *where = {.iov_base = device_.region().base + grant->region_offset, .iov_len = row.length};
  return true;
}

void WriteAdmission::end_write(std::uint64_t id) {
  Grant* const grant = find(id);
  if (grant == nullptr) return;
  grant->receiving = false;
  grant->written = true;
}

void WriteAdmission::cancel_write(std::uint64_t id) {
  if (Grant* const grant = find(id)) grant->receiving = false;
}

wire::CommitState WriteAdmission::commit(std::uint64_t peer, const wire::CommitRow& row,
                                         bool writes_by_itself) {
  Grant* const grant = find(row.grant, peer);
  if (grant == nullptr) return wire::CommitState::kNoGrant;
  if ((row.flags & wire::CommitRow::kAbort) != 0) {
    abort(*grant);
    return wire::CommitState::kAborted;
  }
  if (!grant->written && !writes_by_itself) {
    abort(*grant);
    return wire::CommitState::kNotWritten;
  }
  const std::uint64_t id = grant->id;
  if (on_end) on_end(id);
  device_.commit(grant->write);
  directory_.make_valid(grant->key, row.crc32c, row.flags & Entry::kHasCrc);
  ++stats_.committed;
  stats_.committed_bytes += grant->length;
  grant->id = 0;
  free_.push_back(static_cast<std::uint32_t>(id));
  --stats_.open;
  return wire::CommitState::kStored;
}

void WriteAdmission::abort(Grant& grant) {
  const auto place = static_cast<std::uint32_t>(grant.id);
  if (on_end) on_end(grant.id);
  directory_.forget_pending(grant.key);
  device_.abort(grant.write);
  grant.id = 0;
  free_.push_back(place);
  ++stats_.aborted;
  --stats_.open;
}

void WriteAdmission::on_peer_gone(std::uint64_t peer) {
  for (Grant& grant : grants_) {
    if (grant.id != 0 && grant.peer == peer) abort(grant);
  }
}

void WriteAdmission::expire() {
  const TimePoint now = loop_.now();
  for (Grant& grant : grants_) {
    if (grant.id != 0 && !grant.receiving && now - grant.granted_at > grant_lease_) abort(grant);
  }
}

WriteStats WriteAdmission::stats() const noexcept { return stats_; }

}  // namespace hymcache
