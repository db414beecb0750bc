// Blocks in the stream itself: straight from and into the places where they belong.
#pragma once

#include <sys/uio.h>

#include <vector>

#include "transport/csrc/node_channel.h"

namespace hymcache {

class TcpNodeChannel : public NodeChannel {
 public:
  using NodeChannel::NodeChannel;
  const char* transport() const noexcept override { return "tcp"; }
  std::uint32_t read(const wire::SessionId& session, std::uint32_t first,
                     std::span<const std::uint32_t> lengths, const BlockPlaces& places,
                     const TransferOptions& options, TimePoint deadline,
                     std::span<BlockStatus> statuses) override;

 protected:
  void write_granted(std::span<Granted> granted, const BlockPlaces& places,
                     const TransferOptions& options, TimePoint deadline) override;

 private:
  std::uint32_t receive_block(std::span<const Segment> place, bool checksum, TimePoint deadline);
  std::uint32_t send_block(std::span<const Segment> place, bool checksum, TimePoint deadline);
  std::vector<iovec> group_;  // kept between calls
};

}  // namespace hymcache
