// Every message of the protocol, read with the bounds that docs/wire-protocol.md sets: what a
// correct receiver does, in one place, for tests and fuzzing.
#pragma once

#include <cstddef>
#include <vector>

#include "transport/csrc/wire.h"

namespace hymcache::wire_testing {

// Reads a head of type Head with a field `count`, and that many rows; returns them as they were.
template <class Head, class Row>
std::vector<std::byte> read_rows(wire::PayloadReader& reader, std::uint32_t count_max) {
  const auto head = reader.take<Head>();
  const wire::Bytes rows = reader.take_rows<Row>(head.count, count_max);
  wire::PayloadWriter writer;
  writer.put(head);
  for (std::uint32_t i = 0; i < head.count; ++i) writer.put(wire::row_at<Row>(rows, i));
  return {writer.bytes().begin(), writer.bytes().end()};
}

template <class Message>
std::vector<std::byte> read_one(wire::PayloadReader& reader) {
  const auto message = reader.take<Message>();
  const wire::Bytes bytes = wire::as_bytes(message);
  return {bytes.begin(), bytes.end()};
}

inline std::vector<std::byte> read_request(wire::Type type, wire::PayloadReader& reader) {
  using wire::Type;
  switch (type) {
    case Type::kHello:
      return read_one<wire::Hello>(reader);
    case Type::kAuth:
      return read_one<wire::Auth>(reader);
    case Type::kLookup:
      return read_rows<wire::LookupRequest, ObjectKey>(reader, wire::kLookupKeysMax);
    case Type::kRegister:
      return read_one<wire::Member>(reader);
    case Type::kPublish:
      return read_rows<wire::PublishRequest, Entry>(reader, wire::kPublishRowsMax);
    case Type::kWithdraw:
      return read_rows<wire::WithdrawRequest, wire::WithdrawRow>(reader, wire::kPublishRowsMax);
    case Type::kHeartbeat:
      return read_one<wire::HeartbeatRequest>(reader);
    case Type::kPrefetch:
      return read_rows<wire::PrefetchRequest, wire::PrefetchRow>(reader, wire::kPrefetchRowsMax);
    case Type::kWait:
      return read_one<wire::WaitRequest>(reader);
    case Type::kRelease:
      return read_one<wire::ReleaseRequest>(reader);
    case Type::kEnd:
      return read_one<wire::EndRequest>(reader);
    case Type::kReport:
      return read_one<wire::ReportRequest>(reader);
    case Type::kOffer:
      return read_rows<wire::OfferRequest, wire::OfferRow>(reader, wire::kOfferRowsMax);
    case Type::kWrite:
      return read_rows<wire::WriteRequest, wire::WriteRow>(reader, wire::kOfferRowsMax);
    case Type::kCommit:
      return read_rows<wire::CommitRequest, wire::CommitRow>(reader, wire::kOfferRowsMax);
    case Type::kLink:
      return read_one<wire::LinkEndpoint>(reader);
    case Type::kMembers:
    case Type::kSynced:
    case Type::kAttach:
    case Type::kUnlink:
      return {};
    case Type::kError:
      break;
  }
  throw wire::Unexpected(std::string("no request: ") + wire::type_name(type));
}

inline std::vector<std::byte> read_response(wire::Type type, wire::PayloadReader& reader) {
  using wire::Type;
  switch (type) {
    case Type::kHello:
      return read_one<wire::HelloReply>(reader);
    case Type::kAuth:
      return read_one<wire::Auth>(reader);
    case Type::kError:
      return read_one<wire::ErrorReply>(reader);
    case Type::kLookup:
      return read_rows<wire::LookupReply, Entry>(reader, wire::kLookupKeysMax);
    case Type::kMembers:
      return read_rows<wire::MembersReply, wire::Member>(reader, wire::kNodesMax);
    case Type::kRegister:
      return read_one<wire::RegisterReply>(reader);
    case Type::kPublish:
      return read_one<wire::PublishReply>(reader);
    case Type::kWithdraw:
      return read_one<wire::WithdrawReply>(reader);
    case Type::kHeartbeat:
      return read_one<wire::HeartbeatReply>(reader);
    case Type::kAttach:
      return read_one<wire::AttachReply>(reader);
    case Type::kWait:
      return read_rows<wire::WaitReply, wire::WaitRow>(reader, wire::kWaitRowsMax);
    case Type::kOffer:
      return read_rows<wire::OfferReply, wire::OfferReplyRow>(reader, wire::kOfferRowsMax);
    case Type::kCommit:
      return read_rows<wire::CommitReply, wire::CommitState>(reader, wire::kOfferRowsMax);
    case Type::kLink:
      return read_rows<wire::LinkReply, wire::LinkRegion>(reader, wire::kLinkRegionsMax);
    case Type::kSynced:
    case Type::kUnlink:
      return {};
    case Type::kPrefetch:
    case Type::kRelease:
    case Type::kEnd:
    case Type::kReport:
    case Type::kWrite:
      break;
  }
  throw wire::Unexpected(std::string("no response: ") + wire::type_name(type));
}

// WAIT and OFFER are answered with a key for each row where the connection is linked.
inline void read_keys(std::vector<std::byte>& again, std::size_t head_bytes, std::size_t row_bytes,
                      wire::PayloadReader& reader) {
  const std::size_t rows = (again.size() - head_bytes) / row_bytes;
  const auto keys = reader.take_rows<wire::VerbsKey>(static_cast<std::uint32_t>(rows), ~0u);
  again.insert(again.end(), keys.begin(), keys.end());
}

// What the payload says, encoded again: the payload itself, but for what a HELLO of a later version
// appends. Throws ProtocolError for a payload that is not one of this message.
inline std::vector<std::byte> decode(const wire::Header& header, wire::Bytes payload,
                                     bool keyed = false) {
  wire::PayloadReader reader(payload, wire::type_name(header.type));
  auto again =
      header.is_response() ? read_response(header.type, reader) : read_request(header.type, reader);
  if (keyed && header.type == wire::Type::kWait) {
    read_keys(again, sizeof(wire::WaitReply), sizeof(wire::WaitRow), reader);
  } else if (keyed) {
    read_keys(again, sizeof(wire::OfferReply), sizeof(wire::OfferReplyRow), reader);
  }
  if (header.type != wire::Type::kHello) reader.finish();
  return again;
}

}  // namespace hymcache::wire_testing
