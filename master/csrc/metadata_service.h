// The master's answers, one function for each message of its protocol. Lives in one event loop.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "master/csrc/catalog.h"
#include "master/csrc/member_table.h"
#include "transport/csrc/frame_server.h"

namespace hymcache {

struct MasterOptions {
  static constexpr std::uint32_t kRowsMaxDefault = 1u << 26;  // 4 GiB of rows, when all are there

  std::vector<Endpoint> listen;
  std::string name = "master";
  std::chrono::milliseconds lease{3000};
  std::uint32_t connections_max = 4096;
  std::uint32_t rows_max = kRowsMaxDefault;
  MacFunction mac;  // empty: peers need no secret
};

// What has been counted since the start.
struct MasterCounters {
  std::uint64_t lookups = 0;
  std::uint64_t lookup_keys = 0;
  std::uint64_t lookup_hits = 0;
  std::uint64_t registrations = 0;
  std::uint64_t registrations_refused = 0;
  std::uint64_t leases_lapsed = 0;
  std::uint64_t rows_published = 0;
  std::uint64_t rows_refused = 0;
  std::uint64_t rows_withdrawn = 0;
  std::uint64_t rows_swept = 0;
};

class MetadataService final : private FrameServer::Handler {
 public:
  using MembersChanged = std::function<void(std::uint64_t version)>;

  // Listens at once; throws ConfigError where it cannot.
  MetadataService(EventLoop& loop, const MasterOptions& options, std::uint64_t incarnation,
                  MembersChanged members_changed);
  ~MetadataService() override;

  // Both return false where there is no such node.
  bool drain(NodeId id, bool draining);
  bool forget(NodeId id);  // throws ConfigError for a node that is alive

  const MasterCounters& counters() const noexcept { return counters_; }
  const MemberTable& members() const noexcept { return members_; }
  const Catalog& catalog() const noexcept { return catalog_; }
  const FrameServer& server() const noexcept { return server_; }

 private:
  using Peer = FrameServer::Peer;

  void on_frame(Peer& peer, const wire::Header& header, wire::Bytes payload) override;
  void on_peer_gone(Peer& peer) override;
  void on_lookup(Peer& peer, const wire::Header& header, wire::Bytes payload);
  void on_members(Peer& peer, const wire::Header& header, wire::Bytes payload);
  void on_register(Peer& peer, const wire::Header& header, wire::Bytes payload);
  void on_publish(Peer& peer, NodeRecord& node, const wire::Header& header, wire::Bytes payload);
  void on_withdraw(Peer& peer, NodeRecord& node, const wire::Header& header, wire::Bytes payload);
  void on_synced(Peer& peer, NodeRecord& node, const wire::Header& header, wire::Bytes payload);
  void on_heartbeat(Peer& peer, NodeRecord& node, const wire::Header& header, wire::Bytes payload);
  void on_node_frame(Peer& peer, const wire::Header& header, wire::Bytes payload);

  void expire_leases();
  void schedule_expiry();
  void schedule_sweep();
  void announce_members();

  EventLoop& loop_;
  const MembersChanged members_changed_;
  MemberTable members_;
  Catalog catalog_;
  MasterCounters counters_;
  std::uint64_t announced_version_ = 0;
  EventLoop::TimerId expiry_timer_;
  EventLoop::TimerId sweep_timer_;
  bool expiry_scheduled_ = false;
  bool sweep_scheduled_ = false;
  FrameServer server_;  // last: it calls the handler
};

}  // namespace hymcache
