#include "kv_manager/csrc/master_link.h"

#include <algorithm>
#include <array>
#include <utility>

namespace hymcache {
namespace {

constexpr auto kConnectTimeout = std::chrono::seconds(1);  // also what ending may have to wait for
constexpr auto kBackoffMin = std::chrono::milliseconds(100);
constexpr auto kBackoffMax = std::chrono::seconds(5);
// Frames on their way to a master that has not yet answered: enough to keep it busy.
constexpr std::uint32_t kUnansweredMax = 8;
// An answer costs both ends a wake-up, and a writer waits while its block is published: only one
// publication in so many asks for it.
constexpr std::uint32_t kPublicationsPerAnswer = 16;
// Beyond this many rows a slow master is better served by starting anew.
constexpr std::size_t kQueuedRowsMax = 1u << 20;

}  // namespace

MasterLink::MasterLink(EventLoop& loop, Endpoint endpoint, Identity identity,
                       ObjectDirectory& directory, Hooks hooks)
    : loop_(loop),
      endpoint_(std::move(endpoint)),
      identity_(std::move(identity)),
      directory_(directory),
      hooks_(std::move(hooks)),
      rows_(wire::kPublishRowsMax) {
  stats_.endpoint = endpoint_.text();
  tick_ = loop_.after(lease_ / 3, [this] { on_tick(); });
  thread_ = std::thread([this] { connect_in_thread(); });
}

MasterLink::~MasterLink() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
  *alive_ = false;
  loop_.cancel(tick_);
}

// Name resolution, connecting and the handshake block, so they have a thread of their own; the
// loop gets the socket when all that is done.
void MasterLink::connect_in_thread() {
  Clock::duration backoff = kBackoffMin;
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || connect_wanted_; });
    if (stopping_) return;
    lock.unlock();
    std::string error;
    try {
      auto channel = Channel::connect(endpoint_, identity_, wire::Role::kMaster,
                                      Clock::now() + kConnectTimeout);
      auto fd = std::make_shared<UniqueFd>(channel->release());
      lock.lock();
      connect_wanted_ = false;
      lock.unlock();
      backoff = kBackoffMin;
      loop_.post([this, alive = alive_, fd] {
        if (*alive) on_connected(std::move(*fd));
      });
    } catch (const Error& failure) {
      error = failure.what();
      loop_.post([this, alive = alive_, error] {
        if (!*alive) return;
        if (stats_.last_error != error) hooks_.warn(error);  // once, not at every attempt
        stats_.last_error = error;
      });
    }
    lock.lock();
    if (error.empty()) continue;
    changed_.wait_for(lock, backoff, [this] { return stopping_; });
    backoff = std::min<Clock::duration>(backoff * 2, kBackoffMax);
  }
}

void MasterLink::on_connected(UniqueFd fd) {
  socket_ = std::make_unique<FramedSocket>(loop_, std::move(fd), static_cast<Delegate&>(*this));
  ++stats_.connects;
  state_ = State::kRegistering;
  unanswered_ = 0;
  last_heard_ = loop_.now();
  const wire::Member member = hooks_.describe();
  send(wire::Type::kRegister, wire::as_bytes(member));
}

void MasterLink::send(wire::Type type, wire::Bytes head, wire::Bytes tail, bool answered) {
  if (answered) ++unanswered_;
  socket_->send(type, 0, next_request_id_++, head, tail);
}

void MasterLink::on_frame(FramedSocket&, const wire::Header& header, wire::Bytes payload) {
  last_heard_ = loop_.now();
  if (unanswered_ > 0) --unanswered_;
  wire::PayloadReader reader(payload, wire::type_name(header.type));
  switch (header.type) {
    case wire::Type::kRegister:
      start_sync(reader.take<wire::RegisterReply>());
      return;
    case wire::Type::kPublish:
      break;
    case wire::Type::kWithdraw:
      break;
    case wire::Type::kSynced:
      state_ = State::kLive;
      stats_.last_error.clear();
      hooks_.log("registered with master " + endpoint_.text() + ", " +
                 std::to_string(directory_.objects()) + " objects published");
      break;
    case wire::Type::kHeartbeat: {
      const auto reply = reader.take<wire::HeartbeatReply>();
      lease_ = std::chrono::milliseconds(std::clamp(reply.lease_ms, 100u, 600'000u));
      stats_.refused += reply.refused - std::exchange(refused_, reply.refused);
      const bool drain = (reply.flags & wire::HeartbeatReply::kDrain) != 0;
      if (drain != drain_wanted_) {
        drain_wanted_ = drain;
        hooks_.drain_changed();
      }
      break;
    }
    case wire::Type::kError: {
      const auto error = reader.take<wire::ErrorReply>();
      socket_->close("the master refuses: " + wire::from_text(error.message));
      return;
    }
    default:
      throw Error(ErrorKind::kProtocol,
                  std::string("a master sent ") + wire::type_name(header.type));
  }
  sync_more();
  flush();
}

void MasterLink::start_sync(const wire::RegisterReply& reply) {
  lease_ = std::chrono::milliseconds(std::clamp(reply.lease_ms, 100u, 600'000u));
  loop_.cancel(tick_);  // it may have been set for a longer lease
  tick_ = loop_.after(lease_ / 3, [this] { on_tick(); });
  state_ = State::kSyncing;
  sync_cursor_ = 0;
  sync_done_ = false;
  refused_ = 0;
  to_publish_.clear();  // all of it is published now
  to_withdraw_.clear();
  sync_more();
}

void MasterLink::sync_more() {
  if (state_ != State::kSyncing || sync_done_) return;
  while (unanswered_ < kUnansweredMax) {
    const std::size_t count = directory_.copy_rows(sync_cursor_, rows_);
    if (count > 0) send_rows(std::span(rows_).first(count));
    if (sync_cursor_ == 0) {
      sync_done_ = true;
      send(wire::Type::kSynced, {});
      return;
    }
  }
}

void MasterLink::send_rows(std::span<const Entry> rows) {
  wire::PublishRequest head;
  head.count = static_cast<std::uint32_t>(rows.size());
  const bool answered = state_ != State::kLive || ++publications_ % kPublicationsPerAnswer == 0;
  if (!answered) head.flags = wire::PublishRequest::kNoAnswer;
  send(wire::Type::kPublish, wire::as_bytes(head), std::as_bytes(rows), answered);
  stats_.published += rows.size();
}

void MasterLink::publish(const Entry& entry) {
  if (state_ != State::kSyncing && state_ != State::kLive) return;
  to_publish_.push_back(entry);
  schedule_flush();
}

void MasterLink::withdraw(const ObjectKey& key, Generation generation) {
  if (state_ != State::kSyncing && state_ != State::kLive) return;
  to_withdraw_.push_back({.key = key, .generation = generation});
  schedule_flush();
}

void MasterLink::schedule_flush() {
  if (flush_scheduled_) return;
  flush_scheduled_ = true;
  loop_.defer([this, alive = alive_] {
    if (*alive) flush();
  });
}

void MasterLink::flush() {
  flush_scheduled_ = false;
  if (state_ != State::kSyncing && state_ != State::kLive) return;
  if (to_publish_.size() + to_withdraw_.size() > kQueuedRowsMax) {
    socket_->close("the master does not keep up; starting over");
    return;
  }
  // Publications first: a withdrawal names a generation, so it never undoes a later publication,
  // but one sent before its own publication would be lost.
  std::size_t sent = 0;
  while (sent < to_publish_.size() && unanswered_ < kUnansweredMax) {
    const std::size_t count =
        std::min<std::size_t>(to_publish_.size() - sent, wire::kPublishRowsMax);
    send_rows(std::span(to_publish_).subspan(sent, count));
    sent += count;
  }
  to_publish_.erase(to_publish_.begin(), to_publish_.begin() + static_cast<std::ptrdiff_t>(sent));
  if (!to_publish_.empty()) return;
  sent = 0;
  while (sent < to_withdraw_.size() && unanswered_ < kUnansweredMax) {
    const std::size_t count =
        std::min<std::size_t>(to_withdraw_.size() - sent, wire::kPublishRowsMax);
    wire::WithdrawRequest head;
    head.count = static_cast<std::uint32_t>(count);
    send(wire::Type::kWithdraw, wire::as_bytes(head),
         std::as_bytes(std::span(to_withdraw_).subspan(sent, count)));
    sent += count;
  }
  stats_.withdrawn += sent;
  to_withdraw_.erase(to_withdraw_.begin(),
                     to_withdraw_.begin() + static_cast<std::ptrdiff_t>(sent));
}

void MasterLink::on_tick() {
  if (socket_ && !socket_->closing()) {
    if (loop_.now() - last_heard_ > lease_) {
      socket_->close("the master is silent");
    } else if (state_ == State::kLive || state_ == State::kSyncing) {
      const wire::HeartbeatRequest beat = hooks_.heartbeat();
      send(wire::Type::kHeartbeat, wire::as_bytes(beat));
    }
  }
  tick_ = loop_.after(lease_ / 3, [this] { on_tick(); });
}

void MasterLink::on_closed(FramedSocket&, const std::string& reason) {
  if (stats_.last_error != reason) hooks_.warn("lost master " + endpoint_.text() + ": " + reason);
  stats_.last_error = reason;
  state_ = State::kApart;
  socket_.reset();
  to_publish_.clear();
  to_withdraw_.clear();
  // A master that accepts and then refuses must not be asked without pause.
  loop_.after(std::chrono::milliseconds(200), [this, alive = alive_] {
    if (!*alive) return;
    {
      const std::lock_guard lock(mutex_);
      connect_wanted_ = true;
    }
    changed_.notify_all();
  });
}

MasterLinkStats MasterLink::stats() const {
  MasterLinkStats stats = stats_;
  switch (state_) {
    case State::kApart:
      stats.state = "apart";
      break;
    case State::kRegistering:
      stats.state = "registering";
      break;
    case State::kSyncing:
      stats.state = "syncing";
      break;
    case State::kLive:
      stats.state = "live";
      break;
  }
  return stats;
}

}  // namespace hymcache
