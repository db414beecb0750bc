#include "kv_manager/csrc/session_table.h"

#include <algorithm>

namespace hymcache {
namespace {

// One inline answer is a turn of its connection: small enough to be fair, large enough to be worth
// a frame.
constexpr std::uint64_t kInlineBytesMax = 64u << 20;

}  // namespace

SessionTable::SessionTable(EventLoop& loop, Device& device, const ObjectDirectory& directory,
                           SessionLimits limits, Reply reply)
    : loop_(loop),
      device_(device),
      directory_(directory),
      limits_(limits),
      reply_(std::move(reply)) {}

SessionTable::~SessionTable() {
  while (!sessions_.empty()) end(*sessions_.begin()->second);
}

SessionTable::Session* SessionTable::find(const wire::SessionId& id) {
  const auto found = sessions_.find(id);
  return found == sessions_.end() ? nullptr : found->second.get();
}

SessionTable::Result SessionTable::prefetch(std::uint64_t peer,
                                            const wire::PrefetchRequest& request,
                                            wire::Bytes rows) {
  Session* session = find(request.session);
  const std::uint64_t blocks_before = session == nullptr ? 0 : session->blocks.size();
  if (blocks_before + request.count > wire::kSessionBlocksMax ||
      blocks_total_ + request.count > limits_.blocks_max) {
    // All of it or none: a reader would wait in vain for what a session does not hold.
    if (session != nullptr) end(request.session);
    return Result::kBusy;
  }
  if (session == nullptr) {
    if (sessions_.size() >= limits_.sessions_max) return Result::kBusy;
    auto opened = std::make_unique<Session>();
    opened->id = request.session;
    opened->serial = next_serial_++;
    opened->peer = peer;
    opened->lease_ms = std::clamp(request.lease_ms, 1u, limits_.lease_ms_max);
    session = opened.get();
    sessions_.emplace(request.session, std::move(opened));
    ++stats_.opened;
  }
  session->last_used = loop_.now();
  session->blocks.reserve(session->blocks.size() + request.count);
  for (std::uint32_t i = 0; i < request.count; ++i) {
    session->blocks.push_back({.row = wire::row_at<wire::PrefetchRow>(rows, i)});
  }
  blocks_total_ += request.count;
  want(*session);
  pump();
  return Result::kOk;
}

void SessionTable::want(Session& session) {
  if (session.wanting || session.next_issue >= session.blocks.size()) return;
  session.wanting = true;
  queue_of(session).push_back(&session);
}

std::deque<SessionTable::Session*>& SessionTable::queue_of(const Session& session) {
  return session.claimed ? readers_ : preparers_;
}

void SessionTable::pump() {
  // An answer may leave at once and free its slots while we stand in the loop below, which will
  // see them.
  if (pumping_) return;
  pumping_ = true;
  pump_all();
  pumping_ = false;
}

void SessionTable::pump_all() {
  while (!readers_.empty() || !preparers_.empty()) {
    std::deque<Session*>& queue = readers_.empty() ? preparers_ : readers_;
    Session* session = queue.front();
    Issue result = issue_one(*session);
    if (result == Issue::kNoSlot) {
      session = prefer_starving();
      if (session == nullptr) return;
      do {
        result = issue_one(*session);
      } while (result == Issue::kNoSlot && revoke_one(*session));
      if (result == Issue::kNoSlot) return;
    }
    queue.pop_front();
    if (result == Issue::kIssued) {
      queue.push_back(session);
    } else {
      session->wanting = false;
    }
  }
}

// Moves a reader that can do nothing but wait to the front. Null when there is none.
SessionTable::Session* SessionTable::prefer_starving() {
  const auto reader = std::find_if(readers_.begin(), readers_.end(),
                                   [this](const Session* s) { return starves(*s); });
  if (reader == readers_.end()) return nullptr;
  std::rotate(readers_.begin(), reader, reader + 1);
  return readers_.front();
}

SessionTable::Issue SessionTable::issue_one(Session& session) {
  while (session.next_issue < session.blocks.size()) {
    Block& block = session.blocks[session.next_issue];
    if (block.state != State::kQueued) {  // released before it was issued
      ++session.next_issue;
      continue;
    }
    const wire::PrefetchRow& row = block.row;
    const Entry* const entry = directory_.verify(row.key, row.address, row.generation);
    if (entry == nullptr || entry->length != row.length) {
      block.state = State::kMiss;
      ++stats_.blocks_missed;
      ++session.next_issue;
      try_answer(session);
      continue;
    }
    // At least one block, however large.
    if (session.window_used_bytes > 0 &&
        session.window_used_bytes + row.length > limits_.window_bytes) {
      return Issue::kIdle;
    }
    const RequestId request = device_.prefetch_object(row.address, row.length);
    if (request == 0) return Issue::kNoSlot;
    block.request = request;
    block.state = State::kIssued;
    session.window_used_bytes += row.length;
    if (owners_.size() <= request) owners_.resize(request + 1);
    owners_[request] = {.session = &session, .index = session.next_issue};
    ++session.next_issue;
    settle(session, block);
    return Issue::kIssued;
  }
  return Issue::kIdle;
}

bool SessionTable::starves(const Session& session) const {
  if (!session.waiter.active || session.waiter.first >= session.blocks.size()) return false;
  return session.blocks[session.waiter.first].state == State::kQueued;
}

bool SessionTable::revoke_one(const Session& in_favour_of) {
  Session* victim = nullptr;
  std::uint32_t index = 0;
  for (const auto& [id, session] : sessions_) {
    if (session.get() == &in_favour_of || session->claimed) continue;
    if (victim != nullptr && victim->serial > session->serial) continue;
    // From the end of what it has staged: that is read last.
    std::uint32_t end = session->window_used_bytes == 0 ? 0 : session->next_issue;
    while (end > 0 && session->blocks[end - 1].state != State::kReady) --end;
    if (end == 0) continue;
    victim = session.get();
    index = end - 1;
  }
  if (victim == nullptr) return false;
  Block& block = victim->blocks[index];
  release_block(*victim, block);
  block.state = State::kQueued;
  victim->next_issue = index;  // what follows and is issued already will be passed over
  ++stats_.blocks_revoked;
  want(*victim);
  return true;
}

void SessionTable::on_staged(RequestId request) {
  if (request >= owners_.size() || owners_[request].session == nullptr) return;
  Session& session = *owners_[request].session;
  settle(session, session.blocks[owners_[request].index]);
}

void SessionTable::settle(Session& session, Block& block) {
  if (block.state != State::kIssued) return;
  StagedObject staged;
  switch (device_.prefetch_poll(block.request, &staged)) {
    case PrefetchState::kPending:
      return;
    case PrefetchState::kReady:
      block.state = State::kReady;
      break;
    case PrefetchState::kFailed:
      release_block(session, block);
      block.state = State::kFailed;
      ++stats_.blocks_failed;
      break;
  }
  try_answer(session);
}

SessionTable::Result SessionTable::wait(std::uint64_t peer, std::uint32_t request_id,
                                        const wire::WaitRequest& request) {
  Session* const session = find(request.session);
  if (session == nullptr) return Result::kNoSession;
  if (session->waiter.active) answer(*session, 0);  // one reader at a time: the newer one
  session->peer = peer;
  claim(*session);
  session->last_used = loop_.now();
  Waiter& waiter = session->waiter;
  waiter = {.active = true,
            .peer = peer,
            .request_id = request_id,
            .first = request.first,
            .count_max = std::clamp(request.count_max, 1u, wire::kWaitRowsMax),
            .inline_bytes = (request.flags & wire::WaitRequest::kInline) != 0,
            .timer = {}};
  try_answer(*session);
  if (!waiter.active) return Result::kOk;
  const wire::SessionId id = session->id;
  const std::uint32_t timeout_ms = std::min(request.timeout_ms, limits_.lease_ms_max);
  waiter.timer = loop_.after(std::chrono::milliseconds(timeout_ms), [this, id] {
    Session* const waiting = find(id);
    if (waiting != nullptr && waiting->waiter.active) answer(*waiting, 0);
  });
  pump();  // it may have become a reader that others make room for
  return Result::kOk;
}

void SessionTable::claim(Session& session) {
  if (session.claimed) return;
  if (session.wanting) std::erase(preparers_, &session);
  session.wanting = false;
  session.claimed = true;
  want(session);
}

void SessionTable::try_answer(Session& session) {
  const Waiter& waiter = session.waiter;
  if (!waiter.active || waiter.first >= session.blocks.size()) return;
  std::uint32_t count = 0;
  std::uint64_t bytes = 0;
  while (count < waiter.count_max && waiter.first + count < session.blocks.size()) {
    const Block& block = session.blocks[waiter.first + count];
    if (block.state == State::kQueued || block.state == State::kIssued) break;
    if (waiter.inline_bytes && count > 0 && bytes + block.row.length > kInlineBytesMax) break;
    bytes += block.row.length;
    ++count;
  }
  if (count > 0) answer(session, count);
}

void SessionTable::answer(Session& session, std::uint32_t count) {
  const Waiter waiter = session.waiter;
  cancel_waiter(session);
  session.last_used = loop_.now();
  Answer answer{.peer = waiter.peer,
                .request_id = waiter.request_id,
                .session = session.id,
                .first = waiter.first,
                .rows = {},
                .session_known = true,
                .inline_bytes = waiter.inline_bytes,
                .bulk = {},
                .sent = nullptr};
  answer.rows.reserve(count);
  std::vector<Sending> sending;
  bool gave_back = false;
  for (std::uint32_t i = 0; i < count; ++i) {
    Block& block = session.blocks[waiter.first + i];
    wire::WaitRow row;
    row.length = block.row.length;
    StagedObject staged;
    const bool here = (block.state == State::kReady || block.state == State::kHanded) &&
                      device_.prefetch_poll(block.request, &staged) == PrefetchState::kReady;
    const Entry* const entry =
        here ? directory_.verify(block.row.key, block.row.address, block.row.generation) : nullptr;
    if (entry != nullptr) {
      row.state = wire::BlockState::kReady;
      row.crc32c = entry->crc32c;
      row.flags = entry->flags & Entry::kHasCrc;
      row.region_offset = staged.region_offset;
      row.generation_word = staged.generation_word;
      row.generation_value = staged.generation_value;
      ++stats_.blocks_ready;
      if (waiter.inline_bytes) {
        answer.bulk.push_back({.iov_base = device_.region().base + staged.region_offset,
                               .iov_len = block.row.length});
        sending.push_back({.request = block.request, .index = waiter.first + i});
        owners_[block.request] = {};
        block.request = 0;
        block.state = State::kSending;
        stats_.bytes_sent += block.row.length;
      } else {
        block.state = State::kHanded;
        stats_.bytes_handed += block.row.length;
      }
    } else {
      row.state =
          block.state == State::kFailed ? wire::BlockState::kDeviceError : wire::BlockState::kMiss;
      if (block.state == State::kReady) {  // the object is gone since it was staged
        release_block(session, block);
        block.state = State::kMiss;
        ++stats_.blocks_missed;
        gave_back = true;
      }
    }
    answer.rows.push_back(row);
  }
  if (waiter.inline_bytes) {
    answer.sent = [this, id = session.id, serial = session.serial, sending = std::move(sending)] {
      finish_sending(id, serial, sending);
    };
  }
  reply_(std::move(answer));
  if (!gave_back) return;
  want(session);
  pump();
}

void SessionTable::finish_sending(const wire::SessionId& id, std::uint64_t serial,
                                  const std::vector<Sending>& sent) {
  for (const Sending& one : sent) device_.prefetch_release(one.request);
  Session* const session = find(id);
  if (session != nullptr && session->serial == serial) {
    session->last_used = loop_.now();
    for (const Sending& one : sent) {
      Block& block = session->blocks[one.index];
      block.state = State::kDone;
      session->window_used_bytes -= block.row.length;
    }
    want(*session);
  }
  pump();
}

void SessionTable::cancel_waiter(Session& session) {
  if (!session.waiter.active) return;
  loop_.cancel(session.waiter.timer);
  session.waiter.active = false;
}

void SessionTable::release(const wire::ReleaseRequest& request) {
  Session* const session = find(request.session);
  if (session == nullptr) return;
  session->last_used = loop_.now();
  const std::uint64_t last =
      std::min<std::uint64_t>(session->blocks.size(), std::uint64_t{request.first} + request.count);
  for (std::uint64_t i = request.first; i < last; ++i) {
    Block& block = session->blocks[i];
    if (block.state == State::kSending) continue;  // released when it has left
    release_block(*session, block);
    block.state = State::kDone;
  }
  try_answer(*session);  // nobody waits for what is released
  want(*session);
  pump();
}

void SessionTable::release_block(Session& session, Block& block) {
  if (block.request == 0) return;
  owners_[block.request] = {};
  device_.prefetch_release(block.request);
  block.request = 0;
  session.window_used_bytes -= block.row.length;
}

void SessionTable::end(const wire::SessionId& id) {
  if (Session* const session = find(id)) {
    end(*session);
    pump();
  }
}

void SessionTable::end(Session& session) {
  const Waiter waiter = session.waiter;
  cancel_waiter(session);
  if (on_end) on_end(session.id);
  for (Block& block : session.blocks) release_block(session, block);
  if (session.wanting) std::erase(queue_of(session), &session);
  blocks_total_ -= session.blocks.size();
  sessions_.erase(wire::SessionId(session.id));
  if (!waiter.active) return;
  reply_({.peer = waiter.peer,
          .request_id = waiter.request_id,
          .session = {},
          .first = waiter.first,
          .rows = {},
          .session_known = false,
          .inline_bytes = false,
          .bulk = {},
          .sent = nullptr});
}

const Entry* SessionTable::entry_of(const wire::SessionId& id, std::uint32_t index) const {
  const auto found = sessions_.find(id);
  if (found == sessions_.end() || index >= found->second->blocks.size()) return nullptr;
  const wire::PrefetchRow& row = found->second->blocks[index].row;
  return directory_.verify(row.key, row.address, row.generation);
}

void SessionTable::on_peer_gone(std::uint64_t peer) {
  std::vector<Session*> gone;
  for (const auto& [id, session] : sessions_) {
    if (session->peer == peer) gone.push_back(session.get());
  }
  for (Session* session : gone) end(*session);
  if (!gone.empty()) pump();
}

void SessionTable::expire() {
  const TimePoint now = loop_.now();
  std::vector<Session*> expired;
  for (const auto& [id, session] : sessions_) {
    if (session->waiter.active) continue;  // a reader waits, for as long as it said
    if (now - session->last_used > std::chrono::milliseconds(session->lease_ms)) {
      expired.push_back(session.get());
    }
  }
  for (Session* session : expired) end(*session);
  stats_.expired += expired.size();
  if (!expired.empty()) pump();
}

SessionStats SessionTable::stats() const noexcept {
  SessionStats stats = stats_;
  stats.sessions = static_cast<std::uint32_t>(sessions_.size());
  return stats;
}

}  // namespace hymcache
