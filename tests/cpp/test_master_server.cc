// A master behind real sockets: every message, what it refuses, and that it outlives all of it.
#include <doctest/doctest.h>
#include <sys/socket.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "master/csrc/master_server.h"
#include "transport/csrc/channel.h"

namespace hymcache {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TimePoint soon() { return Clock::now() + seconds(10); }

ObjectKey make_key(std::uint64_t number) {
  ObjectKey key{};
  std::memcpy(key.data(), &number, sizeof number);
  return key;
}

MasterOptions make_options(milliseconds lease = seconds(10)) {
  MasterOptions options;
  options.listen = {Endpoint::parse("127.0.0.1:0")};
  options.name = "m";
  options.lease = lease;
  options.rows_max = 1u << 16;
  return options;
}

std::unique_ptr<Channel> connect(const MasterServer& master, wire::Role role,
                                 Identity identity = {}) {
  identity.role = role;
  identity.name = "test";
  return Channel::connect(master.endpoints().front(), identity, wire::Role::kMaster, soon());
}

wire::MembersReply ask_members(Channel& channel, std::vector<wire::Member>* members_out) {
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

std::vector<Entry> ask(Channel& channel, const std::vector<ObjectKey>& keys) {
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
                                       .reserved = 0};
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
    std::this_thread::sleep_for(milliseconds(2));
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

TEST_CASE("master: what a node publishes is found, until it is withdrawn") {
  MasterServer master(make_options());
  master.start();
  Node node(master, 7, 1);
  const wire::RegisterReply registered = node.enroll();
  CHECK(registered.lease_ms == 10'000);
  CHECK(registered.epoch == 1);
  CHECK(node.publish({1, 2}, 5).accepted == 2);

  const auto client = connect(master, wire::Role::kClient);
  std::vector<Entry> rows = ask(*client, {make_key(1), make_key(3), make_key(2)});
  REQUIRE(rows.size() == 3);
  CHECK(rows[0].node == 7);
  CHECK(rows[0].generation == 5);
  CHECK(rows[0].epoch == registered.epoch);
  CHECK_FALSE(rows[1].valid());
  CHECK(rows[2].valid());
  CHECK(ask(*client, {}).empty());

  CHECK(node.withdraw(1, 4) == 0);
  CHECK(node.withdraw(1, 5) == 1);
  CHECK_FALSE(ask(*client, {make_key(1)})[0].valid());

  const MasterStats stats = master.stats();
  CHECK(stats.counters.lookups == 3);
  CHECK(stats.counters.lookup_keys == 4);
  CHECK(stats.counters.lookup_hits == 2);
  CHECK(stats.counters.rows_published == 2);
  CHECK(stats.counters.rows_withdrawn == 1);
  CHECK(stats.rows == 1);
  CHECK(stats.nodes_alive == 1);
  CHECK(stats.server.connections == 2);
  CHECK(stats.cpu_ns > 0);
}

TEST_CASE("master: members tell who is alive, and their version tells of changes") {
  MasterServer master(make_options());
  master.start();
  const auto client = connect(master, wire::Role::kClient);
  std::vector<wire::Member> members;
  const std::uint64_t empty_version = ask_members(*client, &members).version;
  CHECK(members.empty());
  CHECK(master.wait_members(0, seconds(0)) == empty_version);

  Node node(master, 7, 1);
  const std::uint64_t version = node.enroll().members_version;
  CHECK(version != empty_version);
  CHECK(master.wait_members(empty_version, seconds(10)) == version);
  CHECK(node.beat().members_version == version);
  CHECK(ask_members(*client, &members).version == version);
  REQUIRE(members.size() == 1);
  CHECK(members[0].node == 7);
  CHECK(wire::from_text(members[0].name) == "n7");
  CHECK(members[0].capacity_bytes == 100);
  CHECK(members[0].used_bytes == 40);
  CHECK(members[0].state == wire::MemberState::kAlive);

  CHECK((node.beat().flags & wire::HeartbeatReply::kDrain) == 0);
  CHECK(master.drain(7, true));
  CHECK((node.beat().flags & wire::HeartbeatReply::kDrain) != 0);
  CHECK(ask_members(*client, &members).version != version);
  CHECK(members[0].state == wire::MemberState::kDraining);
  CHECK_FALSE(master.drain(8, true));
}

TEST_CASE("master: a node that falls silent is hidden after its lease, and may come back") {
  MasterServer master(make_options(milliseconds(150)));
  master.start();
  const auto client = connect(master, wire::Role::kClient);
  auto node = std::make_unique<Node>(master, 7, 1);
  node->enroll();
  node->publish({1}, 5);
  node->sync();
  for (int i = 0; i < 6; ++i) {
    std::this_thread::sleep_for(milliseconds(50));
    node->beat();
  }
  CHECK(ask(*client, {make_key(1)})[0].valid());

  CHECK(eventually([&] { return !ask(*client, {make_key(1)})[0].valid(); }));
  CHECK(eventually([&] { return master.stats().rows == 0; }));
  REQUIRE(master.members().size() == 1);
  CHECK(master.members()[0].record.state == NodeState::kLost);
  std::string message;
  CHECK(error_of([&] { node->beat(); }, &message) == ErrorKind::kUnavailable);
  CHECK(message.find("lapsed") != std::string::npos);

  node = std::make_unique<Node>(master, 7, 1);
  node->enroll();
  node->publish({1}, 5);
  CHECK(ask(*client, {make_key(1)})[0].valid());
  CHECK(master.stats().counters.leases_lapsed == 1);

  CHECK(error_of([&] { master.forget(7); }) == ErrorKind::kConfig);
  CHECK(eventually([&] { return master.stats().nodes_alive == 0; }));
  CHECK(master.forget(7));
  CHECK_FALSE(master.forget(7));
  CHECK(master.members().empty());
}

TEST_CASE("master: a connection that breaks costs nothing, and SYNCED hides what is gone") {
  MasterServer master(make_options());
  master.start();
  const auto client = connect(master, wire::Role::kClient);
  auto node = std::make_unique<Node>(master, 7, 1);
  node->enroll();
  node->publish({1, 2}, 5);
  node->sync();
  node->channel().close();
  CHECK(eventually([&] { return master.stats().server.connections == 1; }));
  CHECK(ask(*client, {make_key(1)})[0].valid());

  node = std::make_unique<Node>(master, 7, 1);
  node->enroll();
  node->publish({2}, 5);
  CHECK(ask(*client, {make_key(1)})[0].valid());
  node->sync();
  CHECK_FALSE(ask(*client, {make_key(1)})[0].valid());
  CHECK(ask(*client, {make_key(2)})[0].valid());
  CHECK(eventually([&] { return master.stats().rows == 1; }));
  CHECK(master.stats().counters.rows_swept == 1);
}

TEST_CASE("master: the same process on a second connection takes over from the first") {
  MasterServer master(make_options());
  master.start();
  Node first(master, 7, 1);
  first.enroll();
  Node second(master, 7, 1);
  second.enroll();
  CHECK(error_of([&] { first.beat(); }) == ErrorKind::kUnavailable);
  CHECK(second.beat().lease_ms == 10'000);
}

TEST_CASE("master: a second live node of one name is refused with what to do about it") {
  MasterServer master(make_options());
  master.start();
  Node first(master, 7, 1);
  first.enroll();
  first.publish({1}, 5);
  Node second(master, 7, 2);
  std::string message;
  CHECK(error_of([&] { second.enroll(); }, &message) == ErrorKind::kConfig);
  CHECK(message.find("another live node has the name n7") != std::string::npos);
  CHECK(message.find("node.name") != std::string::npos);

  Node other_name(master, 7, 3);
  other_name.member().name = wire::to_text<64>("twin");
  CHECK(error_of([&] { other_name.enroll(); }, &message) == ErrorKind::kConfig);
  CHECK(message.find("twin") != std::string::npos);
  CHECK(master.stats().counters.registrations_refused == 2);

  // Its end frees the name at once, and what it had is no longer found.
  first.channel().close();
  CHECK(eventually([&] { return master.members()[0].record.peer == 0; }));
  Node third(master, 7, 2);
  third.enroll();
  const auto client = connect(master, wire::Role::kClient);
  CHECK_FALSE(ask(*client, {make_key(1)})[0].valid());
}

TEST_CASE("master: what a peer may not say ends its connection, and only that") {
  MasterServer master(make_options());
  master.start();
  const auto client = connect(master, wire::Role::kClient);
  Node node(master, 7, 1);
  node.enroll();
  std::string message;

  SUBCASE("a client registers") {
    const auto other = connect(master, wire::Role::kClient);
    CHECK(
        error_of(
            [&] { other->call(wire::Type::kRegister, wire::as_bytes(node.member()), {}, soon()); },
            &message) == ErrorKind::kProtocol);
  }
  SUBCASE("a client publishes") {
    const auto other = connect(master, wire::Role::kClient);
    const wire::PublishRequest request;
    CHECK(error_of([&] {
            other->call(wire::Type::kPublish, wire::as_bytes(request), {}, soon());
          }) == ErrorKind::kProtocol);
  }
  SUBCASE("a row of another node") {
    Entry row;
    row.node = 8;
    row.generation = 1;
    row.flags = Entry::kValid;
    CHECK(error_of([&] { node.publish_rows({row}); }, &message) == ErrorKind::kProtocol);
    CHECK(message.find("another node") != std::string::npos);
  }
  SUBCASE("a row that names nothing") {
    Entry row;
    row.node = 7;
    CHECK(error_of([&] { node.publish_rows({row}); }) == ErrorKind::kProtocol);
  }
  SUBCASE("more rows than announced, or fewer") {
    const wire::PublishRequest request{.count = 2, .reserved = 0};
    const Entry row;
    CHECK(error_of([&] {
            node.call<wire::PublishReply>(wire::Type::kPublish, request, wire::as_bytes(row));
          }) == ErrorKind::kProtocol);
  }
  SUBCASE("33 keys") {
    CHECK(error_of([&] { ask(node.channel(), std::vector<ObjectKey>(33)); }, &message) ==
          ErrorKind::kProtocol);
    CHECK(message.find("at most 32") != std::string::npos);
  }
  SUBCASE("a count that would overflow") {
    const wire::LookupRequest request{.count = 0xFFFF'FFFFu, .reserved = 0};
    CHECK(error_of([&] { node.call<wire::LookupReply>(wire::Type::kLookup, request); }) ==
          ErrorKind::kProtocol);
  }
  SUBCASE("a message for storage nodes") {
    CHECK(error_of([&] { node.channel().call(wire::Type::kAttach, {}, {}, soon()); }) ==
          ErrorKind::kProtocol);
  }
  SUBCASE("bulk bytes") {
    char bytes[64] = {};
    const iovec bulk{.iov_base = bytes, .iov_len = sizeof bytes};
    const wire::LookupRequest request;
    CHECK(error_of([&] {
            const auto id = node.channel().send(wire::Type::kLookup, wire::as_bytes(request), {},
                                                soon(), {&bulk, 1});
            node.channel().receive(wire::Type::kLookup, id, soon());
          }) == ErrorKind::kProtocol);
  }
  SUBCASE("another node on the same connection") {
    node.member().node = 8;
    CHECK(error_of([&] { node.enroll(); }) == ErrorKind::kProtocol);
  }
  CHECK(ask(*client, {make_key(1)}).size() == 1);
  CHECK(eventually([&] { return master.stats().server.protocol_errors == 1; }));
}

TEST_CASE("master: a member that cannot be is refused") {
  MasterServer master(make_options());
  master.start();
  Node node(master, 7, 1);
  SUBCASE("without a name") { node.member().name = {}; }
  SUBCASE("a line break in its name") { node.member().name = wire::to_text<64>("a\nb"); }
  SUBCASE("a name without an end") { node.member().name.fill('a'); }
  SUBCASE("nowhere to connect to") { node.member().tcp = {}; }
  SUBCASE("the id 0") { node.member().node = 0; }
  CHECK(error_of([&] { node.enroll(); }) == ErrorKind::kProtocol);
  CHECK(master.members().empty());
}

TEST_CASE("master: publishing before REGISTER is answered, not punished") {
  MasterServer master(make_options());
  master.start();
  Node node(master, 7, 1);
  CHECK(error_of([&] { node.publish({1}, 5); }) == ErrorKind::kUnavailable);
}

TEST_CASE("master: garbage and frames too large end their connection, and the master lives") {
  MasterServer master(make_options());
  master.start();
  const auto send_raw = [&](wire::Bytes bytes) {
    const UniqueFd fd = connect_socket(master.endpoints().front(), soon());
    ::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    // An ERROR frame may come first; then the end of the stream.
    std::vector<std::byte> answer(4096);
    while (::recv(fd.get(), answer.data(), answer.size(), 0) > 0) {
    }
  };
  std::vector<std::byte> garbage(10'000, std::byte{0xA5});
  send_raw(garbage);
  wire::Header header = wire::make_header(wire::Type::kHello, 0, 1, {}, 0);
  header.payload_bytes = 0xFFFF'FFFFu;
  send_raw(wire::as_bytes(header));
  header = wire::make_header(wire::Type::kHello, 0, 1, {}, wire::kBulkBytesMax + 1);
  send_raw(wire::as_bytes(header));
  header = wire::make_header(wire::Type::kLookup, 0, 1, {}, 0);  // before HELLO
  send_raw(wire::as_bytes(header));

  const auto client = connect(master, wire::Role::kClient);
  CHECK(ask(*client, {make_key(1)}).size() == 1);
}

TEST_CASE("master: another protocol version is refused with both named") {
  MasterServer master(make_options());
  master.start();
  Identity identity;
  identity.version_min = wire::kVersionMax + 1;
  identity.version_max = wire::kVersionMax + 3;
  std::string message;
  CHECK(error_of([&] { connect(master, wire::Role::kClient, identity); }, &message) ==
        ErrorKind::kProtocol);
  CHECK(message.find("speaks protocol version 2 to 4") != std::string::npos);
  CHECK(message.find("speaks 1:") != std::string::npos);
}

TEST_CASE("master: a secret is required where one is set") {
  const auto make_mac = [](char secret) {
    return [secret](std::string_view message) {
      wire::Mac mac{};
      for (std::size_t i = 0; i < message.size(); ++i) {
        mac[i % mac.size()] =
            static_cast<std::uint8_t>(mac[i % mac.size()] * 31 + message[i] + secret);
      }
      return mac;
    };
  };
  MasterOptions options = make_options();
  options.mac = make_mac('a');
  MasterServer master(options);
  master.start();
  Identity identity;
  CHECK(error_of([&] { connect(master, wire::Role::kClient, identity); }) == ErrorKind::kConfig);
  identity.mac = make_mac('b');
  CHECK(error_of([&] { connect(master, wire::Role::kClient, identity); }) == ErrorKind::kConfig);
  identity.mac = make_mac('a');
  CHECK(ask(*connect(master, wire::Role::kClient, identity), {make_key(1)}).size() == 1);
}

TEST_CASE("master: it can be stopped while it is asked, and started again") {
  MasterServer master(make_options(milliseconds(100)));
  CHECK(error_of([&] { master.stats(); }) == ErrorKind::kUnavailable);
  for (int round = 0; round < 3; ++round) {
    master.start();
    CHECK(error_of([&] { master.start(); }) == ErrorKind::kConfig);
    Node node(master, 7, 1);
    node.enroll();
    std::thread asker([&] {
      try {
        for (;;) master.stats();
      } catch (const Error&) {
      }
    });
    std::thread watcher([&] {
      try {
        for (std::uint64_t version = 0;;) version = master.wait_members(version, seconds(30));
      } catch (const Error&) {
      }
    });
    std::this_thread::sleep_for(milliseconds(20));
    master.stop();
    asker.join();
    watcher.join();
    CHECK(error_of([&] { node.beat(); }) == ErrorKind::kUnavailable);
  }
}

TEST_CASE("master: it does not start where another listens") {
  MasterServer first(make_options());
  first.start();
  MasterOptions options = make_options();
  options.listen = first.endpoints();
  MasterServer second(options);
  std::string message;
  CHECK(error_of([&] { second.start(); }, &message) == ErrorKind::kConfig);
  CHECK(message.find("another process listens there") != std::string::npos);
}

TEST_CASE("master: rows and nodes of a key are all shown to an operator") {
  MasterServer master(make_options());
  master.start();
  Node first(master, 7, 1);
  first.enroll();
  first.publish({1}, 5);
  Node second(master, 8, 1);
  second.enroll();
  second.publish({1}, 6);
  const auto found = master.lookup({make_key(1), make_key(2)});
  REQUIRE(found.size() == 2);
  CHECK(found[0].size() == 2);
  CHECK(found[1].empty());
  for (const FoundRow& row : found[0]) {
    CHECK(row.shown);
    CHECK(row.node_name == "n" + std::to_string(row.entry.node));
  }
  CHECK(error_of([&] { master.lookup(std::vector<ObjectKey>(33)); }) == ErrorKind::kConfig);
}

}  // namespace
}  // namespace hymcache
