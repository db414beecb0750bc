// Messages of a storage node whose frames are in order and whose payloads are anything.
//
// An input is a sequence of messages: a type, two bytes of length, a payload. Each run has a
// connection of its own to one master that lives as long as the process.
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "master/csrc/master_server.h"
#include "transport/csrc/channel.h"

namespace hymcache {
namespace {

constexpr std::array kTypes{wire::Type::kLookup,   wire::Type::kMembers, wire::Type::kRegister,
                            wire::Type::kPublish,  wire::Type::kSynced,  wire::Type::kWithdraw,
                            wire::Type::kHeartbeat};
constexpr std::size_t kMessagesMax = 32;

TimePoint soon() { return Clock::now() + std::chrono::seconds(20); }

MasterServer& the_master() {
  static MasterServer* const master = [] {
    MasterOptions options;
    options.listen = {Endpoint::parse("127.0.0.1:0")};
    options.lease = std::chrono::milliseconds(200);
    options.rows_max = 4096;
    auto* made = new MasterServer(options);  // never destroyed: it outlives main()
    made->start();
    return made;
  }();
  return *master;
}

// The messages of an input as frames, with a MEMBERS behind them: its answer, or the connection's
// end, says that all was read.
std::vector<std::byte> make_frames(wire::Bytes input, std::uint32_t* last_id) {
  std::vector<std::byte> frames;
  std::uint32_t id = 1;
  const auto append = [&](wire::Type type, wire::Bytes payload) {
    const wire::Header header = wire::make_header(type, 0, ++id, payload, 0);
    const wire::Bytes head = wire::as_bytes(header);
    frames.insert(frames.end(), head.begin(), head.end());
    frames.insert(frames.end(), payload.begin(), payload.end());
  };
  for (std::size_t i = 0; i < kMessagesMax && input.size() >= 3; ++i) {
    const wire::Type type = kTypes[static_cast<std::uint8_t>(input[0]) % kTypes.size()];
    const auto length = static_cast<std::size_t>(wire::row_at<std::uint16_t>(input.subspan(1), 0));
    input = input.subspan(3);
    const wire::Bytes payload = input.first(std::min(length, input.size()));
    append(type, payload);
    input = input.subspan(payload.size());
  }
  append(wire::Type::kMembers, {});
  *last_id = id;
  return frames;
}

void run(wire::Bytes input) {
  MasterServer& master = the_master();
  Identity identity;
  identity.role = wire::Role::kNode;
  identity.name = "fuzz";
  const Endpoint endpoint = master.endpoints().front();
  const UniqueFd fd = Channel::connect(endpoint, identity, wire::Role::kMaster, soon())->release();
  std::uint32_t last_id = 0;
  const std::vector<std::byte> frames = make_frames(input, &last_id);
  if (::send(fd.get(), frames.data(), frames.size(), MSG_NOSIGNAL) < 0) return;

  std::vector<std::byte> buffer;
  for (;;) {
    std::array<std::byte, 65536> piece;
    const ssize_t n = ::recv(fd.get(), piece.data(), piece.size(), 0);
    if (n <= 0) break;
    buffer.insert(buffer.end(), piece.begin(), piece.begin() + n);
    while (buffer.size() >= sizeof(wire::Header)) {
      const wire::Header header = wire::parse_header(buffer);  // an answer is always in order
      const std::size_t bytes = sizeof header + header.payload_bytes;
      if (buffer.size() < bytes) break;
      wire::check_payload(header,
                          wire::Bytes(buffer).subspan(sizeof header, bytes - sizeof header));
      if (header.request_id == last_id) return;
      buffer.erase(buffer.begin(), buffer.begin() + static_cast<std::ptrdiff_t>(bytes));
    }
  }
  const MasterStats stats = master.stats();
  if (stats.rows > stats.rows_max || stats.rows_hidden > stats.rows) std::abort();
}

}  // namespace
}  // namespace hymcache

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  hymcache::run(std::as_bytes(std::span(data, size)));
  return 0;
}
