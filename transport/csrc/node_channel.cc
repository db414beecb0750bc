#include "transport/csrc/node_channel.h"

#include <algorithm>

namespace hymcache {
namespace {

// The node answers a WAIT that ran out before we give up on the connection.
constexpr auto kAnswerGrace = std::chrono::milliseconds(100);

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
    return {.first = first, .rows = {}, .session_known = false, .keys = {}};
  }
  wire::PayloadReader reader(frame.payload, "WAIT reply");
  const auto head = reader.take<wire::WaitReply>();
  const wire::Bytes rows = reader.take_rows<wire::WaitRow>(head.count, request.count_max);
  if (head.first != first) fail_protocol("a WAIT was answered for other blocks");
  Settled settled{.first = first, .rows = {}, .session_known = true, .keys = {}};
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
  if (block_keys_ && !is_inline) {
    const wire::Bytes keys = reader.take_rows<wire::VerbsKey>(head.count, request.count_max);
    for (std::uint32_t i = 0; i < head.count; ++i) {
      settled.keys.push_back(wire::row_at<wire::VerbsKey>(keys, i));
    }
  }
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
    prepare_write(deadline);
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
    const wire::Bytes keys = block_keys_
                                 ? reader.take_rows<wire::VerbsKey>(head.count, wire::kOfferRowsMax)
                                 : wire::Bytes{};
    granted.clear();
    bool broken = false;
    for (std::uint32_t i = 0; i < head.count; ++i) {
      const auto row = wire::row_at<wire::OfferReplyRow>(rows, i);
      statuses[at + i] = status_of(row.state);
      if (row.state == wire::OfferState::kGranted) {
        granted.push_back({.block = static_cast<std::uint32_t>(at + i),
                           .grant = row.grant,
                           .region_offset = row.region_offset,
                           .length = batch[i].length,
                           .key = block_keys_ ? wire::row_at<wire::VerbsKey>(keys, i) : 0});
      } else if (row.state != wire::OfferState::kStored) {
        broken = true;
      }
    }
    if (!granted.empty()) {
      write_granted(granted, places, options, deadline);
      commit(granted, options, deadline, statuses);
    }
    at += batch.size();
    if ((broken && prefix_order) || options.is_cancelled()) {
      const BlockStatus rest =
          options.is_cancelled() ? BlockStatus::kCancelled : BlockStatus::kSkipPrefix;
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

}  // namespace hymcache
