#include "transport/csrc/wire.h"

#include "transport/csrc/crc32c.h"

namespace hymcache::wire {
namespace {

constexpr std::size_t kCheckedHeaderBytes = sizeof(Header) - sizeof(Header::header_crc32c);

[[noreturn]] void malformed(const std::string& message) {
  throw Error(ErrorKind::kProtocol, message);
}

// Bytes of the UTF-8 sequence at the front of `text` (RFC 3629, table in section 4); 0 if it is
// none.
std::size_t utf8_sequence_bytes(std::string_view text) noexcept {
  const auto at = [&](std::size_t i) -> unsigned {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u;
  };
  const auto follows = [&](std::size_t i) { return at(i) >= 0x80 && at(i) <= 0xBF; };
  const unsigned first = at(0);
  const unsigned second = at(1);
  if (first <= 0x7F) return 1;
  if (first >= 0xC2 && first <= 0xDF) return follows(1) ? 2 : 0;
  if (first >= 0xE0 && first <= 0xEF) {
    const bool overlong = first == 0xE0 && second < 0xA0;
    const bool surrogate = first == 0xED && second > 0x9F;
    return follows(1) && follows(2) && !overlong && !surrogate ? 3 : 0;
  }
  if (first >= 0xF0 && first <= 0xF4) {
    const bool overlong = first == 0xF0 && second < 0x90;
    const bool beyond = first == 0xF4 && second > 0x8F;
    return follows(1) && follows(2) && follows(3) && !overlong && !beyond ? 4 : 0;
  }
  return 0;
}

}  // namespace

Header make_header(Type type, std::uint16_t flags, std::uint32_t request_id, Bytes head, Bytes tail,
                   std::uint64_t bulk_bytes) noexcept {
  Header header;
  header.type = type;
  header.flags = flags;
  header.request_id = request_id;
  header.payload_bytes = static_cast<std::uint32_t>(head.size() + tail.size());
  header.bulk_bytes = bulk_bytes;
  header.payload_crc32c = crc32c(crc32c(0, head.data(), head.size()), tail.data(), tail.size());
  header.header_crc32c = crc32c(0, &header, kCheckedHeaderBytes);
  return header;
}

Header make_header(Type type, std::uint16_t flags, std::uint32_t request_id, Bytes payload,
                   std::uint64_t bulk_bytes) noexcept {
  return make_header(type, flags, request_id, payload, {}, bulk_bytes);
}

Header parse_header(Bytes bytes, std::uint32_t payload_bytes_max) {
  if (bytes.size() < sizeof(Header)) malformed("a frame header is cut short");
  Header header;
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.magic != kMagic) malformed("the peer does not speak the HyMCache protocol");
  if (header.header_crc32c != crc32c(0, &header, kCheckedHeaderBytes)) {
    malformed("a frame header is damaged (crc32c mismatch)");
  }
  if ((header.flags & ~kFlagResponse) != 0) {
    malformed("a frame header has flags that version 1 does not know: " +
              std::to_string(header.flags));
  }
  if (header.payload_bytes > payload_bytes_max) {
    malformed("a frame announces " + std::to_string(header.payload_bytes) +
              " payload bytes, at most " + std::to_string(payload_bytes_max) + " are allowed");
  }
  if (header.bulk_bytes > kBulkBytesMax) {
    malformed("a frame announces " + std::to_string(header.bulk_bytes) + " bulk bytes, at most " +
              std::to_string(kBulkBytesMax) + " are allowed");
  }
  return header;
}

void check_payload(const Header& header, Bytes payload) {
  if (header.payload_crc32c != crc32c(0, payload.data(), payload.size())) {
    malformed(std::string("the payload of a ") + type_name(header.type) +
              " frame is damaged (crc32c mismatch)");
  }
}

Bytes PayloadReader::take_bytes(std::size_t bytes) {
  if (bytes > rest_.size()) {
    malformed(std::string(what_) + ": " + std::to_string(bytes) + " bytes wanted, " +
              std::to_string(rest_.size()) + " are left");
  }
  const Bytes taken = rest_.first(bytes);
  rest_ = rest_.subspan(bytes);
  return taken;
}

void PayloadReader::finish() const {
  if (!rest_.empty()) {
    malformed(std::string(what_) + ": " + std::to_string(rest_.size()) + " bytes too many");
  }
}

void PayloadReader::fail_count(std::uint32_t count, std::uint32_t count_max) const {
  malformed(std::string(what_) + ": " + std::to_string(count) + " rows, at most " +
            std::to_string(count_max) + " are allowed");
}

std::string printable(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const std::size_t bytes = utf8_sequence_bytes(text);
    const auto first = static_cast<unsigned char>(text.front());
    if (bytes == 0 || first < 0x20 || first == 0x7F) {
      out += '?';
      text.remove_prefix(1);
    } else {
      out += text.substr(0, bytes);
      text.remove_prefix(bytes);
    }
  }
  return out;
}

ErrorReply make_error(ErrorCode code, std::string_view message) noexcept {
  ErrorReply reply;
  reply.code = code;
  message.copy(reply.message.data(), reply.message.size() - 1);
  return reply;
}

void throw_error(const ErrorReply& reply) {
  const std::string message = from_text(reply.message);
  switch (reply.code) {
    case ErrorCode::kBusy:
    case ErrorCode::kNoSession:
    case ErrorCode::kUnregistered:
      throw Error(ErrorKind::kUnavailable, message);
    case ErrorCode::kAuthentication:
    case ErrorCode::kConflict:
      throw Error(ErrorKind::kConfig, message);
    case ErrorCode::kVersion:
    case ErrorCode::kMalformed:
    case ErrorCode::kUnexpected:
      break;
  }
  throw Error(ErrorKind::kProtocol, message);
}

const char* type_name(Type type) noexcept {
  switch (type) {
    case Type::kHello:
      return "HELLO";
    case Type::kAuth:
      return "AUTH";
    case Type::kError:
      return "ERROR";
    case Type::kLookup:
      return "LOOKUP";
    case Type::kMembers:
      return "MEMBERS";
    case Type::kRegister:
      return "REGISTER";
    case Type::kPublish:
      return "PUBLISH";
    case Type::kWithdraw:
      return "WITHDRAW";
    case Type::kSynced:
      return "SYNCED";
    case Type::kHeartbeat:
      return "HEARTBEAT";
    case Type::kAttach:
      return "ATTACH";
    case Type::kPrefetch:
      return "PREFETCH";
    case Type::kWait:
      return "WAIT";
    case Type::kRelease:
      return "RELEASE";
    case Type::kEnd:
      return "END";
    case Type::kReport:
      return "REPORT";
    case Type::kOffer:
      return "OFFER";
    case Type::kWrite:
      return "WRITE";
    case Type::kCommit:
      return "COMMIT";
    case Type::kLink:
      return "LINK";
    case Type::kUnlink:
      return "UNLINK";
  }
  return "unknown";
}

}  // namespace hymcache::wire
