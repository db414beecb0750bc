// A storage node: one device, what lies on it, and who reads and writes it.
//
// Everything is owned by one event loop in a thread of its own; the public calls below hand their
// work to it and may come from any thread.
#pragma once

#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "chm_device/csrc/device.h"
#include "kv_manager/csrc/master_link.h"
#include "kv_manager/csrc/object_directory.h"
#include "kv_manager/csrc/reported_objects.h"
#include "kv_manager/csrc/session_table.h"
#include "kv_manager/csrc/verbs_peers.h"
#include "kv_manager/csrc/write_admission.h"
#include "transport/csrc/event_loop.h"
#include "transport/csrc/frame_server.h"

namespace hymcache {

struct StorageNodeOptions {
  std::string name;
  Endpoint listen;
  std::string advertise_host;  // what clients connect to; empty: the host of `listen`
  std::string unix_path;       // empty: no shared memory for clients on this host
  std::vector<Endpoint> masters;
  std::uint32_t connections_max = 4096;
  std::uint32_t objects_max = 1u << 24;
  SessionLimits sessions;
  Clock::duration grant_lease = kGrantLease;
  MacFunction mac;
  LogFunction log;                       // what happens
  LogFunction warn;                      // what is wrong
  std::shared_ptr<VerbsAcceptor> verbs;  // none: without RDMA; its memory is registered already
  std::uint16_t protocol_version_max = wire::kVersionMax;  // for tests of the negotiation
};

struct StorageNodeStats {
  NodeId node = 0;
  std::uint64_t incarnation = 0;
  std::uint64_t objects = 0;
  std::uint64_t object_bytes = 0;
  std::uint64_t index_bytes = 0;
  std::uint64_t corrupt_dropped = 0;
  std::uint64_t reports = 0;
  std::uint64_t flush_failures = 0;
  bool draining = false;
  DeviceStats device;
  SessionStats sessions;
  WriteStats writes;
  VerbsPeerStats verbs;
  FrameServerStats server;
  std::vector<MasterLinkStats> masters;
};

class StorageNode : private FrameServer::Handler {
 public:
  // Listens and serves when this returns. Throws ConfigError or DeviceError where it cannot.
  StorageNode(NodeId node, StorageNodeOptions options, std::unique_ptr<Device> device);
  ~StorageNode() override;

  // Closes all connections. Afterwards every call below throws Unavailable.
  void stop();
  std::vector<std::string> endpoints();
  std::string device_description();
  StorageNodeStats stats();
  void set_draining(bool draining);

 private:
  void start();
  void on_frame(FrameServer::Peer& peer, const wire::Header& header, wire::Bytes payload) override;
  void on_peer_gone(FrameServer::Peer& peer) override;
  void on_attach(FrameServer::Peer& peer, const wire::Header& header, wire::Bytes payload);
  void on_prefetch(FrameServer::Peer& peer, const wire::Header& header, wire::Bytes payload);
  void on_wait(FrameServer::Peer& peer, const wire::Header& header, wire::Bytes payload);
  void on_report(wire::Bytes payload);
  void on_offer(FrameServer::Peer& peer, const wire::Header& header, wire::Bytes payload);
  void on_write(FrameServer::Peer& peer, const wire::Header& header, wire::Bytes payload);
  void on_link(FrameServer::Peer& peer, const wire::Header& header, wire::Bytes payload);
  void on_unlink(FrameServer::Peer& peer, const wire::Header& header, wire::Bytes payload);
  void on_release(const wire::ReleaseRequest& request);
  void on_commit(FrameServer::Peer& peer, const wire::Header& header, wire::Bytes payload);
  void reply(SessionTable::Answer answer);
  void drive_device();
  bool may_flush();
  void on_tick();
  wire::Member describe() const;
  void apply_drain();

  const NodeId node_;
  const std::uint64_t incarnation_;
  const StorageNodeOptions options_;
  std::unique_ptr<Device> device_;
  LoopThread thread_;
  EventLoop& loop_;
  std::unique_ptr<ObjectDirectory> directory_;
  std::unique_ptr<SessionTable> sessions_;
  std::unique_ptr<WriteAdmission> writes_;
  std::unique_ptr<ReportedObjects> reported_;
  std::unique_ptr<VerbsPeers> verbs_;    // none: this node is without RDMA
  std::unique_ptr<FrameServer> server_;  // after what its connections refer to when they end
  std::vector<std::unique_ptr<MasterLink>> masters_;
  std::unordered_set<std::uint64_t> attached_;  // peers that write into the region themselves
  wire::PayloadWriter scratch_;
  bool drive_scheduled_ = false;
  bool drain_by_admin_ = false;
  TimePoint last_flush_turn_{};
  TimePoint last_commit_{};
  bool buffer_was_full_ = false;  // small objects run out of slots long before bytes
  EventLoop::TimerId tick_;
  std::uint64_t ticks_ = 0;
  std::uint64_t reports_ = 0;
  std::uint64_t corrupt_dropped_ = 0;
  std::uint64_t flush_failures_ = 0;
};

}  // namespace hymcache
