#include "lookup/csrc/cluster.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "transport/csrc/host_id.h"
#include "transport/csrc/shm_node_channel.h"
#include "transport/csrc/tcp_node_channel.h"
#include "transport/csrc/verbs_node_channel.h"

namespace hymcache {
namespace {

constexpr std::size_t kIdleConnectionsMax = 4;
// A lookup may name a node that joined a moment ago, many times over: asked for once in a while.
constexpr auto kRefreshPause = std::chrono::milliseconds(50);
// A lookup stands in the time to first token. Who is on the same host, or on a network of
// microseconds, answers within it.
constexpr auto kSpin = std::chrono::microseconds(40);

template <class Connection>
class Pool {
 public:
  std::unique_ptr<Connection> take() {
    const std::lock_guard lock(mutex_);
    if (idle_.empty()) return nullptr;
    std::unique_ptr<Connection> connection = std::move(idle_.back());
    idle_.pop_back();
    return connection;
  }
  void put(std::unique_ptr<Connection> connection) {
    const std::lock_guard lock(mutex_);
    if (!closed_ && idle_.size() < kIdleConnectionsMax) idle_.push_back(std::move(connection));
  }
  // For good: what is put from now on is closed.
  void close() {
    std::vector<std::unique_ptr<Connection>> ended;  // closed without the lock: RDMA takes its time
    const std::lock_guard lock(mutex_);
    closed_ = true;
    ended.swap(idle_);
  }
  // None when it may be tried; else why not.
  std::optional<std::string> refusal(TimePoint now) {
    const std::lock_guard lock(mutex_);
    if (backoff_.may_try(now)) return std::nullopt;
    return reason_;
  }
  // The other connections are likely to be broken too.
  void failed(const std::string& reason) {
    std::vector<std::unique_ptr<Connection>> ended;  // as above
    const std::lock_guard lock(mutex_);
    ended.swap(idle_);
    backoff_.failed(Clock::now());
    reason_ = reason;
  }
  void succeeded() {
    const std::lock_guard lock(mutex_);
    backoff_.succeeded();
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Connection>> idle_;
  bool closed_ = false;
  Backoff backoff_;
  std::string reason_;  // of the last failure
};

void check_time(TimePoint deadline) {
  if (Clock::now() < deadline) return;
  throw Error(ErrorKind::kUnavailable, "the deadline is over", ETIMEDOUT);
}

// SplitMix64's finalizer: enough to spread what is uniform already.
std::uint64_t mix(std::uint64_t x) noexcept {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

}  // namespace

struct Cluster::Master final : Home<Channel> {
  Endpoint endpoint;
  Pool<Channel> pool;

  void give_back(std::unique_ptr<Channel> channel) override {
    if (channel->open()) {
      pool.put(std::move(channel));
    } else {
      pool.failed("master " + endpoint.text() + " failed a moment ago");
    }
  }
};

struct Cluster::Node final : Home<NodeChannel> {
  wire::Member member;
  Pool<NodeChannel> pool;
  const std::shared_ptr<SharedRegion> region = std::make_shared<SharedRegion>();
  std::atomic<bool> shm_failed{false};
  std::shared_ptr<VerbsTarget> verbs;  // none: this client is without RDMA

  std::string name() const { return "node " + wire::from_text(member.name); }
  void give_back(std::unique_ptr<NodeChannel> channel) override {
    if (channel->channel().open()) {
      pool.put(std::move(channel));
    } else if (!channel->discarded()) {
      pool.failed(name() + " failed a moment ago");
    }
  }
};

Cluster::Cluster(ClientOptions options)
    : options_(std::move(options)),
      host_(this_host()),
      identity_{.role = wire::Role::kClient,
                .name = options_.name,
                .features = options_.verbs ? wire::kFeatureVerbs : 0,
                .mac = options_.mac} {
  if (options_.masters.empty()) {
    throw Error(ErrorKind::kConfig, "no master is named: give at least one as host:port");
  }
  for (const Endpoint& endpoint : options_.masters) {
    masters_.push_back(std::make_shared<Master>());
    masters_.back()->endpoint = endpoint;
  }
}

Cluster::~Cluster() = default;

void Cluster::check_open() const {
  if (closed_.load(std::memory_order_relaxed)) {
    throw Error(ErrorKind::kUnavailable, "the client is closed");
  }
}

void Cluster::close() {
  closed_.store(true, std::memory_order_relaxed);
  for (const auto& master : masters_) master->pool.close();
  std::map<NodeId, std::shared_ptr<Node>> nodes;
  {
    const std::lock_guard lock(mutex_);
    nodes.swap(nodes_);
  }
  for (const auto& [id, node] : nodes) node->pool.close();
  if (options_.verbs) options_.verbs->close();
}

Cluster::MasterLoan Cluster::borrow_master(TimePoint deadline) {
  check_open();
  check_time(deadline);
  const std::size_t first = preferred_master_.load(std::memory_order_relaxed);
  std::string reason;
  for (std::size_t i = 0; i < masters_.size(); ++i) {
    const std::size_t at = (first + i) % masters_.size();
    const std::shared_ptr<Master>& master = masters_[at];
    if (auto channel = master->pool.take(); channel && !channel->stale()) {
      return {master, std::move(channel)};
    }
    const TimePoint now = Clock::now();
    if (const auto refusal = master->pool.refusal(now)) {
      if (reason.empty()) reason = *refusal;
      continue;
    }
    try {
      auto channel = Channel::connect(master->endpoint, identity_, wire::Role::kMaster,
                                      std::min(deadline, now + options_.connect_timeout));
      channel->set_spin(kSpin);
      master->pool.succeeded();
      connects_.fetch_add(1, std::memory_order_relaxed);
      preferred_master_.store(at, std::memory_order_relaxed);
      return {master, std::move(channel)};
    } catch (const Error& error) {
      connect_failures_.fetch_add(1, std::memory_order_relaxed);
      master->pool.failed(error.what());
      if (error.kind() != ErrorKind::kUnavailable && masters_.size() == 1) throw;
      reason = error.what();
    }
  }
  throw Error(ErrorKind::kUnavailable, reason);
}

void Cluster::refresh_members(TimePoint deadline) {
  MasterLoan master = borrow_master(deadline);
  const Channel::Frame frame = master->call(wire::Type::kMembers, {}, {}, deadline);
  wire::PayloadReader reader(frame.payload, "MEMBERS reply");
  const auto head = reader.take<wire::MembersReply>();
  const wire::Bytes rows = reader.take_rows<wire::Member>(head.count, wire::kNodesMax);
  // Before the lock, so that connections of nodes that are gone are closed without it.
  std::map<NodeId, std::shared_ptr<Node>> nodes;
  const std::lock_guard lock(mutex_);
  for (std::uint32_t i = 0; i < head.count; ++i) {
    const auto member = wire::row_at<wire::Member>(rows, i);
    const auto old = nodes_.find(member.node);
    if (old != nodes_.end() && old->second->member.incarnation == member.incarnation &&
        old->second->member.tcp == member.tcp) {
      old->second->member.state = member.state;
      nodes.emplace(member.node, old->second);
      continue;
    }
    auto node = std::make_shared<Node>();
    node->member = member;
    if (options_.verbs) node->verbs = std::make_shared<VerbsTarget>(options_.verbs, verbs_record_);
    nodes.emplace(member.node, std::move(node));
  }
  nodes_.swap(nodes);
  members_version_ = head.version;
  note_members_version(head.version);
  members_known_ = true;
  members_doubted_ = false;
  members_fetched_ = Clock::now();
}

std::shared_ptr<Cluster::Node> Cluster::find_node(NodeId node, TimePoint deadline) {
  const auto known = [&]() -> std::shared_ptr<Node> {
    const auto found = nodes_.find(node);
    return found == nodes_.end() ? nullptr : found->second;
  };
  std::shared_ptr<Node> before;
  bool refresh = false;
  {
    const std::lock_guard lock(mutex_);
    before = known();
    const bool current =
        !members_doubted_ && members_version_ == seen_version_.load(std::memory_order_relaxed);
    if (before && current) return before;
    refresh = !members_known_ || Clock::now() - members_fetched_ > kRefreshPause;
  }
  if (refresh) {
    try {
      refresh_members(deadline);
    } catch (const Error&) {
      if (!before) throw;
      return before;  // it may live while the master does not
    }
  }
  const std::lock_guard lock(mutex_);
  if (std::shared_ptr<Node> found = known()) return found;
  throw Error(ErrorKind::kUnavailable, "the node that held it is no longer a member");
}

Cluster::NodeLoan Cluster::borrow_node(NodeId id, TimePoint deadline) {
  check_open();
  check_time(deadline);
  const std::shared_ptr<Node> node = find_node(id, deadline);
  while (auto channel = node->pool.take()) {
    if (!channel->channel().stale()) return {node, std::move(channel)};
  }
  const TimePoint now = Clock::now();
  if (const auto refusal = node->pool.refusal(now)) {
    throw Error(ErrorKind::kUnavailable, *refusal);
  }
  try {
    auto channel = connect_node(*node, std::min(deadline, now + options_.connect_timeout));
    node->pool.succeeded();
    connects_.fetch_add(1, std::memory_order_relaxed);
    return {node, std::move(channel)};
  } catch (const Error& error) {
    connect_failures_.fetch_add(1, std::memory_order_relaxed);
    node->pool.failed(error.what());
    const std::lock_guard lock(mutex_);
    members_doubted_ = true;  // it may have started again, somewhere else
    throw;
  }
}

std::unique_ptr<NodeChannel> Cluster::connect_node(Node& node, TimePoint deadline) {
  const bool same_host = node.member.host == host_ && node.member.unix_path.front() != '\0';
  if (options_.transport == TransportChoice::kShm) {
    if (!same_host) {
      throw Error(ErrorKind::kUnavailable, node.name() + " shares no memory with this host");
    }
    return connect_shm(node, deadline);
  }
  const bool try_shm = options_.transport == TransportChoice::kAuto && same_host &&
                       !node.shm_failed.load(std::memory_order_relaxed) && !node.region->failed();
  if (try_shm) {
    try {
      return connect_shm(node, deadline);
    } catch (const Error&) {
      connect_failures_.fetch_add(1, std::memory_order_relaxed);
    }
  }
  auto channel = connect_tcp(node, deadline);
  // The node lives and yet cannot be reached by its socket (from another container, say): not
  // tried again.
  if (try_shm) node.shm_failed.store(true, std::memory_order_relaxed);
  return channel;
}

// Over TCP, and by RDMA where both ends have it.
std::unique_ptr<NodeChannel> Cluster::connect_tcp(Node& node, TimePoint deadline) const {
  const Endpoint endpoint = Endpoint::parse(wire::from_text(node.member.tcp));
  auto channel = connect_to(endpoint, node, deadline);
  const bool offered = (channel->server().features & wire::kFeatureVerbs) != 0;
  if (node.verbs && (offered || options_.transport == TransportChoice::kVerbs)) {
    return std::make_unique<VerbsNodeChannel>(std::move(channel), node.verbs, offered);
  }
  return std::make_unique<TcpNodeChannel>(std::move(channel));
}

std::unique_ptr<Channel> Cluster::connect_to(const Endpoint& endpoint, const Node& node,
                                             TimePoint deadline) const {
  auto channel = Channel::connect(endpoint, identity_, wire::Role::kNode, deadline);
  if (channel->server().incarnation != node.member.incarnation) {
    throw Error(ErrorKind::kUnavailable, node.name() + " has restarted");
  }
  return channel;
}

std::unique_ptr<NodeChannel> Cluster::connect_shm(Node& node, TimePoint deadline) {
  auto channel = connect_to(
      {.host = wire::from_text(node.member.unix_path), .port = 0, .is_unix = true}, node, deadline);
  channel->set_spin(kSpin);
  return std::make_unique<ShmNodeChannel>(std::move(channel), node.region);
}

void Cluster::require_members(TimePoint deadline) {
  check_open();
  bool refresh = false;
  {
    const std::lock_guard lock(mutex_);
    const TimePoint now = Clock::now();
    // Without a lookup nothing tells of changes, so a writer looks about once a second.
    const Clock::duration fresh =
        nodes_.empty() ? Clock::duration(kRefreshPause) : std::chrono::seconds(1);
    refresh = !members_known_ || now - members_fetched_ > fresh ||
              (members_version_ != seen_version_.load(std::memory_order_relaxed) &&
               now - members_fetched_ > kRefreshPause);
  }
  if (refresh) refresh_members(deadline);
}

std::vector<NodeId> Cluster::nodes_for_write(const ObjectKey& key, TimePoint deadline) {
  require_members(deadline);
  std::uint64_t seed;
  std::memcpy(&seed, key.data(), sizeof seed);
  std::vector<std::pair<std::uint64_t, NodeId>> ranked;
  {
    const std::lock_guard lock(mutex_);
    const TimePoint now = Clock::now();
    for (const auto& [id, node] : nodes_) {
      if (node->member.state != wire::MemberState::kAlive || node->pool.refusal(now)) continue;
      ranked.emplace_back(mix(seed ^ mix(id)), id);
    }
  }
  std::sort(ranked.rbegin(), ranked.rend());
  std::vector<NodeId> nodes;
  for (const auto& [score, id] : ranked) nodes.push_back(id);
  return nodes;
}

std::size_t Cluster::member_count() {
  const std::lock_guard lock(mutex_);
  return nodes_.size();
}

}  // namespace hymcache
