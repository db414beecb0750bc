// Blocks through memory that the node shares with clients on its host.
#pragma once

#include <memory>

#include "transport/csrc/node_channel.h"
#include "transport/csrc/region_mapping.h"

namespace hymcache {

class ShmNodeChannel final : public NodeChannel {
 public:
  ShmNodeChannel(std::unique_ptr<Channel> channel, std::shared_ptr<SharedRegion> region)
      : NodeChannel(std::move(channel)), region_(std::move(region)) {}

  const char* transport() const noexcept override { return "shm"; }
  std::uint32_t read(const wire::SessionId& session, std::uint32_t first,
                     std::span<const std::uint32_t> lengths, const BlockPlaces& places,
                     const TransferOptions& options, TimePoint deadline,
                     std::span<BlockStatus> statuses) override;

 protected:
  void write_granted(std::span<Granted> granted, const BlockPlaces& places,
                     const TransferOptions& options, TimePoint deadline) override;

 private:
  BlockStatus copy_block(const wire::WaitRow& row, std::span<const Segment> place,
                         const TransferOptions& options);
  void attach(TimePoint deadline);  // once for each connection, before its first bytes

  std::shared_ptr<SharedRegion> region_;
  std::shared_ptr<const RegionMapping> mapping_;
};

}  // namespace hymcache
