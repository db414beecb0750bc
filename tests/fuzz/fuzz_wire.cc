// The parsers of the wire format, on bytes: whatever comes, it is refused with a ProtocolError or
// it is read as what it says, and then it is what the encoder makes of it again.
#include <cstdlib>

#include "tests/cpp/message_decoder.h"
#include "tests/fuzz/frame_mutator.h"

namespace hymcache::fuzzing {
namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

bool equal(wire::Bytes a, wire::Bytes b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

// Reads a payload as this message; true if it is one.
bool read_as(const wire::Header& header, wire::Bytes payload) {
  std::vector<std::byte> again;
  try {
    again = wire_testing::decode(header, payload);
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::kProtocol);
    return false;
  }
  // A HELLO may be longer than is known.
  require(equal(again, payload.first(again.size())));
  require(again.size() == payload.size() || header.type == wire::Type::kHello);
  return true;
}

void read_texts(const wire::Header& header, wire::Bytes payload) {
  std::string text;
  if (header.type == wire::Type::kError && payload.size() == sizeof(wire::ErrorReply)) {
    wire::ErrorReply reply;
    std::memcpy(&reply, payload.data(), sizeof reply);
    text = wire::from_text(reply.message);
    try {
      wire::throw_error(reply);
    } catch (const Error& error) {
      require(text == error.what());
    }
  }
  require(wire::printable(text) == text);
}

void read_frames(wire::Bytes stream) {
  while (!stream.empty()) {
    wire::Header header;
    try {
      header = wire::parse_header(stream);
      stream = stream.subspan(sizeof header);
      if (stream.size() < header.payload_bytes) return;
      wire::check_payload(header, stream.first(header.payload_bytes));
    } catch (const Error& error) {
      require(error.kind() == ErrorKind::kProtocol);
      return;
    }
    const wire::Bytes payload = stream.first(header.payload_bytes);
    const wire::Header same =
        wire::make_header(header.type, header.flags, header.request_id, payload, header.bulk_bytes);
    require(equal(wire::as_bytes(same), wire::as_bytes(header)));
    if (read_as(header, payload)) read_texts(header, payload);
    stream = stream.subspan(header.payload_bytes);
    if (stream.size() < header.bulk_bytes) return;
    stream = stream.subspan(header.bulk_bytes);
  }
}

}  // namespace
}  // namespace hymcache::fuzzing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace hymcache;
  const wire::Bytes bytes = std::as_bytes(std::span(data, size));
  fuzzing::read_frames(bytes);
  // Once more as the payload of some message, without a frame around it: the last byte says which.
  const unsigned last = size == 0 ? 0 : data[size - 1];
  wire::Header header;
  header.type = static_cast<wire::Type>(last % 64);
  header.flags = (last & 64) != 0 ? wire::kFlagResponse : 0;
  fuzzing::read_as(header, bytes.first(size == 0 ? 0 : size - 1));
  const std::string shown = wire::printable({reinterpret_cast<const char*>(data), size});
  if (wire::printable(shown) != shown) std::abort();
  return 0;
}
