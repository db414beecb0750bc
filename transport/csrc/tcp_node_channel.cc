#include "transport/csrc/tcp_node_channel.h"

#include <algorithm>

#include "transport/csrc/crc32c.h"

namespace hymcache {
namespace {

// While so much of a block is in the cache its checksum costs no second trip to memory.
constexpr std::size_t kChecksumChunkBytes = 256u << 10;
constexpr std::size_t kPlainChunkBytes = 64u << 20;
constexpr std::size_t kPartsMax = 64;

// Cuts a block's segments into groups of at most kPartsMax parts that are moved in one call.
template <class F>
void for_each_group(std::span<const Segment> place, bool checksum, std::vector<iovec>& group,
                    F each) {
  const std::size_t chunk_bytes = checksum ? kChecksumChunkBytes : kPlainChunkBytes;
  group.clear();
  std::size_t bytes = 0;
  for (const Segment& segment : place) {
    auto* data = static_cast<std::byte*>(segment.data);
    std::size_t left = segment.bytes;
    while (left > 0) {
      const std::size_t step = std::min(left, chunk_bytes - bytes);
      group.push_back({.iov_base = data, .iov_len = step});
      data += step;
      left -= step;
      bytes += step;
      if (bytes == chunk_bytes || group.size() == kPartsMax) {
        each(group);
        group.clear();
        bytes = 0;
      }
    }
  }
  if (!group.empty()) each(group);
}

std::uint32_t crc_of(std::uint32_t crc, std::span<const iovec> parts) {
  for (const iovec& part : parts) crc = crc32c(crc, part.iov_base, part.iov_len);
  return crc;
}

}  // namespace

std::uint32_t TcpNodeChannel::receive_block(std::span<const Segment> place, bool checksum,
                                            TimePoint deadline) {
  std::uint32_t crc = 0;
  for_each_group(place, checksum, group_, [&](std::span<const iovec> group) {
    channel_->receive_bulk(group, deadline);
    if (checksum) crc = crc_of(crc, group);
  });
  return crc;
}

std::uint32_t TcpNodeChannel::read(const wire::SessionId& session, std::uint32_t first,
                                   std::span<const std::uint32_t> lengths,
                                   const BlockPlaces& places, const TransferOptions& options,
                                   TimePoint deadline, std::span<BlockStatus> statuses) {
  const Settled settled = wait(session, first, lengths, wire::WaitRequest::kInline, deadline);
  if (!settled.session_known) return 0;
  for (std::uint32_t i = 0; i < settled.rows.size(); ++i) {
    const wire::WaitRow& row = settled.rows[i];
    if (row.state != wire::BlockState::kReady) {
      statuses[i] =
          row.state == wire::BlockState::kMiss ? BlockStatus::kMiss : BlockStatus::kDeviceError;
      continue;
    }
    if (options.is_cancelled()) {
      // The rest of the stream is of no use: cheaper to connect anew than to read it.
      channel_->close();
      discarded_ = true;
      std::fill(statuses.begin() + i, statuses.end(), BlockStatus::kCancelled);
      return static_cast<std::uint32_t>(statuses.size());
    }
    const bool checksum = options.checksums && (row.flags & Entry::kHasCrc) != 0;
    const std::uint32_t crc = receive_block(places(i), checksum, deadline);
    statuses[i] = !checksum || crc == row.crc32c ? BlockStatus::kOk : BlockStatus::kCorrupt;
  }
  for (std::uint32_t i = 0; i < settled.rows.size(); ++i) {
    if (statuses[i] == BlockStatus::kCorrupt) report(session, first + i);
  }
  return static_cast<std::uint32_t>(settled.rows.size());
}

std::uint32_t TcpNodeChannel::send_block(std::span<const Segment> place, bool checksum,
                                         TimePoint deadline) {
  std::uint32_t crc = 0;
  for_each_group(place, checksum, group_, [&](std::span<const iovec> group) {
    if (checksum) crc = crc_of(crc, group);
    channel_->send_bulk(group, deadline);
  });
  return crc;
}

void TcpNodeChannel::write_granted(std::span<Granted> granted, const BlockPlaces& places,
                                   const TransferOptions& options, TimePoint deadline) {
  // A frame's bytes are promised in its header, so a cancelled frame is sent to its end: frames
  // are kept small enough for that.
  constexpr std::uint64_t kFrameBytesMax = 64u << 20;
  while (!granted.empty() && !options.is_cancelled()) {
    std::size_t count = 0;
    std::uint64_t bytes = 0;
    while (count < granted.size() &&
           (count == 0 || bytes + granted[count].length <= kFrameBytesMax)) {
      bytes += granted[count++].length;
    }
    wire::PayloadWriter payload(sizeof(wire::WriteRequest) + count * sizeof(wire::WriteRow));
    payload.put(wire::WriteRequest{.count = static_cast<std::uint32_t>(count)});
    for (const Granted& one : granted.first(count)) {
      payload.put(wire::WriteRow{.grant = one.grant, .length = one.length});
    }
    channel_->begin_bulk(wire::Type::kWrite, payload.bytes(), {}, bytes, deadline);
    for (Granted& one : granted.first(count)) {
      one.crc32c = send_block(places(one.block), options.checksums, deadline);
      one.written = true;
    }
    granted = granted.subspan(count);
  }
}

}  // namespace hymcache
