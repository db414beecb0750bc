// A node by RDMA: control messages over TCP as ever, the bytes by READs and WRITEs of its memory.
//
//                 LINK
//   tcp (no link) -------------> linked --batch fails--> UNLINK --> tcp, for a while
//        ^                                                                |
//        +---------------------- the node is tried again -----------------+
//
// What cannot go by RDMA goes in the stream, block by block or for good, and is counted.
#pragma once

#include <memory>
#include <vector>

#include "transport/csrc/tcp_node_channel.h"
#include "transport/csrc/verbs.h"

namespace hymcache {

class VerbsNodeChannel final : public TcpNodeChannel {
 public:
  // A node that offers no RDMA is one that all calls have to fall back for.
  VerbsNodeChannel(std::unique_ptr<Channel> channel, std::shared_ptr<VerbsTarget> target,
                   bool offered = true)
      : TcpNodeChannel(std::move(channel)), target_(std::move(target)), offered_(offered) {}

  // Of the last bytes that moved; "verbs" before any did.
  const char* transport() const noexcept override { return fell_back_ ? "tcp" : "verbs"; }
  std::uint32_t read(const wire::SessionId& session, std::uint32_t first,
                     std::span<const std::uint32_t> lengths, const BlockPlaces& places,
                     const TransferOptions& options, TimePoint deadline,
                     std::span<BlockStatus> statuses) override;

 protected:
  void prepare_write(TimePoint deadline) override;
  void write_granted(std::span<Granted> granted, const BlockPlaces& places,
                     const TransferOptions& options, TimePoint deadline) override;

 private:
  class Batch;

  bool ensure_link(TimePoint deadline);
  void connect_link(TimePoint deadline);
  void take_regions(const wire::LinkReply& head, wire::Bytes rows);
  // Ends it on both sides, so that nothing of it moves any more when this returns.
  void drop_link(const std::string& reason, TimePoint deadline);
  void fall_back(const std::string& reason);
  // The key for [offset, offset + bytes) of the node's region; 0: it has to go another way.
  std::uint32_t remote_key(std::uint64_t offset, std::uint64_t bytes, std::uint32_t access,
                           wire::VerbsKey block_key) const noexcept;
  std::uint32_t reachable(const Settled& settled) const noexcept;
  void read_rows(const Settled& settled, std::uint32_t count, const BlockPlaces& places,
                 const TransferOptions& options, TimePoint deadline,
                 std::span<BlockStatus> statuses);
  LocalMemory& bounce();

  const std::shared_ptr<VerbsTarget> target_;
  const bool offered_;
  std::unique_ptr<VerbsLink> link_;
  bool fell_back_ = false;
  std::uint64_t address_ = 0;  // of the node's region
  std::uint64_t region_bytes_ = 0;
  std::vector<wire::LinkRegion> regions_;
  LocalMemory bounce_;  // for memory that is not registered
  LocalMemory words_;   // the generation words of a batch
};

}  // namespace hymcache
