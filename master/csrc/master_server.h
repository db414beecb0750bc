// A master in a thread of its own. Every function may be called from any thread.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "master/csrc/metadata_service.h"

namespace hymcache {

struct MasterStats {
  MasterCounters counters;
  FrameServerStats server;
  std::uint64_t nodes_alive = 0;
  std::uint64_t nodes_lost = 0;
  std::uint64_t rows = 0;
  std::uint64_t rows_hidden = 0;  // no longer shown, and not yet reclaimed
  std::uint64_t rows_max = 0;
  std::uint64_t index_bytes = 0;
  std::uint64_t cpu_ns = 0;  // of the thread
  std::uint64_t namespaces = 0;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> largest_namespaces;  // with their rows
};

struct NodeStatus {
  NodeRecord record;
  std::int64_t lease_left_ms = 0;  // of a node that is alive
  std::int64_t state_age_ms = 0;
};

struct FoundRow {
  Entry entry;
  bool shown = false;
  std::string node_name;
};

class MasterServer {
 public:
  static constexpr std::size_t kNamespacesListed = 32;
  static constexpr std::size_t kRowsOfKeyMax = 64;

  explicit MasterServer(MasterOptions options) : options_(std::move(options)) {}
  ~MasterServer() { stop(); }
  MasterServer(const MasterServer&) = delete;
  MasterServer& operator=(const MasterServer&) = delete;

  // Listens and serves, with an empty index. Throws ConfigError where it cannot listen, or when it
  // runs already.
  void start();
  void stop();  // idempotent

  // These throw Unavailable when the master is not running.
  std::vector<Endpoint> endpoints() const;  // as bound: port 0 replaced
  std::uint64_t incarnation() const;
  MasterStats stats() const;
  std::vector<NodeStatus> members() const;  // alive and lost, by name
  std::vector<std::vector<FoundRow>> lookup(const std::vector<ObjectKey>& keys) const;
  bool drain(NodeId id, bool draining);  // false: no such node
  bool forget(NodeId id);                // likewise; ConfigError for a node that is alive

  // Waits until the version of the members is another than `known`, the time is over or the master
  // stops; returns the version. 0 is never a version.
  std::uint64_t wait_members(std::uint64_t known, Clock::duration timeout) const;

 private:
  // What a running master consists of; shared with callers that were in the middle of it.
  struct Running {
    explicit Running(const MasterOptions& options, MetadataService::MembersChanged changed);
    ~Running() { end(); }
    void end();  // idempotent

    const std::uint64_t incarnation;
    LoopThread thread;
    std::unique_ptr<MetadataService> service;  // of the loop
    std::vector<Endpoint> endpoints;
  };

  std::shared_ptr<Running> running() const;
  void set_members_version(std::uint64_t version);

  const MasterOptions options_;
  std::mutex turn_mutex_;     // one start() or stop() at a time
  mutable std::mutex mutex_;  // guards what follows; never held while waiting for the loop
  mutable std::condition_variable members_changed_;
  std::shared_ptr<Running> running_;
  std::uint64_t members_version_ = 0;
};

}  // namespace hymcache
