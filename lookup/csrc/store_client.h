// The client of the store: lookups, reads by plan, writes. Thread-safe; every call has a deadline.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "lookup/csrc/cluster.h"
#include "lookup/csrc/read_plan.h"

namespace hymcache {

struct ClientStats {
  std::uint64_t lookups = 0;  // keys asked
  std::uint64_t hits = 0;     // keys found
  std::uint64_t lookup_failures = 0;
  std::array<std::uint64_t, kBlockStatuses> read{};  // blocks, by status
  std::array<std::uint64_t, kBlockStatuses> written{};
  struct Bytes {
    std::uint64_t read = 0;
    std::uint64_t written = 0;
  };
  Bytes shm, verbs, tcp;
  std::uint64_t verbs_links = 0;      // queue pairs connected
  std::uint64_t verbs_failures = 0;   // links that failed, or could not be made
  std::uint64_t verbs_fallbacks = 0;  // calls whose bytes went over TCP instead
  std::string verbs_last_failure;
  std::uint64_t connects = 0;
  std::uint64_t connect_failures = 0;
  std::uint64_t members = 0;
};

class StoreClient {
 public:
  explicit StoreClient(ClientOptions options);

  const ClientOptions& options() const noexcept { return cluster_.options(); }
  TimePoint deadline() const { return Clock::now() + options().deadline; }

  // A row for each key; a row that is not valid() is a miss. Throws Unavailable.
  std::vector<Entry> lookup(std::span<const ObjectKey> keys, TimePoint deadline);

  // As lookup(), with the prefetch on its way before it returns (early remote-hit matching): the
  // longest run of hits from the front; each node is told as soon as a batch names it. `stop`
  // (optional) ends it between batches.
  ReadPlan match(std::span<const ObjectKey> keys, TimePoint deadline,
                 const std::atomic<bool>* stop = nullptr);
  // Takes the prefetches of a plan back that nobody will read. Never throws; never waits long.
  void abandon(const ReadPlan& plan) noexcept;

  // Reads rows [first, first + statuses.size()) of the plan; places(i) is for row first + i and
  // says how many bytes are wanted: a row of another length is a miss. Never throws: what goes
  // wrong is in the statuses. Ends the plan's sessions. Returns the transport used ("" for none).
  const char* read(const ReadPlan& plan, std::uint32_t first, const BlockPlaces& places,
                   const TransferOptions& options, TimePoint deadline,
                   std::span<BlockStatus> statuses) noexcept;

  // Throws what write() would only count: Unavailable when no master answers or the client is
  // closed, ConfigError or ProtocolError where the only master says so.
  void require_members(TimePoint deadline) { cluster_.require_members(deadline); }
  // Writes blocks; in prefix order nothing follows a block that was not stored. Never throws.
  const char* write(std::uint64_t name_space, bool prefix_order, std::span<const ObjectKey> keys,
                    const BlockPlaces& places, const TransferOptions& options, TimePoint deadline,
                    std::span<BlockStatus> statuses) noexcept;

  ClientStats stats();
  // Closes idle connections; calls fail with Unavailable from now on.
  void close() { cluster_.close(); }

 private:
  struct NodeRows;

  void look_up_batches(Channel& master, std::span<const ObjectKey> keys, TimePoint deadline,
                       const std::function<bool(std::span<const Entry>)>& each);
  void start_prefetch(ReadPlan& plan, std::size_t from, TimePoint deadline);
  const char* read_from_node(NodeRows& rows, const BlockPlaces& places,
                             const TransferOptions& options, TimePoint deadline,
                             std::span<BlockStatus> statuses);
  void read_session(NodeChannel& channel, NodeRows& rows, const BlockPlaces& places,
                    const TransferOptions& options, TimePoint deadline,
                    std::span<BlockStatus> statuses);
  using StatusCounts = std::array<std::atomic<std::uint64_t>, kBlockStatuses>;
  void count(StatusCounts& by_status, std::span<const BlockStatus> statuses);

  Cluster cluster_;
  std::atomic<std::uint64_t> lookups_{0}, hits_{0}, lookup_failures_{0};
  StatusCounts read_{}, written_{};
  struct ByteCounts {
    std::atomic<std::uint64_t> read{0}, written{0};
  };
  ByteCounts shm_, verbs_, tcp_;

  ByteCounts& counts_of(std::string_view transport) noexcept;
};

}  // namespace hymcache
