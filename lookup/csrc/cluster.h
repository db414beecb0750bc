// The masters and the nodes as a client sees them, and its connections to them.
//
// Connections are kept in pools and lent to one thread at a time. A peer that failed is left alone
// for a while, so that nobody waits for it again and again.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/csrc/backoff.h"
#include "transport/csrc/node_channel.h"
#include "transport/csrc/verbs.h"

namespace hymcache {

enum class TransportChoice { kAuto, kShm, kVerbs, kTcp };

struct ClientOptions {
  std::vector<Endpoint> masters;
  TransportChoice transport = TransportChoice::kAuto;
  std::string name;
  MacFunction mac;
  Clock::duration deadline = std::chrono::seconds(10);  // paper: then recompute
  Clock::duration connect_timeout = std::chrono::seconds(1);
  bool checksums = true;
  std::shared_ptr<VerbsInitiator> verbs;  // none: without RDMA
};

class Cluster {
 public:
  explicit Cluster(ClientOptions options);
  ~Cluster();

  template <class Connection>
  struct Home {
    virtual ~Home() = default;
    virtual void give_back(std::unique_ptr<Connection> connection) = 0;
  };
  // A connection on loan. Given back when it goes out of scope.
  template <class Connection>
  class Loan {
   public:
    Loan(std::shared_ptr<Home<Connection>> home, std::unique_ptr<Connection> connection)
        : home_(std::move(home)), connection_(std::move(connection)) {}
    Loan(Loan&&) noexcept = default;
    Loan& operator=(Loan&&) = delete;
    ~Loan() {
      if (connection_) home_->give_back(std::move(connection_));
    }
    Connection* operator->() const noexcept { return connection_.get(); }
    Connection& operator*() const noexcept { return *connection_; }

   private:
    std::shared_ptr<Home<Connection>> home_;
    std::unique_ptr<Connection> connection_;
  };
  using MasterLoan = Loan<Channel>;
  using NodeLoan = Loan<NodeChannel>;

  const ClientOptions& options() const noexcept { return options_; }

  // To the first master that answers. Throws Unavailable when none does.
  MasterLoan borrow_master(TimePoint deadline);
  // Throws Unavailable when the node is not a member, cannot be reached, or failed just now.
  NodeLoan borrow_node(NodeId node, TimePoint deadline);

  // Tells that a LOOKUP came with this version of the membership: a newer one is fetched when a
  // node is next asked for.
  void note_members_version(std::uint64_t version) noexcept {
    seen_version_.store(version, std::memory_order_relaxed);
  }
  // Makes sure that the members are known, as of about a second ago. Throws Unavailable when they
  // cannot be asked for, and ConfigError or ProtocolError where the only master says so.
  void require_members(TimePoint deadline);
  // The nodes that take writes, those that failed just now left out, the best for `key` first:
  // rendezvous hashing, so that one conversation's blocks stay together and nodes share the load.
  std::vector<NodeId> nodes_for_write(const ObjectKey& key, TimePoint deadline);

  std::uint64_t connects() const noexcept { return connects_.load(std::memory_order_relaxed); }
  std::uint64_t connect_failures() const noexcept {
    return connect_failures_.load(std::memory_order_relaxed);
  }
  const VerbsRecord& verbs() const noexcept { return *verbs_record_; }
  std::size_t member_count();
  // Closes idle connections; nothing is borrowed from now on.
  void close();

 private:
  struct Master;
  struct Node;

  void check_open() const;
  std::shared_ptr<Node> find_node(NodeId node, TimePoint deadline);
  void refresh_members(TimePoint deadline);
  std::unique_ptr<NodeChannel> connect_node(Node& node, TimePoint deadline);
  std::unique_ptr<Channel> connect_to(const Endpoint& endpoint, const Node& node,
                                      TimePoint deadline) const;
  std::unique_ptr<NodeChannel> connect_shm(Node& node, TimePoint deadline);
  std::unique_ptr<NodeChannel> connect_tcp(Node& node, TimePoint deadline) const;

  const ClientOptions options_;
  const wire::HostId host_;
  const Identity identity_;
  const std::shared_ptr<VerbsRecord> verbs_record_ = std::make_shared<VerbsRecord>();
  std::vector<std::shared_ptr<Master>> masters_;
  std::atomic<std::size_t> preferred_master_{0};

  std::mutex mutex_;  // guards what follows
  std::map<NodeId, std::shared_ptr<Node>> nodes_;
  std::uint64_t members_version_ = 0;
  bool members_known_ = false;
  bool members_doubted_ = false;  // a member could not be reached
  TimePoint members_fetched_{};

  std::atomic<bool> closed_{false};
  std::atomic<std::uint64_t> seen_version_{0};
  std::atomic<std::uint64_t> connects_{0};
  std::atomic<std::uint64_t> connect_failures_{0};
};

}  // namespace hymcache
