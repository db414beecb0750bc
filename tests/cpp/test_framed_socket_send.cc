// FramedSocket, sending and closing: every byte in order through whatever buffers there are, every
// callback exactly once, and no connection that never ends.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <random>

#include "tests/cpp/recording_socket.h"

namespace hymcache::wire_testing {
namespace {

using wire::Type;

std::vector<iovec> pieces_of(ByteVector& bulk, std::size_t step) {
  std::vector<iovec> pieces;
  for (std::size_t at = 0; at < bulk.size(); at += step) {
    pieces.push_back({.iov_base = bulk.data() + at, .iov_len = std::min(step, bulk.size() - at)});
  }
  return pieces;
}

// Both ends with the smallest buffers that the kernel gives.
std::pair<UniqueFd, UniqueFd> tiny_socket_pair() {
  auto pair = socket_pair();
  for (const UniqueFd* fd : {&pair.first, &pair.second}) {
    set_buffer_bytes(fd->get(), SO_SNDBUF, 1);
    set_buffer_bytes(fd->get(), SO_RCVBUF, 1);
  }
  return pair;
}

// Descriptor that came with the first byte of what is read, and the byte; -1 if none did.
std::pair<int, ByteVector> receive_with_fd(int socket, std::size_t bytes) {
  ByteVector data(bytes);
  iovec part{.iov_base = data.data(), .iov_len = bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t n = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  REQUIRE(n > 0);
  data.resize(static_cast<std::size_t>(n));
  int fd = -1;
  if (const cmsghdr* const rights = CMSG_FIRSTHDR(&message)) {
    REQUIRE(rights->cmsg_type == SCM_RIGHTS);
    REQUIRE(rights->cmsg_len == CMSG_LEN(sizeof(int)));
    std::memcpy(&fd, CMSG_DATA(rights), sizeof fd);
  }
  return {fd, data};
}

bool same_file(int a, int b) {
  struct stat stat_a{};
  struct stat stat_b{};
  return ::fstat(a, &stat_a) == 0 && ::fstat(b, &stat_b) == 0 && stat_a.st_ino == stat_b.st_ino &&
         stat_a.st_dev == stat_b.st_dev;
}

}  // namespace

TEST_CASE("framed socket: frames go out whole through the smallest buffers") {
  const std::uint64_t seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  auto [ours, theirs] = tiny_socket_pair();
  RecordingSocket socket(std::move(ours));
  RawPeer peer(std::move(theirs));
  struct Out {
    ByteVector head, tail, bulk;
    int sent = 0;
  };
  std::vector<Out> out(40);
  for (Out& one : out) {
    one.head = pattern(random() % 100, static_cast<unsigned>(random()));
    one.tail = pattern(random() % 3 == 0 ? random() % 30'000 : 0, static_cast<unsigned>(random()));
    one.bulk = pattern(random() % 2 == 0 ? random() % 60'000 : 0, static_cast<unsigned>(random()));
  }
  socket.call([&](auto& framed) {
    for (std::size_t i = 0; i < out.size(); ++i) {
      const auto id = static_cast<std::uint32_t>(i);
      Out& one = out[i];
      if (one.bulk.empty()) {
        framed->send(Type::kOffer, wire::kFlagResponse, id, one.head, one.tail);
        one.sent = 1;
      } else {
        // Up to some hundred pieces, more than one call of the kernel takes.
        framed->send_bulk(Type::kWait, wire::kFlagResponse, id, one.head, one.tail,
                          pieces_of(one.bulk, 1 + random() % 997), [&one] { ++one.sent; });
      }
    }
    CHECK(framed->queued_bytes() > 0);
  });
  for (std::size_t i = 0; i < out.size(); ++i) {
    CAPTURE(i);
    const auto frame = peer.read_frame();
    REQUIRE(frame.has_value());
    CHECK(frame->header.request_id == i);
    CHECK(frame->payload == join({out[i].head, out[i].tail}));
    CHECK(frame->bulk == out[i].bulk);
  }
  socket.call([&](auto& framed) {
    CHECK(framed->queued_bytes() == 0);
    for (const Out& one : out) CHECK(one.sent == 1);
  });
}

TEST_CASE("framed socket: what was being sent is called back exactly once, however it ends") {
  enum class End { kPeerCloses, kWeClose, kDestroyed, kClosedInOnClosed };
  for (const End end : {End::kPeerCloses, End::kWeClose, End::kDestroyed, End::kClosedInOnClosed}) {
    CAPTURE(static_cast<int>(end));
    auto [ours, theirs] = tiny_socket_pair();
    RecordingSocket socket(std::move(ours));
    RawPeer peer(std::move(theirs));
    ByteVector bulk = pattern(100'000, 1);
    std::vector<int> sent(5);
    if (end == End::kClosedInOnClosed) socket.destroy_when_closed();
    socket.call([&](auto& framed) {
      for (int& one : sent) {
        framed->send_bulk(Type::kWait, 0, 1, {}, {}, pieces_of(bulk, 7000), [&one] { ++one; });
      }
      CHECK(sent == std::vector<int>(5));
      if (end == End::kWeClose) framed->close("enough");
    });
    if (end == End::kPeerCloses || end == End::kClosedInOnClosed) peer.close();
    if (end != End::kDestroyed) socket.wait_closed();
    socket.call([&](auto& framed) {
      // One more on a connection that is gone is called back at once.
      int late = 0;
      if (framed && end != End::kDestroyed) {
        framed->send_bulk(Type::kWait, 0, 2, {}, {}, pieces_of(bulk, 7000), [&late] { ++late; });
        CHECK(late == 1);
      }
    });
    socket.destroy();
    socket.call([&](auto&) { CHECK(sent == std::vector<int>(5, 1)); });
  }
}

TEST_CASE("framed socket: a callback may send the next piece") {
  auto [ours, theirs] = tiny_socket_pair();
  RecordingSocket socket(std::move(ours));
  RawPeer peer(std::move(theirs));
  ByteVector bulk = pattern(10'000, 3);
  int left = 20;
  std::function<void()> next;
  socket.call([&](auto& framed) {
    next = [&] {
      if (left-- == 0) return;
      framed->send_bulk(Type::kWait, 0, 1, {}, {}, pieces_of(bulk, 3000), next);
    };
    next();
  });
  for (int i = 0; i < 20; ++i) CHECK(peer.read_frame()->bulk == bulk);
  socket.call([&](auto&) { CHECK(left == -1); });
}

TEST_CASE("framed socket: a peer that asks and never reads is cut off") {
  auto [ours, theirs] = tiny_socket_pair();
  std::uint64_t queued_max = 0;
  RecordingSocket socket(std::move(ours),
                         [&](FramedSocket& framed, const wire::Header& header, wire::Bytes) {
                           const ByteVector answer(100'000);
                           framed.send(header.type, wire::kFlagResponse, header.request_id, answer);
                           queued_max = std::max(queued_max, framed.queued_bytes());
                         });
  RawPeer peer(std::move(theirs));
  const ByteVector request = frame_bytes(Type::kMembers, 0, 1, {});
  int asked = 0;
  while (peer.write(request)) REQUIRE(++asked < 1000);
  CHECK(socket.wait_closed() == "the peer does not read its answers");
  CHECK(queued_max > (15u << 20));
  CHECK(queued_max < (17u << 20));
}

TEST_CASE("framed socket: a peer that takes nothing is stalled, though it goes on talking") {
  auto [ours, theirs] = tiny_socket_pair();
  RecordingSocket socket(std::move(ours));
  RawPeer peer(std::move(theirs));
  socket.call([&](auto& framed) {
    const ByteVector answer(100'000);
    framed->send(Type::kMembers, wire::kFlagResponse, 1, answer);
  });
  ::usleep(30'000);
  peer.write(frame_bytes(Type::kMembers, 0, 2, {}));
  socket.wait_frames(1);
  socket.call([&](auto& framed) {
    CHECK(framed->stalled(Clock::now(), std::chrono::milliseconds(20)));
    CHECK_FALSE(framed->stalled(Clock::now(), std::chrono::seconds(20)));
  });
}

TEST_CASE("framed socket: closing with a flush sends what is queued, and nothing after it") {
  auto [ours, theirs] = tiny_socket_pair();
  RecordingSocket socket(std::move(ours));
  RawPeer peer(std::move(theirs));
  ByteVector bulk = pattern(200'000, 9);
  int sent = 0;
  int late = 0;
  socket.call([&](auto& framed) {
    framed->send_bulk(Type::kWait, wire::kFlagResponse, 1, {}, {}, pieces_of(bulk, 50'000),
                      [&sent] { ++sent; });
    framed->send_error(2, wire::ErrorCode::kUnexpected, "first");
    framed->close("first", /*flush=*/true);
    CHECK(framed->closing());
    framed->close("second", /*flush=*/true);
    framed->send_error(3, wire::ErrorCode::kUnexpected, "never sent");
    framed->send_bulk(Type::kWait, 0, 4, {}, {}, pieces_of(bulk, 50'000), [&late] { ++late; });
    CHECK(late == 1);
  });
  CHECK(socket.closed().empty());
  CHECK(peer.read_frame()->bulk == bulk);
  CHECK(wire::from_text(peer.read_frame()->error().message) == "first");
  CHECK(peer.at_end());
  CHECK(socket.wait_closed() == "first");
  socket.call([&](auto&) { CHECK(sent == 1); });
}

TEST_CASE("framed socket: a peer that does not wait for the flush ends it") {
  for (const bool peer_closes : {true, false}) {
    CAPTURE(peer_closes);
    auto [ours, theirs] = tiny_socket_pair();
    RecordingSocket socket(std::move(ours));
    RawPeer peer(std::move(theirs));
    socket.call([&](auto& framed) {
      const ByteVector answer(200'000);
      framed->send(Type::kMembers, wire::kFlagResponse, 1, answer);
      framed->close("the cause", /*flush=*/true);
    });
    ::usleep(10'000);
    CHECK(socket.closed().empty());
    if (peer_closes) {
      peer.close();
    } else {
      socket.call([](auto& framed) { framed->close("it takes too long"); });
    }
    CHECK(socket.wait_closed() == "the cause");
  }
}

TEST_CASE("framed socket: closed is said once, and may be where the socket is destroyed") {
  for (const bool destroy : {false, true}) {
    auto [ours, theirs] = socket_pair();
    RecordingSocket socket(std::move(ours));
    RawPeer peer(std::move(theirs));
    if (destroy) socket.destroy_when_closed();
    socket.call([](auto& framed) {
      framed->close("once");
      framed->close("twice");
    });
    CHECK(peer.at_end());
    CHECK(socket.wait_closed() == "once");
    ::usleep(2000);
    CHECK(socket.closed().size() == 1);
  }
}

TEST_CASE("framed socket: destroyed between close() and its end, it says nothing") {
  auto [ours, theirs] = socket_pair();
  RecordingSocket socket(std::move(ours));
  RawPeer peer(std::move(theirs));
  socket.call([](auto& framed) {
    framed->close("nobody hears this");
    framed.reset();
  });
  CHECK(peer.at_end());
  ::usleep(2000);
  CHECK(socket.closed().empty());
}

TEST_CASE("framed socket: a descriptor goes with its frame, also behind others") {
  for (const bool queued : {false, true}) {
    CAPTURE(queued);
    auto [ours, theirs] = tiny_socket_pair();
    const UniqueFd region(::memfd_create("region", MFD_CLOEXEC));
    RecordingSocket socket(std::move(ours));
    RawPeer peer(std::move(theirs));
    const std::size_t before = queued ? 100'000 : 0;
    const ByteVector payload = pattern(24, 1);
    socket.call([&](auto& framed) {
      const ByteVector other(before);
      if (queued) framed->send(Type::kMembers, wire::kFlagResponse, 1, other);
      framed->send(Type::kAttach, wire::kFlagResponse, 2, payload, {}, region.get());
      framed->send(Type::kMembers, wire::kFlagResponse, 3, payload);
    });
    if (queued) CHECK(peer.read_frame()->payload.size() == before);
    const auto [fd, data] = receive_with_fd(peer.fd(), sizeof(wire::Header) + payload.size());
    REQUIRE(fd >= 0);
    CHECK(same_file(fd, region.get()));
    ::close(fd);
    CHECK(data == frame_bytes(Type::kAttach, wire::kFlagResponse, 2, payload));
    CHECK(peer.read_frame()->header.request_id == 3);
  }
}

TEST_CASE("framed socket: a descriptor goes once, in however many pieces its frame does") {
  auto [ours, theirs] = tiny_socket_pair();
  const UniqueFd region(::memfd_create("region", MFD_CLOEXEC));
  RecordingSocket socket(std::move(ours));
  RawPeer peer(std::move(theirs));
  const ByteVector payload = pattern(100'000, 1);
  socket.call([&](auto& framed) {
    framed->send(Type::kAttach, wire::kFlagResponse, 2, payload, {}, region.get());
  });
  ByteVector received;
  int descriptors = 0;
  while (received.size() < sizeof(wire::Header) + payload.size()) {
    const auto [fd, data] = receive_with_fd(peer.fd(), 4096);
    if (fd >= 0) ::close(fd);
    descriptors += fd >= 0 ? 1 : 0;
    received.insert(received.end(), data.begin(), data.end());
  }
  CHECK(descriptors == 1);
  CHECK(received == frame_bytes(Type::kAttach, wire::kFlagResponse, 2, payload));
}

TEST_CASE("framed socket: descriptors that a peer sends unasked are not kept") {
  auto [ours, theirs] = socket_pair();
  RecordingSocket socket(std::move(ours));
  const auto open_descriptors = [] {
    int count = 0;
    for (int fd = 0; fd < 1024; ++fd) count += ::fcntl(fd, F_GETFD) >= 0 ? 1 : 0;
    return count;
  };
  const int before = open_descriptors();
  const ByteVector frame = frame_bytes(Type::kWrite, 0, 1, pattern(8, 1), pattern(100'000, 2));
  const int passed[2] = {theirs.get(), theirs.get()};
  for (std::size_t at = 0; at < frame.size(); at += 20'000) {
    iovec part{.iov_base = const_cast<std::byte*>(frame.data()) + at,
               .iov_len = std::min<std::size_t>(20'000, frame.size() - at)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof passed)] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* const rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof passed);
    std::memcpy(CMSG_DATA(rights), passed, sizeof passed);
    REQUIRE(::sendmsg(theirs.get(), &message, MSG_NOSIGNAL) == static_cast<ssize_t>(part.iov_len));
  }
  CHECK(socket.wait_frames(1).front().bulk == pattern(100'000, 2));
  CHECK(open_descriptors() == before);
}

}  // namespace hymcache::wire_testing
