#include "transport/csrc/shm_node_channel.h"

#include <algorithm>

#include "transport/csrc/copy.h"

namespace hymcache {

void ShmNodeChannel::attach(TimePoint deadline) {
  if (!mapping_) mapping_ = region_->attach(*channel_, deadline);
}

BlockStatus ShmNodeChannel::copy_block(const wire::WaitRow& row, std::span<const Segment> place,
                                       const TransferOptions& options) {
  const std::byte* const from = mapping_->readable(row.region_offset, row.length);
  if (from == nullptr) fail_protocol("a block lies outside the node's region");
  const bool checksum = options.checksums && (row.flags & Entry::kHasCrc) != 0;
  std::uint32_t crc = 0;
  copy_scatter(place, from, checksum ? &crc : nullptr);
  // Taken back during the copy (a lease ran out): what was copied may be anything.
  if (mapping_->load_generation(row.generation_word) != row.generation_value) {
    return BlockStatus::kMiss;
  }
  return !checksum || crc == row.crc32c ? BlockStatus::kOk : BlockStatus::kCorrupt;
}

std::uint32_t ShmNodeChannel::read(const wire::SessionId& session, std::uint32_t first,
                                   std::span<const std::uint32_t> lengths,
                                   const BlockPlaces& places, const TransferOptions& options,
                                   TimePoint deadline, std::span<BlockStatus> statuses) {
  attach(deadline);
  const Settled settled = wait(session, first, lengths, 0, deadline);
  if (!settled.session_known) return 0;
  const auto count = static_cast<std::uint32_t>(settled.rows.size());
  for (std::uint32_t i = 0; i < count; ++i) {
    const wire::WaitRow& row = settled.rows[i];
    if (options.is_cancelled()) {
      std::fill(statuses.begin() + i, statuses.end(), BlockStatus::kCancelled);
      release(session, first, count);
      return static_cast<std::uint32_t>(statuses.size());
    }
    if (row.state == wire::BlockState::kReady) {
      statuses[i] = copy_block(row, places(i), options);
      if (statuses[i] == BlockStatus::kCorrupt) report(session, first + i);
    } else {
      statuses[i] =
          row.state == wire::BlockState::kMiss ? BlockStatus::kMiss : BlockStatus::kDeviceError;
    }
  }
  release(session, first, count);
  return count;
}

void ShmNodeChannel::write_granted(std::span<Granted> granted, const BlockPlaces& places,
                                   const TransferOptions& options, TimePoint deadline) {
  attach(deadline);
  for (Granted& one : granted) {
    if (options.is_cancelled() || Clock::now() > deadline) return;
    std::byte* const to = mapping_->writable(one.region_offset, one.length);
    if (to == nullptr) fail_protocol("a grant lies outside the node's write buffer");
    copy_gather(to, places(one.block), options.checksums ? &one.crc32c : nullptr);
    one.written = true;
  }
}

}  // namespace hymcache
