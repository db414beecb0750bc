#include "lookup/csrc/store_client.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace hymcache {
namespace {

// How long a node keeps what was staged for a request that waits in its engine's queue.
constexpr std::uint32_t kSessionLeaseMs = 30'000;
// LOOKUP frames on their way at once: a long prefix costs one round trip, not one a batch.
constexpr std::size_t kLookupsInFlight = 8;
constexpr auto kAbandonTimeout = std::chrono::milliseconds(200);

wire::PrefetchRow prefetch_row(const Entry& entry) {
  return {.key = entry.key,
          .address = entry.address,
          .generation = entry.generation,
          .length = entry.length};
}

std::uint64_t bytes_of(std::span<const Segment> place) {
  std::uint64_t bytes = 0;
  for (const Segment& segment : place) bytes += segment.bytes;
  return bytes;
}

// A stream that is left in the middle would answer the next question with what was asked before.
struct CloseUnlessDone {
  Channel& channel;
  bool done = false;
  ~CloseUnlessDone() {
    if (!done) channel.close();
  }
};

BlockStatus failure_status(TimePoint deadline) {
  return Clock::now() >= deadline ? BlockStatus::kDeadline : BlockStatus::kUnavailable;
}

}  // namespace

StoreClient::StoreClient(ClientOptions options) : cluster_(std::move(options)) {}

void StoreClient::look_up_batches(Channel& master, std::span<const ObjectKey> keys,
                                  TimePoint deadline,
                                  const std::function<bool(std::span<const Entry>)>& each) {
  const std::size_t batches = (keys.size() + wire::kLookupKeysMax - 1) / wire::kLookupKeysMax;
  std::array<std::uint32_t, kLookupsInFlight> ids{};
  std::array<Entry, wire::kLookupKeysMax> rows;
  CloseUnlessDone guard{.channel = master};
  bool wanted = true;
  std::size_t sent = 0;
  for (std::size_t received = 0; received < sent || (wanted && received < batches); ++received) {
    while (wanted && sent < batches && sent - received < kLookupsInFlight) {
      const auto batch = keys.subspan(
          sent * wire::kLookupKeysMax,
          std::min<std::size_t>(wire::kLookupKeysMax, keys.size() - sent * wire::kLookupKeysMax));
      const wire::LookupRequest head{.count = static_cast<std::uint32_t>(batch.size())};
      ids[sent % kLookupsInFlight] =
          master.send(wire::Type::kLookup, wire::as_bytes(head), std::as_bytes(batch), deadline);
      ++sent;
    }
    const Channel::Frame frame =
        master.receive(wire::Type::kLookup, ids[received % kLookupsInFlight], deadline);
    wire::PayloadReader reader(frame.payload, "LOOKUP reply");
    const auto head = reader.take<wire::LookupReply>();
    const std::size_t asked =
        std::min<std::size_t>(wire::kLookupKeysMax, keys.size() - received * wire::kLookupKeysMax);
    const wire::Bytes raw = reader.take_rows<Entry>(head.count, wire::kLookupKeysMax);
    if (head.count != asked) {
      throw Error(ErrorKind::kProtocol, "a LOOKUP was answered for other keys");
    }
    std::memcpy(static_cast<void*>(rows.data()), raw.data(), raw.size());
    cluster_.note_members_version(head.members_version);
    // What is on its way is received all the same: the connection goes back in order.
    if (wanted) wanted = each(std::span(rows).first(asked));
  }
  guard.done = true;
}

std::vector<Entry> StoreClient::lookup(std::span<const ObjectKey> keys, TimePoint deadline) {
  std::vector<Entry> found;
  found.reserve(keys.size());
  if (keys.empty()) return found;
  try {
    Cluster::MasterLoan master = cluster_.borrow_master(deadline);
    look_up_batches(*master, keys, deadline, [&](std::span<const Entry> rows) {
      found.insert(found.end(), rows.begin(), rows.end());
      return true;
    });
  } catch (const Error&) {
    lookup_failures_.fetch_add(1, std::memory_order_relaxed);
    throw;
  }
  lookups_.fetch_add(keys.size(), std::memory_order_relaxed);
  hits_.fetch_add(static_cast<std::uint64_t>(std::count_if(
                      found.begin(), found.end(), [](const Entry& e) { return e.valid(); })),
                  std::memory_order_relaxed);
  return found;
}

ReadPlan StoreClient::match(std::span<const ObjectKey> keys, TimePoint deadline,
                            const std::atomic<bool>* stop) {
  ReadPlan plan;
  if (keys.empty()) return plan;
  try {
    Cluster::MasterLoan master = cluster_.borrow_master(deadline);
    look_up_batches(*master, keys, deadline, [&](std::span<const Entry> rows) {
      const auto end =
          std::find_if(rows.begin(), rows.end(), [](const Entry& row) { return !row.valid(); });
      const std::size_t from = plan.rows.size();
      plan.rows.insert(plan.rows.end(), rows.begin(), end);
      if (plan.rows.size() > from) start_prefetch(plan, from, deadline);
      return end == rows.end() && (stop == nullptr || !stop->load(std::memory_order_relaxed));
    });
  } catch (const Error&) {
    lookup_failures_.fetch_add(1, std::memory_order_relaxed);
    abandon(plan);
    throw;
  }
  lookups_.fetch_add(keys.size(), std::memory_order_relaxed);
  hits_.fetch_add(plan.rows.size(), std::memory_order_relaxed);
  return plan;
}

void StoreClient::start_prefetch(ReadPlan& plan, std::size_t from, TimePoint deadline) {
  std::map<NodeId, std::vector<wire::PrefetchRow>> by_node;
  for (std::size_t i = from; i < plan.rows.size(); ++i) {
    by_node[plan.rows[i].node].push_back(prefetch_row(plan.rows[i]));
  }
  for (const auto& [node, rows] : by_node) {
    const ReadPlan::Session* session = plan.session_of(node);
    if (session == nullptr) {
      // Only if all of the node's rows are new: a session holds all of them, from the first on.
      const bool known =
          std::any_of(plan.rows.begin(), plan.rows.begin() + static_cast<std::ptrdiff_t>(from),
                      [id = node](const Entry& row) { return row.node == id; });
      if (known) continue;
      plan.sessions.push_back({.node = node, .id = random_nonce()});
      session = &plan.sessions.back();
    }
    try {
      Cluster::NodeLoan channel = cluster_.borrow_node(node, deadline);
      channel->prefetch(session->id, rows, kSessionLeaseMs);
      channel->flush(deadline);
    } catch (const Error&) {
      // Not needed for the answer: whoever reads will open a session, or find the node gone.
      std::erase_if(plan.sessions, [id = node](const auto& s) { return s.node == id; });
    }
  }
}

void StoreClient::abandon(const ReadPlan& plan) noexcept {
  const TimePoint deadline = Clock::now() + kAbandonTimeout;
  for (const ReadPlan::Session& session : plan.sessions) {
    try {
      Cluster::NodeLoan channel = cluster_.borrow_node(session.node, deadline);
      channel->end(session.id);
      channel->flush(deadline);
    } catch (const std::exception&) {
      // The node is gone, or its lease will see to it.
    }
  }
}

// The rows of one node among those that are read, and their place in the node's session.
struct StoreClient::NodeRows {
  NodeId node = 0;
  std::vector<std::uint32_t> rows;           // places in the read: row first + rows[i] of the plan
  std::vector<std::uint32_t> lengths;        // of those rows
  std::vector<wire::PrefetchRow> all;        // the same rows as a session is told
  std::uint32_t skipped = 0;                 // rows of the session before the first that is read
  const wire::SessionId* session = nullptr;  // opened by whoever made the plan
  wire::SessionId current{};                 // read from: that one, or one of our own
  bool ended = false;                        // the plan's is
  std::size_t done = 0;                      // rows that have a status
};

const char* StoreClient::read(const ReadPlan& plan, std::uint32_t first, const BlockPlaces& places,
                              const TransferOptions& options, TimePoint deadline,
                              std::span<BlockStatus> statuses) noexcept {
  std::fill(statuses.begin(), statuses.end(), BlockStatus::kMiss);
  const char* transport = "";
  std::vector<NodeRows> nodes;
  try {
    const auto node_rows = [&](NodeId id) -> NodeRows& {
      for (NodeRows& node : nodes) {
        if (node.node == id) return node;
      }
      NodeRows& added = nodes.emplace_back();
      added.node = id;
      if (const auto* session = plan.session_of(id)) added.session = &session->id;
      return added;
    };
    for (std::size_t i = 0; i < plan.rows.size() && i < first + statuses.size(); ++i) {
      const Entry& row = plan.rows[i];
      if (!row.valid()) continue;
      NodeRows& node = node_rows(row.node);
      if (i < first) {
        ++node.skipped;
        continue;
      }
      const auto place = static_cast<std::uint32_t>(i - first);
      if (bytes_of(places(place)) != row.length) {
        // The rest of this node's session would be out of step: read without it.
        node.session = nullptr;
        continue;
      }
      node.rows.push_back(place);
      node.lengths.push_back(row.length);
      node.all.push_back(prefetch_row(row));
    }
    for (NodeRows& node : nodes) {
      if (node.rows.empty()) continue;
      const char* const used = read_from_node(node, places, options, deadline, statuses);
      if (*used != '\0') transport = used;
    }
  } catch (const std::exception&) {
    // Out of memory: what has no good status by now was not read.
  }
  ReadPlan rest{.rows = {}, .sessions = plan.sessions};
  std::erase_if(rest.sessions, [&](const ReadPlan::Session& session) {
    return std::any_of(nodes.begin(), nodes.end(), [&](const NodeRows& node) {
      return node.node == session.node && node.ended;
    });
  });
  abandon(rest);
  count(read_, statuses);
  return transport;
}

const char* StoreClient::read_from_node(NodeRows& node, const BlockPlaces& places,
                                        const TransferOptions& options, TimePoint deadline,
                                        std::span<BlockStatus> statuses) {
  const char* transport = "";
  BlockStatus rest = BlockStatus::kCancelled;
  const auto status_of = [deadline](const Error& error) {
    return error.kind() == ErrorKind::kProtocol ? BlockStatus::kUnavailable
                                                : failure_status(deadline);
  };
  try {
    Cluster::NodeLoan channel = cluster_.borrow_node(node.node, deadline);
    transport = channel->transport();
    try {
      read_session(*channel, node, places, options, deadline, statuses);
      transport = channel->transport();  // RDMA may have given way to TCP
    } catch (const Error& error) {
      rest = status_of(error);
    }
    if (channel->channel().open()) {
      // Also when the time is over: others wait for the slots that it holds.
      channel->end(node.current);
      channel->flush(Clock::now() + kAbandonTimeout);
      node.ended = node.session != nullptr && node.current == *node.session;
    }
  } catch (const Error& error) {
    if (*transport == '\0') rest = status_of(error);  // no connection; else an END got lost
  }
  while (node.done < node.rows.size()) statuses[node.rows[node.done++]] = rest;
  return transport;
}

// Until all rows have a status, or somebody has cancelled it.
void StoreClient::read_session(NodeChannel& channel, NodeRows& node, const BlockPlaces& places,
                               const TransferOptions& options, TimePoint deadline,
                               std::span<BlockStatus> statuses) {
  std::vector<BlockStatus> some(node.rows.size());
  std::uint32_t base = 0;         // where the row `session_start` of ours is in the session
  std::size_t session_start = 0;  // rows before it belong to an earlier session
  const auto open = [&] {
    node.current = random_nonce();
    base = 0;
    session_start = node.done;
    channel.prefetch(node.current, std::span(node.all).subspan(node.done), kSessionLeaseMs);
  };
  if (node.session == nullptr) {
    open();
  } else {
    node.current = *node.session;
    base = node.skipped;
    if (base > 0) channel.release(node.current, 0, base);
  }
  bool reopened = false;
  while (node.done < node.rows.size()) {
    if (options.cancelled != nullptr && options.cancelled->load(std::memory_order_relaxed)) return;
    const std::size_t at = node.done;
    const auto lengths = std::span<const std::uint32_t>(node.lengths).subspan(at);
    const std::uint32_t index = base + static_cast<std::uint32_t>(at - session_start);
    const std::uint32_t count = channel.read(
        node.current, index, lengths, [&](std::uint32_t i) { return places(node.rows[at + i]); },
        options, deadline, std::span(some).first(lengths.size()));
    if (count == 0) {
      // Its lease ran out while the request waited, or the node was busy: once more from here.
      if (reopened) throw Error(ErrorKind::kUnavailable, "the node takes no more sessions");
      reopened = true;
      open();
      continue;
    }
    std::uint64_t bytes = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
      if (some[i] == BlockStatus::kOk) bytes += lengths[i];
      statuses[node.rows[node.done++]] = some[i];
    }
    // RDMA may give way to TCP, or come back, between two of these.
    counts_of(channel.transport()).read.fetch_add(bytes, std::memory_order_relaxed);
  }
}

const char* StoreClient::write(std::uint64_t name_space, bool prefix_order,
                               std::span<const ObjectKey> keys, const BlockPlaces& places,
                               const TransferOptions& options, TimePoint deadline,
                               std::span<BlockStatus> statuses) noexcept {
  std::fill(statuses.begin(), statuses.end(), BlockStatus::kUnavailable);
  const char* transport = "";
  std::uint64_t bytes = 0;
  try {
    std::vector<NodeChannel::Offered> blocks(keys.size());
    for (std::uint32_t i = 0; i < keys.size(); ++i) {
      const std::uint64_t length = bytes_of(places(i));
      blocks[i] = {.key = keys[i],
                   .length = static_cast<std::uint32_t>(std::min<std::uint64_t>(length, ~0u))};
    }
    // A node that cannot be reached is left out the next time; the second best is tried at once.
    std::vector<NodeId> nodes;
    if (!keys.empty()) nodes = cluster_.nodes_for_write(keys.front(), deadline);
    for (std::size_t i = 0; i < nodes.size() && i < 2; ++i) {
      try {
        Cluster::NodeLoan channel = cluster_.borrow_node(nodes[i], deadline);
        transport = channel->transport();
        channel->write(name_space, prefix_order, blocks, places, options, deadline, statuses);
        transport = channel->transport();
        break;
      } catch (const Error&) {
        std::replace_if(
            statuses.begin(), statuses.end(),
            [](BlockStatus status) { return status != BlockStatus::kStoredAlready; },
            failure_status(deadline));
        if (Clock::now() >= deadline) break;
      }
    }
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (statuses[i] == BlockStatus::kOk) bytes += blocks[i].length;
    }
  } catch (const std::exception&) {
    // Out of memory, or no master: nothing was written that has no good status.
  }
  count(written_, statuses);
  counts_of(transport).written.fetch_add(bytes, std::memory_order_relaxed);
  return transport;
}

void StoreClient::count(StatusCounts& by_status, std::span<const BlockStatus> statuses) {
  for (const BlockStatus status : statuses) {
    by_status[static_cast<std::size_t>(status)].fetch_add(1, std::memory_order_relaxed);
  }
}

StoreClient::ByteCounts& StoreClient::counts_of(std::string_view transport) noexcept {
  if (transport == "shm") return shm_;
  return transport == "verbs" ? verbs_ : tcp_;
}

ClientStats StoreClient::stats() {
  ClientStats stats;
  stats.lookups = lookups_.load(std::memory_order_relaxed);
  stats.hits = hits_.load(std::memory_order_relaxed);
  stats.lookup_failures = lookup_failures_.load(std::memory_order_relaxed);
  for (int i = 0; i < kBlockStatuses; ++i) {
    stats.read[i] = read_[i].load(std::memory_order_relaxed);
    stats.written[i] = written_[i].load(std::memory_order_relaxed);
  }
  stats.shm = {.read = shm_.read.load(std::memory_order_relaxed),
               .written = shm_.written.load(std::memory_order_relaxed)};
  stats.verbs = {.read = verbs_.read.load(std::memory_order_relaxed),
                 .written = verbs_.written.load(std::memory_order_relaxed)};
  stats.verbs_links = cluster_.verbs().links();
  stats.verbs_failures = cluster_.verbs().failures();
  stats.verbs_fallbacks = cluster_.verbs().fallbacks();
  stats.verbs_last_failure = cluster_.verbs().last_failure();
  stats.tcp = {.read = tcp_.read.load(std::memory_order_relaxed),
               .written = tcp_.written.load(std::memory_order_relaxed)};
  stats.connects = cluster_.connects();
  stats.connect_failures = cluster_.connect_failures();
  stats.members = cluster_.member_count();
  return stats;
}

}  // namespace hymcache
