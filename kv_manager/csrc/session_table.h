// Prefetch sessions: what requests will read, staged ahead of them in windows.
//
// A session is the ordered list of blocks that one request will read from this node. Blocks are
// issued to the device in order, as long as those not yet released fit the session's window (the
// paper: 128 MiB, at least one block). Sessions take turns in the order in which they came, those
// that are being read from before those that are not yet.
//
//   queued --issue--> issued --staged--> ready --WAIT--> handed (token out) --RELEASE--> done
//      |                 |                  |               \--inline--> sending --sent--> done
//      |                 +--> failed        +--revoke--> queued
//      +--> failed (the location is stale)
//
// A ready block of a session that nobody has read from yet may be revoked when another session's
// reader waits for a slot. A handed block stays pinned until it is released or its session ends.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "chm_device/csrc/device.h"
#include "kv_manager/csrc/object_directory.h"
#include "transport/csrc/event_loop.h"
#include "transport/csrc/wire.h"

namespace hymcache {

struct SessionLimits {
  std::uint64_t window_bytes = 128u << 20;  // paper, section on the KV manager
  std::uint32_t sessions_max = 4096;
  std::uint64_t blocks_max = 1u << 20;  // of all sessions together
  std::uint32_t lease_ms_max = 60'000;
};

struct SessionStats {
  std::uint64_t opened = 0;
  std::uint64_t expired = 0;
  std::uint64_t blocks_ready = 0;   // handed out or sent
  std::uint64_t blocks_missed = 0;  // stale locations
  std::uint64_t blocks_failed = 0;  // device errors
  std::uint64_t blocks_revoked = 0;
  std::uint64_t bytes_sent = 0;  // inline; what shared memory readers take is not seen here
  std::uint64_t bytes_handed = 0;
  std::uint32_t sessions = 0;
};

class SessionTable {
 public:
  // The answer to one WAIT; without rows when its time is over, or its session has ended
  // (`session_known` is false then). With `inline_bytes`, sent() is to be called once the bulk
  // bytes have left.
  struct Answer {
    std::uint64_t peer = 0;
    std::uint32_t request_id = 0;
    wire::SessionId session{};
    std::uint32_t first = 0;
    std::vector<wire::WaitRow> rows;
    bool session_known = true;
    bool inline_bytes = false;
    std::vector<iovec> bulk;
    std::function<void()> sent;
  };
  using Reply = std::function<void(Answer)>;

  SessionTable(EventLoop& loop, Device& device, const ObjectDirectory& directory,
               SessionLimits limits, Reply reply);
  ~SessionTable();

  // Called before what a session holds is given back, because it ends. May be empty.
  std::function<void(const wire::SessionId&)> on_end;

  enum class Result { kOk, kNoSession, kBusy };
  Result prefetch(std::uint64_t peer, const wire::PrefetchRequest& request, wire::Bytes rows);
  Result wait(std::uint64_t peer, std::uint32_t request_id, const wire::WaitRequest& request);
  void release(const wire::ReleaseRequest& request);
  void end(const wire::SessionId& id);
  // The object that a block of a session names; null when there is none (any more).
  const Entry* entry_of(const wire::SessionId& id, std::uint32_t index) const;

  void on_peer_gone(std::uint64_t peer);
  void on_staged(RequestId request);
  // Issues what windows and slots allow. Call it when slots may have become free.
  void pump();
  void expire();  // sessions idle beyond their lease; call it about once a second

  SessionStats stats() const noexcept;

 private:
  enum class State : std::uint8_t {
    kQueued,
    kIssued,
    kReady,
    kHanded,
    kSending,
    kDone,
    kMiss,
    kFailed
  };
  struct Block {
    wire::PrefetchRow row;
    State state = State::kQueued;
    RequestId request = 0;
  };
  struct Waiter {
    bool active = false;
    std::uint64_t peer = 0;
    std::uint32_t request_id = 0;
    std::uint32_t first = 0;
    std::uint32_t count_max = 0;
    bool inline_bytes = false;
    EventLoop::TimerId timer;
  };
  struct Session {
    wire::SessionId id{};
    std::uint64_t serial = 0;  // of opening: tells it from a later one of the same id
    std::uint64_t peer = 0;    // whose end is its end: who opened it, then who last waited
    bool claimed = false;      // somebody has waited
    bool wanting = false;      // stands in readers_ or, not yet claimed, in preparers_
    std::uint32_t next_issue = 0;
    std::uint64_t window_used_bytes = 0;  // issued and not released
    std::uint32_t lease_ms = 0;
    TimePoint last_used{};
    std::vector<Block> blocks;
    Waiter waiter;
  };
  struct IdHash {
    std::size_t operator()(const wire::SessionId& id) const noexcept {
      std::size_t hash;  // random by construction, and a collision costs a comparison only
      std::memcpy(&hash, id.data(), sizeof hash);
      return hash;
    }
  };
  struct Sending {
    RequestId request = 0;
    std::uint32_t index = 0;
  };
  enum class Issue { kIssued, kIdle, kNoSlot };

  void pump_all();
  Session* find(const wire::SessionId& id);
  void want(Session& session);
  std::deque<Session*>& queue_of(const Session& session);
  Session* prefer_starving();
  Issue issue_one(Session& session);
  bool revoke_one(const Session& in_favour_of);
  bool starves(const Session& session) const;
  void settle(Session& session, Block& block);
  void claim(Session& session);
  void try_answer(Session& session);
  void answer(Session& session, std::uint32_t count);
  void cancel_waiter(Session& session);
  void release_block(Session& session, Block& block);
  void finish_sending(const wire::SessionId& id, std::uint64_t serial,
                      const std::vector<Sending>& sent);
  void end(Session& session);

  EventLoop& loop_;
  Device& device_;
  const ObjectDirectory& directory_;
  const SessionLimits limits_;
  const Reply reply_;
  std::unordered_map<wire::SessionId, std::unique_ptr<Session>, IdHash> sessions_;
  // May issue more, in turn. Slots go to those that are being read from first: a session that waits
  // in its engine's queue has time, and what it would stage now might have to be revoked.
  std::deque<Session*> readers_;
  std::deque<Session*> preparers_;
  bool pumping_ = false;
  struct Owner {
    Session* session = nullptr;
    std::uint32_t index = 0;
  };
  std::vector<Owner> owners_;  // by request: requests of a device are small numbers
  std::uint64_t blocks_total_ = 0;
  std::uint64_t next_serial_ = 1;
  SessionStats stats_;
};

}  // namespace hymcache
