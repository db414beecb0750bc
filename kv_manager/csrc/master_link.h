// A node's connection to one master: registers, publishes what the node holds, and keeps its lease.
//
//   apart --connect (own thread)--> registering --> syncing (all rows) --SYNCED--> live
//     ^------------------------ lost, or silent for a lease -------------------------/
//
// The master is soft state: after every connection everything is published again, so nothing is
// queued while the master is away.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "kv_manager/csrc/object_directory.h"
#include "transport/csrc/channel.h"
#include "transport/csrc/framed_socket.h"

namespace hymcache {

using LogFunction = std::function<void(std::string_view line)>;

struct MasterLinkStats {
  std::string endpoint;
  std::string state;  // "apart", "registering", "syncing", "live"
  std::string last_error;
  std::uint64_t connects = 0;
  std::uint64_t published = 0;
  std::uint64_t withdrawn = 0;
  std::uint64_t refused = 0;  // rows the master had no room for
};

class MasterLink : private FramedSocket::Delegate {
 public:
  struct Hooks {
    std::function<wire::Member()> describe;             // this node, now
    std::function<wire::HeartbeatRequest()> heartbeat;  // its figures, now
    std::function<void()> drain_changed;
    LogFunction log;   // what happens
    LogFunction warn;  // what is wrong, once until it changes
  };

  MasterLink(EventLoop& loop, Endpoint endpoint, Identity identity, ObjectDirectory& directory,
             Hooks hooks);
  ~MasterLink() override;

  void publish(const Entry& entry);
  void withdraw(const ObjectKey& key, Generation generation);
  // Sends what was published and withdrawn now, rather than at the end of the loop's round.
  void flush();
  bool drain_wanted() const noexcept { return drain_wanted_; }
  MasterLinkStats stats() const;

 private:
  enum class State { kApart, kRegistering, kSyncing, kLive };

  void connect_in_thread();
  void on_connected(UniqueFd fd);
  void on_frame(FramedSocket& socket, const wire::Header& header, wire::Bytes payload) override;
  void on_closed(FramedSocket& socket, const std::string& reason) override;
  void send(wire::Type type, wire::Bytes head, wire::Bytes tail = {}, bool answered = true);
  void start_sync(const wire::RegisterReply& reply);
  void sync_more();
  void send_rows(std::span<const Entry> rows);
  void schedule_flush();
  void on_tick();

  EventLoop& loop_;
  const Endpoint endpoint_;
  const Identity identity_;
  ObjectDirectory& directory_;
  const Hooks hooks_;

  State state_ = State::kApart;
  std::unique_ptr<FramedSocket> socket_;
  std::uint32_t next_request_id_ = 1;
  std::uint32_t unanswered_ = 0;  // frames that are to be answered
  std::uint32_t publications_ = 0;
  std::uint64_t refused_ = 0;  // since REGISTER
  std::uint32_t sync_cursor_ = 0;
  bool sync_done_ = false;  // all rows are sent
  std::vector<Entry> rows_;
  std::vector<Entry> to_publish_;
  std::vector<wire::WithdrawRow> to_withdraw_;
  bool flush_scheduled_ = false;
  bool drain_wanted_ = false;
  Clock::duration lease_ = std::chrono::seconds(3);
  TimePoint last_heard_{};
  EventLoop::TimerId tick_;
  MasterLinkStats stats_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // for what the thread posts

  std::mutex mutex_;  // guards what follows, shared with the connecting thread
  std::condition_variable changed_;
  bool connect_wanted_ = true;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace hymcache
