#include "transport/csrc/node_channel.h"

#include <algorithm>

#include "transport/csrc/crc32c.h"

namespace hymcache {
namespace {

// While so much of a block is in the cache its checksum costs no second trip to memory.
constexpr std::size_t kChecksumChunkBytes = 256u << 10;
constexpr std::size_t kPlainChunkBytes = 64u << 20;
constexpr std::size_t kPartsMax = 64;
// The node answers a WAIT that ran out before we give up on the connection.
constexpr auto kAnswerGrace = std::chrono::milliseconds(100);

bool is_cancelled(const TransferOptions& options) {
  return options.cancelled != nullptr && options.cancelled->load(std::memory_order_relaxed);
}

BlockStatus status_of(wire::OfferState state) {
  switch (state) {
    case wire::OfferState::kGranted:
      return BlockStatus::kOk;
    case wire::OfferState::kStored:
      return BlockStatus::kStoredAlready;
    case wire::OfferState::kBufferFull:
      return BlockStatus::kSkipBufferFull;
    case wire::OfferState::kDeviceFull:
      return BlockStatus::kSkipDeviceFull;
    case wire::OfferState::kTooLarge:
      return BlockStatus::kSkipTooLarge;
    case wire::OfferState::kDraining:
      return BlockStatus::kSkipDraining;
    case wire::OfferState::kPrefixBroken:
      return BlockStatus::kSkipPrefix;
  }
  return BlockStatus::kSkipBufferFull;
}

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

const char* block_status_name(BlockStatus status) noexcept {
  switch (status) {
    case BlockStatus::kOk:
      return "ok";
    case BlockStatus::kMiss:
      return "miss";
    case BlockStatus::kCorrupt:
      return "corrupt";
    case BlockStatus::kUnavailable:
      return "unavailable";
    case BlockStatus::kDeadline:
      return "deadline";
    case BlockStatus::kDeviceError:
      return "device_error";
    case BlockStatus::kStoredAlready:
      return "stored_already";
    case BlockStatus::kSkipBufferFull:
      return "skip_buffer_full";
    case BlockStatus::kSkipDeviceFull:
      return "skip_device_full";
    case BlockStatus::kSkipTooLarge:
      return "skip_too_large";
    case BlockStatus::kSkipDraining:
      return "skip_draining";
    case BlockStatus::kSkipPrefix:
      return "skip_prefix";
    case BlockStatus::kCancelled:
      return "cancelled";
  }
  return "unknown";
}

// After an answer that makes no sense nobody knows what follows in the stream.
template <class F>
auto NodeChannel::closing_on_protocol_error(F call) {
  try {
    return call();
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kProtocol) channel_->close();
    throw;
  }
}

void NodeChannel::fail_protocol(const std::string& message) {
  channel_->close();
  throw Error(ErrorKind::kProtocol, channel_->endpoint().text() + ": " + message);
}

void NodeChannel::prefetch(const wire::SessionId& session, std::span<const wire::PrefetchRow> rows,
                           std::uint32_t lease_ms) {
  while (!rows.empty()) {
    const auto batch = rows.first(std::min<std::size_t>(rows.size(), wire::kPrefetchRowsMax));
    const wire::PrefetchRequest head{.session = session,
                                     .lease_ms = lease_ms,
                                     .count = static_cast<std::uint32_t>(batch.size())};
    channel_->post(wire::Type::kPrefetch, wire::as_bytes(head), std::as_bytes(batch));
    rows = rows.subspan(batch.size());
  }
}

void NodeChannel::release(const wire::SessionId& session, std::uint32_t first,
                          std::uint32_t count) {
  const wire::ReleaseRequest request{.session = session, .first = first, .count = count};
  channel_->post(wire::Type::kRelease, wire::as_bytes(request), {});
}

void NodeChannel::end(const wire::SessionId& session) {
  const wire::EndRequest request{.session = session};
  channel_->post(wire::Type::kEnd, wire::as_bytes(request), {});
}

void NodeChannel::report(const wire::SessionId& session, std::uint32_t index) {
  const wire::ReportRequest request{.session = session, .index = index};
  channel_->post(wire::Type::kReport, wire::as_bytes(request), {});
}

NodeChannel::Settled NodeChannel::wait(const wire::SessionId& session, std::uint32_t first,
                                       std::span<const std::uint32_t> lengths, std::uint32_t flags,
                                       TimePoint deadline) {
  return closing_on_protocol_error(
      [&] { return ask_settled(session, first, lengths, flags, deadline); });
}

NodeChannel::Settled NodeChannel::ask_settled(const wire::SessionId& session, std::uint32_t first,
                                              std::span<const std::uint32_t> lengths,
                                              std::uint32_t flags, TimePoint deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  if (left <= 0) throw Error(ErrorKind::kUnavailable, "the deadline is over", ETIMEDOUT);
  const wire::WaitRequest request{
      .session = session,
      .first = first,
      .count_max =
          static_cast<std::uint32_t>(std::min<std::size_t>(lengths.size(), wire::kWaitRowsMax)),
      .timeout_ms = static_cast<std::uint32_t>(std::min<std::int64_t>(left, 3'600'000)),
      .flags = flags};
  const std::uint32_t id = channel_->send(wire::Type::kWait, wire::as_bytes(request), {}, deadline);
  Channel::Frame frame;
  try {
    frame = channel_->receive(wire::Type::kWait, id, deadline + kAnswerGrace);
  } catch (const Error& error) {
    // The channel survives only the answer that there is no such session.
    if (error.kind() != ErrorKind::kUnavailable || !channel_->open()) throw;
    return {.first = first, .rows = {}, .session_known = false};
  }
  wire::PayloadReader reader(frame.payload, "WAIT reply");
  const auto head = reader.take<wire::WaitReply>();
  const wire::Bytes rows = reader.take_rows<wire::WaitRow>(head.count, request.count_max);
  if (head.first != first) fail_protocol("a WAIT was answered for other blocks");
  Settled settled{.first = first, .rows = {}};
  settled.rows.reserve(head.count);
  std::uint64_t inline_bytes = 0;
  for (std::uint32_t i = 0; i < head.count; ++i) {
    settled.rows.push_back(wire::row_at<wire::WaitRow>(rows, i));
    const wire::WaitRow& row = settled.rows.back();
    if (row.state != wire::BlockState::kReady) continue;
    if (row.length != lengths[i]) fail_protocol("a block has another length than was asked for");
    inline_bytes += row.length;
  }
  const bool is_inline = (flags & wire::WaitRequest::kInline) != 0;
  if (frame.header.bulk_bytes != (is_inline ? inline_bytes : 0)) {
    fail_protocol("a WAIT reply carries other bytes than it announces");
  }
  if (head.count == 0) {
    throw Error(ErrorKind::kUnavailable, "the node's device did not deliver in time", ETIMEDOUT);
  }
  return settled;
}

void NodeChannel::write(std::uint64_t name_space, bool prefix_order,
                        std::span<const Offered> blocks, const BlockPlaces& places,
                        const TransferOptions& options, TimePoint deadline,
                        std::span<BlockStatus> statuses) {
  closing_on_protocol_error([&] {
    write_batches(name_space, prefix_order, blocks, places, options, deadline, statuses);
  });
}

void NodeChannel::write_batches(std::uint64_t name_space, bool prefix_order,
                                std::span<const Offered> blocks, const BlockPlaces& places,
                                const TransferOptions& options, TimePoint deadline,
                                std::span<BlockStatus> statuses) {
  std::vector<Granted> granted;
  for (std::size_t at = 0; at < blocks.size();) {
    const auto batch =
        blocks.subspan(at, std::min<std::size_t>(blocks.size() - at, wire::kOfferRowsMax));
    wire::PayloadWriter payload(sizeof(wire::OfferRequest) + batch.size() * sizeof(wire::OfferRow));
    payload.put(wire::OfferRequest{.name_space = name_space,
                                   .count = static_cast<std::uint32_t>(batch.size()),
                                   .flags = prefix_order ? wire::OfferRequest::kPrefixOrder : 0u});
    for (const Offered& block : batch) {
      payload.put(wire::OfferRow{.key = block.key, .length = block.length});
    }
    const Channel::Frame frame = channel_->call(wire::Type::kOffer, payload.bytes(), {}, deadline);
    wire::PayloadReader reader(frame.payload, "OFFER reply");
    const auto head = reader.take<wire::OfferReply>();
    if (head.count != batch.size()) fail_protocol("an OFFER was answered for other blocks");
    const wire::Bytes rows = reader.take_rows<wire::OfferReplyRow>(head.count, wire::kOfferRowsMax);
    granted.clear();
    bool broken = false;
    for (std::uint32_t i = 0; i < head.count; ++i) {
      const auto row = wire::row_at<wire::OfferReplyRow>(rows, i);
      statuses[at + i] = status_of(row.state);
      if (row.state == wire::OfferState::kGranted) {
        granted.push_back({.block = static_cast<std::uint32_t>(at + i),
                           .grant = row.grant,
                           .region_offset = row.region_offset,
                           .length = batch[i].length});
      } else if (row.state != wire::OfferState::kStored) {
        broken = true;
      }
    }
    if (!granted.empty()) {
      write_granted(granted, places, options, deadline);
      commit(granted, options, deadline, statuses);
    }
    at += batch.size();
    if ((broken && prefix_order) || is_cancelled(options)) {
      const BlockStatus rest =
          is_cancelled(options) ? BlockStatus::kCancelled : BlockStatus::kSkipPrefix;
      std::fill(statuses.begin() + static_cast<std::ptrdiff_t>(at), statuses.end(), rest);
      return;
    }
  }
}

void NodeChannel::commit(std::span<const Granted> granted, const TransferOptions& options,
                         TimePoint deadline, std::span<BlockStatus> statuses) {
  wire::PayloadWriter payload(sizeof(wire::CommitRequest) +
                              granted.size() * sizeof(wire::CommitRow));
  payload.put(wire::CommitRequest{.count = static_cast<std::uint32_t>(granted.size())});
  for (const Granted& one : granted) {
    payload.put(wire::CommitRow{.grant = one.grant,
                                .crc32c = one.crc32c,
                                .flags = !one.written        ? wire::CommitRow::kAbort
                                         : options.checksums ? wire::CommitRow::kHasCrc
                                                             : 0u});
  }
  const Channel::Frame frame = channel_->call(wire::Type::kCommit, payload.bytes(), {}, deadline);
  wire::PayloadReader reader(frame.payload, "COMMIT reply");
  const auto head = reader.take<wire::CommitReply>();
  if (head.count != granted.size()) fail_protocol("a COMMIT was answered for other blocks");
  const wire::Bytes states = reader.take_rows<wire::CommitState>(head.count, wire::kOfferRowsMax);
  for (std::uint32_t i = 0; i < head.count; ++i) {
    switch (wire::row_at<wire::CommitState>(states, i)) {
      case wire::CommitState::kStored:
        statuses[granted[i].block] = BlockStatus::kOk;
        break;
      case wire::CommitState::kAborted:
        statuses[granted[i].block] = BlockStatus::kCancelled;
        break;
      case wire::CommitState::kNoGrant:
      case wire::CommitState::kNotWritten:
        statuses[granted[i].block] = BlockStatus::kDeadline;  // the grant's lease is over
        break;
    }
  }
}

// ---- tcp -------------------------------------------------------------------------------------

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
    if (is_cancelled(options)) {
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
  while (!granted.empty() && !is_cancelled(options)) {
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

// ---- shared memory ---------------------------------------------------------------------------

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
    if (is_cancelled(options)) {
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
    if (is_cancelled(options) || Clock::now() > deadline) return;
    std::byte* const to = mapping_->writable(one.region_offset, one.length);
    if (to == nullptr) fail_protocol("a grant lies outside the node's write buffer");
    copy_gather(to, places(one.block), options.checksums ? &one.crc32c : nullptr);
    one.written = true;
  }
}

}  // namespace hymcache
