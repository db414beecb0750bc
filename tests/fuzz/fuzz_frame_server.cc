// A FrameServer whose peer sends bytes: a model reads the same bytes beside it, and both must agree
// on which frames were handled, what was answered, and whether an ERROR ended the connection.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "tests/cpp/message_decoder.h"
#include "tests/fuzz/frame_mutator.h"
#include "transport/csrc/channel.h"
#include "transport/csrc/frame_server.h"

namespace hymcache::fuzzing {
namespace {

constexpr std::uint64_t kBulkKept = 1u << 16;
// Fuzzers run where everything else does: what a starved machine takes is no fault.
constexpr auto kPatience = std::chrono::seconds(120);

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz_frame_server: %s\n", what);
  std::abort();
}

using ByteVector = std::vector<std::byte>;

// Takes every well-formed message, and answers with a digest of what it got.
class PermissiveHandler : public FrameServer::Handler {
 public:
  static wire::PublishReply digest(std::uint32_t crc, std::uint64_t bulk_bytes) {
    return {.accepted = crc, .refused = static_cast<std::uint32_t>(bulk_bytes)};
  }

 private:
  void on_frame(FrameServer::Peer& peer, const wire::Header& header, wire::Bytes payload) override {
    wire_testing::decode(header, payload);
    const std::uint32_t crc = crc32c(0, payload.data(), payload.size());
    if (header.bulk_bytes == 0 || header.bulk_bytes > kBulkKept) {
      const wire::PublishReply reply = digest(crc, header.bulk_bytes);
      peer.reply(header, wire::as_bytes(reply));
      return;
    }
    // Into two pieces and back.
    const auto bulk = std::make_shared<ByteVector>(header.bulk_bytes);
    const std::size_t half = bulk->size() / 2;
    std::vector<iovec> pieces{{.iov_base = bulk->data(), .iov_len = half},
                              {.iov_base = bulk->data() + half, .iov_len = bulk->size() - half}};
    peer.socket().receive_bulk(pieces, [&peer, header, bulk, pieces, crc] {
      const wire::PublishReply reply = digest(crc, bulk->size());
      peer.socket().send_bulk(header.type, wire::kFlagResponse, header.request_id,
                              wire::as_bytes(reply), {}, pieces, [bulk] {});
    });
  }
  void on_peer_gone(FrameServer::Peer&) override {}
};

// What a peer gets for `stream`, by the document.
struct Expected {
  std::vector<std::pair<std::uint32_t, ByteVector>> answers;  // request id; payload and bulk bytes
  std::optional<std::uint32_t> error;                         // request id of an ERROR
};

bool is_taken(const wire::Header& header, wire::Bytes payload) {
  if (header.is_response() || header.type == wire::Type::kHello ||
      header.type == wire::Type::kAuth) {
    return false;
  }
  try {
    wire_testing::decode(header, payload);
  } catch (const Error&) {
    return false;
  }
  return true;
}

Expected expect(wire::Bytes stream) {
  Expected expected;
  while (stream.size() >= sizeof(wire::Header)) {
    wire::Header header;
    try {
      header = wire::parse_header(stream);
    } catch (const Error&) {
      expected.error = 0;
      break;
    }
    stream = stream.subspan(sizeof header);
    if (stream.size() < header.payload_bytes) break;
    const wire::Bytes payload = stream.first(header.payload_bytes);
    const std::uint32_t crc = crc32c(0, payload.data(), payload.size());
    if (crc != header.payload_crc32c || !is_taken(header, payload)) {
      expected.error = header.request_id;
      break;
    }
    stream = stream.subspan(header.payload_bytes);
    const bool kept = header.bulk_bytes > 0 && header.bulk_bytes <= kBulkKept;
    const bool whole = stream.size() >= header.bulk_bytes;
    if (whole || !kept) {
      const wire::PublishReply reply = PermissiveHandler::digest(crc, header.bulk_bytes);
      const wire::Bytes head = wire::as_bytes(reply);
      ByteVector answer(head.begin(), head.end());
      if (kept) answer.insert(answer.end(), stream.begin(), stream.begin() + header.bulk_bytes);
      expected.answers.emplace_back(header.request_id, std::move(answer));
    }
    if (!whole) break;
    stream = stream.subspan(header.bulk_bytes);
  }
  return expected;
}

class Server {
 public:
  Server() : thread_("server") {
    thread_.loop().call([this] {
      server_ = std::make_unique<FrameServer>(
          thread_.loop(), Identity{.role = wire::Role::kNode, .name = "node", .mac = nullptr},
          FrameServerOptions{
              .listen = {endpoint_}, .handshake_timeout = kPatience, .stall_timeout = kPatience},
          handler_);
    });
  }
  ~Server() {
    thread_.loop().call([this] { server_.reset(); });
    thread_.stop();
  }
  UniqueFd connect() {
    try {
      return Channel::connect(endpoint_, {.name = "fuzz", .mac = nullptr}, wire::Role::kNode,
                              Clock::now() + kPatience)
          ->release();
    } catch (const Error& error) {
      require(false, error.what());
      throw;
    }
  }

 private:
  const Endpoint endpoint_{
      .host = "/tmp/hymcache-fuzz-" + std::to_string(::getpid()), .port = 0, .is_unix = true};
  PermissiveHandler handler_;
  LoopThread thread_;
  std::unique_ptr<FrameServer> server_;
};

// Sends all and receives all at once, so that neither side waits for the other; in segments whose
// sizes follow from the bytes.
ByteVector exchange(int fd, wire::Bytes bytes) {
  ByteVector received;
  unsigned cut = 1;
  bool writing = true;
  for (;;) {
    if (writing && bytes.empty()) {
      ::shutdown(fd, SHUT_WR);
      writing = false;
    }
    pollfd ready{
        .fd = fd, .events = static_cast<short>(writing ? POLLIN | POLLOUT : POLLIN), .revents = 0};
    const int count = ::poll(&ready, 1, std::chrono::milliseconds(kPatience).count());
    if (count < 0 && errno == EINTR) continue;
    require(count > 0, "the server hangs");
    if ((ready.revents & POLLOUT) != 0) {
      cut = cut * 31 + std::to_integer<unsigned>(bytes.front());
      const std::size_t step = std::min<std::size_t>(bytes.size(), 1 + cut % 4096);
      const ssize_t n = ::send(fd, bytes.data(), step, MSG_NOSIGNAL | MSG_DONTWAIT);
      bytes = n > 0 ? bytes.subspan(static_cast<std::size_t>(n)) : wire::Bytes();
    }
    if ((ready.revents & (POLLIN | POLLHUP)) != 0) {
      const std::size_t before = received.size();
      received.resize(before + 65'536);
      const ssize_t n = ::recv(fd, received.data() + before, 65'536, 0);
      received.resize(before + static_cast<std::size_t>(std::max<ssize_t>(n, 0)));
      if (n <= 0) return received;
    }
  }
}

void check(const Expected& expected, wire::Bytes received) {
  const auto take = [&](std::size_t bytes) {
    require(received.size() >= bytes, "an answer is cut short");
    const wire::Bytes taken = received.first(bytes);
    received = received.subspan(bytes);
    return taken;
  };
  for (const auto& [request_id, answer] : expected.answers) {
    const wire::Header header = wire::parse_header(take(sizeof(wire::Header)));
    require(header.is_response() && header.request_id == request_id, "another answer was due");
    const wire::Bytes body = take(header.payload_bytes + header.bulk_bytes);
    require(ByteVector(body.begin(), body.end()) == answer, "the answer says something else");
    wire::check_payload(header, body.first(header.payload_bytes));
  }
  if (expected.error) {
    const wire::Header header = wire::parse_header(take(sizeof(wire::Header)));
    require(header.type == wire::Type::kError && header.is_response(), "no ERROR where one is due");
    require(header.request_id == *expected.error, "the ERROR is about something else");
    wire::check_payload(header, take(header.payload_bytes));
  }
  require(received.empty(), "more came than was due");
}

}  // namespace
}  // namespace hymcache::fuzzing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace hymcache;
  using namespace hymcache::fuzzing;
  static Server server;
  const wire::Bytes bytes = std::as_bytes(std::span(data, size));
  const UniqueFd fd = server.connect();
  check(expect(bytes), exchange(fd.get(), bytes));
  return 0;
}
