// One frame of each message, made by the core's own encoder with the values that
// tests/transport/wire_encoder.py has: their bytes must be the same.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "transport/csrc/wire.h"

namespace hymcache::wire_testing {

namespace golden {

template <std::size_t N>
std::array<std::uint8_t, N> counting(unsigned first) {
  std::array<std::uint8_t, N> bytes;
  for (std::size_t i = 0; i < N; ++i) bytes[i] = static_cast<std::uint8_t>(first + i);
  return bytes;
}

inline Entry entry(unsigned seed) {
  Entry entry;
  entry.key = counting<16>(seed);
  entry.address = 0x1122334455667700 + seed;
  entry.generation = 0x2233445566778800 + seed;
  entry.name_space = 0x33445566778899AA;
  entry.length = 0x00200000 + seed;
  entry.node = 0x44556677;
  entry.crc32c = 0x55667788;
  entry.flags = Entry::kValid | Entry::kHasCrc;
  entry.epoch = 0x66778899;
  return entry;
}

inline wire::Member member() {
  wire::Member member;
  member.node = 0x44556677;
  member.state = wire::MemberState::kDraining;
  member.incarnation = 0x0102030405060708;
  member.capacity_bytes = 0x1112131415161718;
  member.used_bytes = 0x2122232425262728;
  member.host = counting<16>(0x30);
  member.name = wire::to_text<64>("node-ä");
  member.tcp = wire::to_text<64>("[2001:db8::1]:7400");
  member.unix_path = wire::to_text<112>("/run/hymcache/node.sock");
  return member;
}

template <class... Parts>
std::vector<std::byte> payload(const Parts&... parts) {
  wire::PayloadWriter writer;
  (writer.put(parts), ...);
  return {writer.bytes().begin(), writer.bytes().end()};
}

}  // namespace golden

using GoldenMessages = std::map<std::string, std::vector<std::byte>>;

// Whether it is the answer on a linked connection whose keys are for one block each.
inline bool is_keyed(const std::string& name) { return name.ends_with("_keyed_reply"); }

class GoldenWriter {
 public:
  void request(const char* name, wire::Type type, std::uint32_t id,
               const std::vector<std::byte>& payload, std::size_t bulk_bytes = 0) {
    add(name, type, 0, id, payload, bulk_bytes);
  }
  void response(const char* name, wire::Type type, std::uint32_t id,
                const std::vector<std::byte>& payload, std::size_t bulk_bytes = 0) {
    add(name, type, wire::kFlagResponse, id, payload, bulk_bytes);
  }
  GoldenMessages take() { return std::move(messages_); }

 private:
  void add(const char* name, wire::Type type, std::uint16_t flags, std::uint32_t id,
           const std::vector<std::byte>& payload, std::size_t bulk_bytes) {
    const wire::Header header = wire::make_header(type, flags, id, payload, bulk_bytes);
    std::vector<std::byte>& frame = messages_[name];
    const wire::Bytes head = wire::as_bytes(header);
    frame.assign(head.begin(), head.end());
    frame.insert(frame.end(), payload.begin(), payload.end());
    for (std::size_t i = 0; i < bulk_bytes; ++i) frame.push_back(std::byte(0xC0 + i));
  }

  GoldenMessages messages_;
};

inline void write_golden_handshake(GoldenWriter& writer) {
  using namespace golden;
  using wire::Type;
  writer.request("hello", Type::kHello, 1,
                 payload(wire::Hello{.version_min = 1,
                                     .version_max = 3,
                                     .role = wire::Role::kNode,
                                     .features = 0x0807060504030201,
                                     .nonce = counting<16>(0x10),
                                     .name = wire::to_text<64>("engine-1")}));
  writer.response("hello_reply", Type::kHello, 1,
                  payload(wire::HelloReply{.version = 1,
                                           .role = wire::Role::kMaster,
                                           .auth_required = 1,
                                           .node = 0x44556677,
                                           .features = 0x0807060504030201,
                                           .incarnation = 0x1817161514131211,
                                           .nonce = counting<16>(0x20),
                                           .name = wire::to_text<64>("master-1")}));
  writer.request("auth", Type::kAuth, 2, payload(wire::Auth{.proof = counting<32>(0x40)}));
  writer.response("auth_reply", Type::kAuth, 2, payload(wire::Auth{.proof = counting<32>(0x60)}));
  writer.response("error", Type::kError, 0xFFFFFFFF,
                  payload(wire::make_error(wire::ErrorCode::kNoSession, "no such session")));
}

inline void write_golden_master(GoldenWriter& writer) {
  using namespace golden;
  using wire::Type;
  constexpr std::uint64_t kVersion = 0x0102030405060708;
  writer.request("lookup", Type::kLookup, 3,
                 payload(wire::LookupRequest{.count = 2}, counting<16>(0x01), counting<16>(0x81)));
  writer.response(
      "lookup_reply", Type::kLookup, 3,
      payload(wire::LookupReply{.count = 2, .members_version = kVersion}, entry(0x01), Entry{}));
  writer.request("members", Type::kMembers, 4, {});
  writer.response("members_reply", Type::kMembers, 4,
                  payload(wire::MembersReply{.version = kVersion, .count = 1}, member()));
  writer.request("register", Type::kRegister, 5, payload(member()));
  writer.response("register_reply", Type::kRegister, 5,
                  payload(wire::RegisterReply{
                      .members_version = kVersion, .lease_ms = 3000, .epoch = 0x66778899}));
  writer.request("publish", Type::kPublish, 6,
                 payload(wire::PublishRequest{.count = 2, .flags = wire::PublishRequest::kNoAnswer},
                         entry(0x01), entry(0x41)));
  writer.response("publish_reply", Type::kPublish, 6,
                  payload(wire::PublishReply{.accepted = 1, .refused = 0x01020304}));
  writer.request(
      "withdraw", Type::kWithdraw, 7,
      payload(wire::WithdrawRequest{.count = 1},
              wire::WithdrawRow{.key = counting<16>(0x01), .generation = 0x2233445566778801}));
  writer.response("withdraw_reply", Type::kWithdraw, 7,
                  payload(wire::WithdrawReply{.removed = 0x01020304}));
  writer.request("synced", Type::kSynced, 8, {});
  writer.response("synced_reply", Type::kSynced, 8, {});
  writer.request("heartbeat", Type::kHeartbeat, 9,
                 payload(wire::HeartbeatRequest{.capacity_bytes = 0x0102030405060708,
                                                .used_bytes = 0x1112131415161718,
                                                .objects = 0x21222324,
                                                .sessions = 0x31323334}));
  writer.response("heartbeat_reply", Type::kHeartbeat, 9,
                  payload(wire::HeartbeatReply{.members_version = kVersion,
                                               .lease_ms = 3000,
                                               .flags = wire::HeartbeatReply::kDrain,
                                               .refused = 0x4142434445464748}));
}

inline void write_golden_reads(GoldenWriter& writer) {
  using namespace golden;
  using wire::Type;
  const auto session = counting<16>(0xA0);
  writer.request("attach", Type::kAttach, 10, {});
  writer.response("attach_reply", Type::kAttach, 10,
                  payload(wire::AttachReply{.region_bytes = 0x140000000,
                                            .read_write_offset = 0x100000000,
                                            .incarnation = 0x1817161514131211}));
  writer.request("prefetch", Type::kPrefetch, 11,
                 payload(wire::PrefetchRequest{.session = session, .lease_ms = 15'000, .count = 1},
                         wire::PrefetchRow{.key = counting<16>(0x01),
                                           .address = 0x1122334455667701,
                                           .generation = 0x2233445566778801,
                                           .length = 0x00200001}));
  writer.request("wait", Type::kWait, 12,
                 payload(wire::WaitRequest{.session = session,
                                           .first = 0x01020304,
                                           .count_max = 256,
                                           .timeout_ms = 9'500,
                                           .flags = wire::WaitRequest::kInline}));
  const wire::WaitReply waited{.first = 0x01020304, .count = 2};
  const wire::WaitRow ready{.state = wire::BlockState::kReady,
                            .length = 5,
                            .crc32c = 0x55667788,
                            .flags = Entry::kHasCrc,
                            .region_offset = 0x12345000,
                            .generation_word = 0x18,
                            .generation_value = 0x0102030405060708};
  const wire::WaitRow failed{.state = wire::BlockState::kDeviceError, .length = 0x00200001};
  writer.response("wait_reply", Type::kWait, 12, payload(waited, ready, failed), 5);
  writer.response("wait_keyed_reply", Type::kWait, 12,
                  payload(waited, ready, failed, wire::VerbsKey{0x0A0B0C0D}, wire::VerbsKey{0}));
  writer.request(
      "release", Type::kRelease, 13,
      payload(wire::ReleaseRequest{.session = session, .first = 0x01020304, .count = 0x11121314}));
  writer.request("end", Type::kEnd, 14, payload(wire::EndRequest{.session = session}));
  writer.request("report", Type::kReport, 15,
                 payload(wire::ReportRequest{.session = session, .index = 0x01020304}));
}

inline void write_golden_writes(GoldenWriter& writer) {
  using namespace golden;
  using wire::Type;
  writer.request("offer", Type::kOffer, 16,
                 payload(wire::OfferRequest{.name_space = 0x33445566778899AA,
                                            .count = 1,
                                            .flags = wire::OfferRequest::kPrefixOrder},
                         wire::OfferRow{.key = counting<16>(0x01), .length = 0x00200001}));
  const wire::OfferReplyRow granted{
      .state = wire::OfferState::kGranted, .grant = 0x700000001, .region_offset = 0x112345000};
  const wire::OfferReplyRow refused{.state = wire::OfferState::kPrefixBroken};
  writer.response("offer_reply", Type::kOffer, 16,
                  payload(wire::OfferReply{.count = 2}, granted, refused));
  writer.response("offer_keyed_reply", Type::kOffer, 16,
                  payload(wire::OfferReply{.count = 2}, granted, refused,
                          wire::VerbsKey{0x0A0B0C0D}, wire::VerbsKey{0}));
  writer.request(
      "write", Type::kWrite, 17,
      payload(wire::WriteRequest{.count = 1}, wire::WriteRow{.grant = 0x700000001, .length = 5}),
      5);
  writer.request(
      "commit", Type::kCommit, 18,
      payload(wire::CommitRequest{.count = 2},
              wire::CommitRow{
                  .grant = 0x700000001, .crc32c = 0x55667788, .flags = wire::CommitRow::kHasCrc},
              wire::CommitRow{.grant = 0x700000002, .flags = wire::CommitRow::kAbort}));
  writer.response("commit_reply", Type::kCommit, 18,
                  payload(wire::CommitReply{.count = 2}, wire::CommitState::kStored,
                          wire::CommitState::kAborted));
}

inline void write_golden_links(GoldenWriter& writer) {
  using namespace golden;
  using wire::Type;
  writer.request("link", Type::kLink, 19,
                 payload(wire::LinkEndpoint{.gid = counting<16>(0x20),
                                            .queue_pair = 0x00123456,
                                            .first_packet = 0x00ABCDEF,
                                            .lid = 0x0708,
                                            .link_layer = 2,
                                            .gid_type = 2,
                                            .mtu = 5,
                                            .reads_out = 16,
                                            .reads_in = 128}));
  writer.response(
      "link_reply", Type::kLink, 19,
      payload(wire::LinkReply{.endpoint = {.gid = counting<16>(0x30),
                                           .queue_pair = 0x00654321,
                                           .first_packet = 0x00FEDCBA,
                                           .lid = 0,
                                           .link_layer = 2,
                                           .gid_type = 2,
                                           .mtu = 3,
                                           .reads_out = 1,
                                           .reads_in = 255},
                              .address = 0x00007F0011223000,
                              .region_bytes = 0x0000000140000000,
                              .flags = wire::LinkReply::kBlockKeys,
                              .count = 1},
              wire::LinkRegion{.region_offset = 0x0000000112200000,
                               .bytes = 0x000000000AB00000,
                               .key = 0x01020304,
                               .access = wire::LinkRegion::kRead | wire::LinkRegion::kWrite}));
  writer.request("unlink", Type::kUnlink, 20, {});
  writer.response("unlink_reply", Type::kUnlink, 20, {});
}

inline GoldenMessages golden_messages() {
  GoldenWriter writer;
  write_golden_handshake(writer);
  write_golden_master(writer);
  write_golden_reads(writer);
  write_golden_writes(writer);
  write_golden_links(writer);
  return writer.take();
}

}  // namespace hymcache::wire_testing
