// Peers of a master for its tests, over real sockets.
#pragma once

#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "master/csrc/master_server.h"
#include "transport/csrc/channel.h"

namespace hymcache::master_tests {

inline TimePoint soon() { return Clock::now() + std::chrono::seconds(10); }

inline ObjectKey make_key(std::uint64_t number) {
  ObjectKey key{};
  std::memcpy(key.data(), &number, sizeof number);
  return key;
}

inline MasterOptions make_options(std::chrono::milliseconds lease = std::chrono::seconds(10)) {
  MasterOptions options;
  options.listen = {Endpoint::parse("127.0.0.1:0")};
  options.name = "m";
  options.lease = lease;
  options.rows_max = 1u << 16;
  return options;
}

inline std::unique_ptr<Channel> connect(const MasterServer& master, wire::Role role,
                                        Identity identity = {}) {
  identity.role = role;
  identity.name = "test";
  return Channel::connect(master.endpoints().front(), identity, wire::Role::kMaster, soon());
}

inline wire::MembersReply ask_members(Channel& channel, std::vector<wire::Member>* members_out) {
  const auto frame = channel.call(wire::Type::kMembers, {}, {}, soon());
  wire::PayloadReader reader(frame.payload, "MEMBERS reply");
  const auto reply = reader.take<wire::MembersReply>();
  const wire::Bytes rows = reader.take_rows<wire::Member>(reply.count, wire::kNodesMax);
  reader.finish();
  members_out->clear();
  for (std::size_t i = 0; i < reply.count; ++i) {
    members_out->push_back(wire::row_at<wire::Member>(rows, i));
  }
  return reply;
}

inline std::vector<Entry> ask(Channel& channel, const std::vector<ObjectKey>& keys) {
  const wire::LookupRequest request{.count = static_cast<std::uint32_t>(keys.size()),
                                    .reserved = 0};
  const auto frame = channel.call(wire::Type::kLookup, wire::as_bytes(request),
                                  std::as_bytes(std::span(keys)), soon());
  wire::PayloadReader reader(frame.payload, "LOOKUP reply");
  const auto reply = reader.take<wire::LookupReply>();
  const wire::Bytes raw = reader.take_rows<Entry>(reply.count, wire::kLookupKeysMax);
  reader.finish();
  std::vector<Entry> rows;
  for (std::size_t i = 0; i < reply.count; ++i) rows.push_back(wire::row_at<Entry>(raw, i));
  return rows;
}

// A storage node as far as a master can tell.
class Node {
 public:
  Node(const MasterServer& master, NodeId id, std::uint64_t incarnation)
      : id_(id), channel_(connect(master, wire::Role::kNode)) {
    member_.node = id;
    member_.incarnation = incarnation;
    member_.name = wire::to_text<64>("n" + std::to_string(id));
    member_.tcp = wire::to_text<64>("127.0.0.1:7410");
  }

  template <class Reply, class Request>
  Reply call(wire::Type type, const Request& request, wire::Bytes rows = {}) {
    const auto frame = channel_->call(type, wire::as_bytes(request), rows, soon());
    wire::PayloadReader reader(frame.payload, "reply");
    const auto reply = reader.take<Reply>();
    reader.finish();
    return reply;
  }
  wire::RegisterReply enroll() { return call<wire::RegisterReply>(wire::Type::kRegister, member_); }
  wire::PublishReply publish(const std::vector<std::uint64_t>& keys, Generation generation) {
    std::vector<Entry> rows(keys.size());
    for (std::size_t i = 0; i < keys.size(); ++i) {
      rows[i].key = make_key(keys[i]);
      rows[i].node = id_;
      rows[i].generation = generation;
      rows[i].flags = Entry::kValid;
    }
    return publish_rows(rows);
  }
  wire::PublishReply publish_rows(const std::vector<Entry>& rows) {
    const wire::PublishRequest request{.count = static_cast<std::uint32_t>(rows.size()),
                                       .flags = 0};
    return call<wire::PublishReply>(wire::Type::kPublish, request, std::as_bytes(std::span(rows)));
  }
  std::uint32_t withdraw(std::uint64_t key, Generation generation) {
    const wire::WithdrawRequest request{.count = 1, .reserved = 0};
    const wire::WithdrawRow row{.key = make_key(key), .generation = generation};
    return call<wire::WithdrawReply>(wire::Type::kWithdraw, request, wire::as_bytes(row)).removed;
  }
  void sync() { channel_->call(wire::Type::kSynced, {}, {}, soon()); }
  wire::HeartbeatReply beat() {
    return call<wire::HeartbeatReply>(
        wire::Type::kHeartbeat,
        wire::HeartbeatRequest{
            .capacity_bytes = 100, .used_bytes = 40, .objects = 2, .sessions = 1});
  }
  wire::Member& member() { return member_; }
  Channel& channel() { return *channel_; }

 private:
  NodeId id_;
  std::unique_ptr<Channel> channel_;
  wire::Member member_;
};

template <class Predicate>
bool eventually(Predicate predicate) {
  for (const TimePoint end = soon(); Clock::now() < end;) {
    if (predicate()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return false;
}

// The kind of error that `body` ends in.
template <class Body>
ErrorKind error_of(Body body, std::string* message_out = nullptr) {
  try {
    body();
  } catch (const Error& error) {
    if (message_out != nullptr) *message_out = error.what();
    return error.kind();
  }
  FAIL("no error came");
  return ErrorKind::kDevice;
}

}  // namespace hymcache::master_tests
