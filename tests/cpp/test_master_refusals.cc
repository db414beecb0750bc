// What a master refuses, and that it outlives all of it.
#include <doctest/doctest.h>
#include <sys/socket.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/master_peers.h"

namespace hymcache {
namespace {

using namespace master_tests;
using std::chrono::milliseconds;
using std::chrono::seconds;

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
    const wire::PublishRequest request{.count = 2, .flags = 0};
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

}  // namespace
}  // namespace hymcache
