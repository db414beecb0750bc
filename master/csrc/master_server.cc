#include "master/csrc/master_server.h"

#include <algorithm>
#include <ctime>

namespace hymcache {
namespace {

std::uint64_t random_incarnation() {
  const wire::Nonce nonce = random_nonce();
  std::uint64_t incarnation = 0;
  std::memcpy(&incarnation, nonce.data(), sizeof incarnation);
  // Half the range, so that the version of the members, which counts up from it, does not wrap.
  return (incarnation >> 1) + 1;
}

std::uint64_t thread_cpu_ns() {
  timespec spent{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &spent);
  return static_cast<std::uint64_t>(spent.tv_sec) * 1'000'000'000u +
         static_cast<std::uint64_t>(spent.tv_nsec);
}

std::int64_t to_ms(Clock::duration duration) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(duration).count();
}

}  // namespace

MasterServer::Running::Running(const MasterOptions& options,
                               MetadataService::MembersChanged changed)
    : incarnation(random_incarnation()), thread("hymcache-master") {
  thread.loop().call([&] {
    service =
        std::make_unique<MetadataService>(thread.loop(), options, incarnation, std::move(changed));
    endpoints = service->server().endpoints();
  });
}

void MasterServer::Running::end() {
  // Calls that are under way get their answer before the loop ends, and none comes after.
  thread.stop();
  service.reset();
}

void MasterServer::start() {
  const std::lock_guard turn(turn_mutex_);
  if (running_) throw Error(ErrorKind::kConfig, "the master is running already");
  auto running = std::make_shared<Running>(
      options_, [this](std::uint64_t version) { set_members_version(version); });
  const std::lock_guard lock(mutex_);
  running_ = std::move(running);
}

void MasterServer::stop() {
  const std::lock_guard turn(turn_mutex_);
  std::shared_ptr<Running> running;
  {
    const std::lock_guard lock(mutex_);
    running = std::move(running_);
    members_changed_.notify_all();
  }
  if (running) running->end();
}

std::shared_ptr<MasterServer::Running> MasterServer::running() const {
  const std::lock_guard lock(mutex_);
  if (!running_) throw Error(ErrorKind::kUnavailable, "the master is not running");
  return running_;
}

std::vector<Endpoint> MasterServer::endpoints() const { return running()->endpoints; }

std::uint64_t MasterServer::incarnation() const { return running()->incarnation; }

MasterStats MasterServer::stats() const {
  const auto master = running();
  MasterStats stats;
  master->thread.loop().call([&] {
    const MetadataService& service = *master->service;
    const Catalog& catalog = service.catalog();
    stats.counters = service.counters();
    stats.server = service.server().stats();
    for (const auto& [id, node] : service.members().nodes()) {
      stats.nodes_alive += node.alive() ? 1 : 0;
      stats.nodes_lost += node.state == NodeState::kLost ? 1 : 0;
    }
    stats.rows = catalog.rows();
    stats.rows_hidden = catalog.hidden_rows();
    stats.rows_max = catalog.rows_max();
    stats.index_bytes = catalog.bytes();
    stats.cpu_ns = thread_cpu_ns();
    stats.namespaces = catalog.namespace_count();
    stats.largest_namespaces = catalog.largest_namespaces(kNamespacesListed);
  });
  return stats;
}

std::vector<NodeStatus> MasterServer::members() const {
  const auto master = running();
  std::vector<NodeStatus> members;
  master->thread.loop().call([&] {
    const TimePoint now = Clock::now();
    for (const auto& [id, node] : master->service->members().nodes()) {
      if (node.state == NodeState::kForgotten) continue;
      members.push_back(
          {.record = node,
           .lease_left_ms =
               node.alive() ? std::max<std::int64_t>(0, to_ms(node.lease_until - now)) : 0,
           .state_age_ms = to_ms(now - node.state_since)});
    }
  });
  std::sort(members.begin(), members.end(), [](const NodeStatus& a, const NodeStatus& b) {
    return a.record.member.name < b.record.member.name;
  });
  return members;
}

std::vector<std::vector<FoundRow>> MasterServer::lookup(const std::vector<ObjectKey>& keys) const {
  if (keys.size() > wire::kLookupKeysMax) {
    throw Error(ErrorKind::kConfig,
                "at most " + std::to_string(wire::kLookupKeysMax) + " keys can be looked up");
  }
  const auto master = running();
  std::vector<std::vector<FoundRow>> found(keys.size());
  master->thread.loop().call([&] {
    const MetadataService& service = *master->service;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      for (const Entry& row : service.catalog().rows_of(keys[i], kRowsOfKeyMax)) {
        const NodeRecord& node = service.members().nodes().at(row.node);
        found[i].push_back({.entry = row,
                            .shown = node.shows(row),
                            .node_name = wire::from_text(node.member.name)});
      }
    }
  });
  return found;
}

bool MasterServer::drain(NodeId id, bool draining) {
  const auto master = running();
  bool found = false;
  master->thread.loop().call([&] { found = master->service->drain(id, draining); });
  return found;
}

bool MasterServer::forget(NodeId id) {
  const auto master = running();
  bool found = false;
  master->thread.loop().call([&] { found = master->service->forget(id); });
  return found;
}

void MasterServer::set_members_version(std::uint64_t version) {
  const std::lock_guard lock(mutex_);
  members_version_ = version;
  members_changed_.notify_all();
}

std::uint64_t MasterServer::wait_members(std::uint64_t known, Clock::duration timeout) const {
  std::unique_lock lock(mutex_);
  members_changed_.wait_for(lock, timeout, [&] { return !running_ || members_version_ != known; });
  if (!running_) throw Error(ErrorKind::kUnavailable, "the master is not running");
  return members_version_;
}

}  // namespace hymcache
