// The wire format: exact bytes, against frames that a second encoder made from the document, and
// what is refused.
#include <doctest/doctest.h>

#include <map>
#include <random>
#include <string>

#include "tests/cpp/golden_messages.h"
#include "tests/cpp/message_decoder.h"
#include "transport/csrc/crc32c.h"
#include "transport/csrc/wire.h"

namespace hymcache::wire_testing {
namespace {

using wire::Header;
using wire::Type;

const std::map<std::string, std::string>& golden_hex() {
  static const std::map<std::string, std::string> frames{
#include "tests/cpp/golden_frames.inc"
  };
  return frames;
}

std::string to_hex(wire::Bytes bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  for (const std::byte byte : bytes) {
    hex += kDigits[std::to_integer<unsigned>(byte) >> 4];
    hex += kDigits[std::to_integer<unsigned>(byte) & 15];
  }
  return hex;
}

std::string refusal_of(const Header& header, wire::Bytes payload, bool keyed = false) {
  try {
    decode(header, payload, keyed);
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kProtocol);
    return error.what();
  }
  return "";
}

std::string header_refusal(const Header& header) {
  try {
    wire::parse_header(wire::as_bytes(header));
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kProtocol);
    return error.what();
  }
  return "";
}

// After a field was changed on purpose.
Header with_checksum(Header header) {
  header.header_crc32c = crc32c(0, &header, sizeof header - sizeof header.header_crc32c);
  return header;
}

}  // namespace

TEST_CASE("wire: every message has the bytes that the document says") {
  const auto messages = golden_messages();
  CHECK(messages.size() == golden_hex().size());
  for (const auto& [name, frame] : messages) {
    CAPTURE(name);
    REQUIRE(golden_hex().count(name) == 1);
    CHECK(to_hex(frame) == golden_hex().at(name));
  }
}

TEST_CASE("wire: every message is read back as it was written") {
  for (const auto& [name, frame] : golden_messages()) {
    CAPTURE(name);
    const Header header = wire::parse_header(frame);
    const wire::Bytes payload = wire::Bytes(frame).subspan(sizeof header, header.payload_bytes);
    wire::check_payload(header, payload);
    CHECK(header.is_response() == (name.ends_with("_reply") || name == "error"));
    const auto again = decode(header, payload, is_keyed(name));
    CHECK(to_hex(again) == to_hex(payload));
  }
}

TEST_CASE("wire: a payload that is cut anywhere, or too long, is refused and says which it is") {
  for (const auto& [name, frame] : golden_messages()) {
    CAPTURE(name);
    const Header header = wire::parse_header(frame);
    const wire::Bytes payload = wire::Bytes(frame).subspan(sizeof header, header.payload_bytes);
    for (std::size_t cut = 0; cut < payload.size(); ++cut) {
      const std::string refusal = refusal_of(header, payload.first(cut), is_keyed(name));
      CAPTURE(cut);
      CHECK(refusal.find(wire::type_name(header.type)) == 0);
    }
    std::vector<std::byte> longer(payload.begin(), payload.end());
    longer.push_back(std::byte{0});
    // HELLO may grow in later versions.
    CHECK(refusal_of(header, longer, is_keyed(name)).empty() == (header.type == Type::kHello));
  }
}

TEST_CASE("wire: counts beyond the bounds are refused, whatever memory they would name") {
  struct Bound {
    Type type;
    bool response;
    std::size_t count_offset;
    std::size_t head_bytes;
    std::size_t row_bytes;
    std::uint32_t count_max;
  };
  const Bound bounds[] = {
      {Type::kLookup, false, 0, 8, 16, 32},     {Type::kLookup, true, 0, 16, 64, 32},
      {Type::kMembers, true, 8, 16, 288, 512},  {Type::kPublish, false, 0, 8, 64, 1024},
      {Type::kWithdraw, false, 0, 8, 24, 1024}, {Type::kPrefetch, false, 20, 24, 40, 1024},
      {Type::kWait, true, 4, 8, 40, 256},       {Type::kOffer, false, 8, 16, 24, 256},
      {Type::kOffer, true, 0, 8, 24, 256},      {Type::kWrite, false, 0, 8, 16, 256},
      {Type::kCommit, false, 0, 8, 16, 256},    {Type::kCommit, true, 0, 8, 1, 256},
      {Type::kLink, true, 52, 56, 24, 4096},
  };
  for (const Bound& bound : bounds) {
    CAPTURE(wire::type_name(bound.type));
    CAPTURE(bound.response);
    Header header;
    header.type = bound.type;
    header.flags = bound.response ? wire::kFlagResponse : 0;
    const auto payload_of = [&](std::uint32_t count, std::size_t rows) {
      std::vector<std::byte> payload(bound.head_bytes + rows * bound.row_bytes);
      std::memcpy(payload.data() + bound.count_offset, &count, sizeof count);
      return payload;
    };
    const std::uint32_t most = bound.count_max;
    CHECK(refusal_of(header, payload_of(most, most)).empty());
    CHECK(refusal_of(header, payload_of(0, 0)).empty());
    CHECK(refusal_of(header, payload_of(most + 1, most + 1)).find("rows, at most") !=
          std::string::npos);
    CHECK(refusal_of(header, payload_of(0xFFFFFFFF, 1)).find("4294967295 rows") !=
          std::string::npos);
    CHECK(refusal_of(header, payload_of(most, most - 1)).find("are left") != std::string::npos);
    CHECK(refusal_of(header, payload_of(most - 1, most)).find("too many") != std::string::npos);
  }
}

TEST_CASE("wire: the largest messages fit a frame") {
  CHECK(sizeof(wire::MembersReply) + wire::kNodesMax * sizeof(wire::Member) <=
        wire::kPayloadBytesMax);
  CHECK(sizeof(wire::PublishRequest) + wire::kPublishRowsMax * sizeof(Entry) <=
        wire::kPayloadBytesMax);
  CHECK(sizeof(wire::PrefetchRequest) + wire::kPrefetchRowsMax * sizeof(wire::PrefetchRow) <=
        wire::kPayloadBytesMax);
  CHECK(sizeof(wire::Hello) <= wire::kHandshakePayloadBytesMax);
}

TEST_CASE("wire: a header is refused for the first thing that is wrong with it") {
  const Header good = wire::make_header(Type::kLookup, 0, 7, {}, 0);
  CHECK(header_refusal(good).empty());
  Header bad = good;
  bad.magic ^= 1;
  CHECK(header_refusal(with_checksum(bad)) == "the peer does not speak the HyMCache protocol");
  bad = good;
  bad.payload_bytes = 1;
  CHECK(header_refusal(bad) == "a frame header is damaged (crc32c mismatch)");
  bad.payload_bytes = wire::kPayloadBytesMax + 1;
  CHECK(header_refusal(with_checksum(bad)).find("262145 payload bytes, at most 262144") !=
        std::string::npos);
  bad.payload_bytes = wire::kPayloadBytesMax;
  CHECK(header_refusal(with_checksum(bad)).empty());
  bad.bulk_bytes = wire::kBulkBytesMax + 1;
  CHECK(header_refusal(with_checksum(bad)).find("bulk bytes, at most") != std::string::npos);
  bad.bulk_bytes = wire::kBulkBytesMax;
  CHECK(header_refusal(with_checksum(bad)).empty());
  bad.flags = 2;
  CHECK(header_refusal(with_checksum(bad)).find("flags") != std::string::npos);
  CHECK_THROWS_AS(wire::parse_header(wire::as_bytes(good).first(31)), Error);
  // A type that is not known is the business of who handles messages, not of the frame.
  bad = good;
  bad.type = static_cast<Type>(999);
  CHECK(header_refusal(with_checksum(bad)).empty());
  CHECK(std::string(wire::type_name(bad.type)) == "unknown");
}

TEST_CASE("wire: a payload in two pieces has the header of the whole") {
  const std::uint64_t seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  std::vector<std::byte> payload(300);
  for (std::byte& byte : payload) byte = static_cast<std::byte>(random());
  const wire::Bytes all(payload);
  const Header whole = wire::make_header(Type::kOffer, 1, 9, all, 5);
  for (std::size_t cut = 0; cut <= payload.size(); ++cut) {
    const Header parts = wire::make_header(Type::kOffer, 1, 9, all.first(cut), all.subspan(cut), 5);
    REQUIRE(std::memcmp(&whole, &parts, sizeof whole) == 0);
  }
}

TEST_CASE("wire: text fits its field or is refused") {
  const auto text = wire::to_text<8>("1234567");
  CHECK(wire::from_text(text) == "1234567");
  CHECK(text.back() == '\0');
  CHECK(wire::from_text(wire::to_text<8>("")).empty());
  CHECK_THROWS_WITH_AS(wire::to_text<8>("12345678"), doctest::Contains("at most 7 fit"), Error);
  wire::Text<4> unended{'a', 'b', 'c', 'd'};  // from a peer that leaves no NUL
  CHECK(wire::from_text(unended) == "abcd");
}

TEST_CASE("wire: text of a peer is fit to be shown") {
  CHECK(wire::printable("node-ä 日本 \U0001F600") == "node-ä 日本 \U0001F600");
  CHECK(wire::printable("a\nb\tc\x7f\x1b[31m") == "a?b?c??[31m");
  struct Case {
    const char* bytes;
    const char* shown;
  };
  const Case cases[] = {
      {"\x80", "?"},                     // no start of a sequence
      {"\xC3", "?"},                     // cut short
      {"\xC3(", "?("},                   // not continued
      {"\xC0\xAF", "??"},                // overlong
      {"\xE0\x9F\xBF", "???"},           // overlong
      {"\xED\xA0\x80", "???"},           // a surrogate
      {"\xED\x9F\xBF", "\xED\x9F\xBF"},  // the last before them
      {"\xF0\x8F\xBF\xBF", "????"},      // overlong
      {"\xF4\x90\x80\x80", "????"},      // beyond Unicode
      {"\xF4\x8F\xBF\xBF", "\xF4\x8F\xBF\xBF"},
      {"\xF5\x80\x80\x80", "????"},
      {"\xE6\x97", "??"},
      {"\xFF", "?"},
  };
  for (const Case& one : cases) CHECK(wire::printable(one.bytes) == one.shown);
}

TEST_CASE("wire: an ERROR becomes the error that it is") {
  const auto kind_of = [](wire::ErrorCode code) {
    try {
      wire::throw_error(wire::make_error(code, "why"));
    } catch (const Error& error) {
      CHECK(std::string(error.what()) == "why");
      return error.kind();
    }
  };
  using wire::ErrorCode;
  CHECK(kind_of(ErrorCode::kVersion) == ErrorKind::kProtocol);
  CHECK(kind_of(ErrorCode::kAuthentication) == ErrorKind::kConfig);
  CHECK(kind_of(ErrorCode::kMalformed) == ErrorKind::kProtocol);
  CHECK(kind_of(ErrorCode::kUnexpected) == ErrorKind::kProtocol);
  CHECK(kind_of(ErrorCode::kNoSession) == ErrorKind::kUnavailable);
  CHECK(kind_of(ErrorCode::kBusy) == ErrorKind::kUnavailable);
  CHECK(kind_of(ErrorCode::kUnregistered) == ErrorKind::kUnavailable);
  CHECK(kind_of(ErrorCode::kConflict) == ErrorKind::kConfig);
  CHECK(kind_of(static_cast<ErrorCode>(4711)) == ErrorKind::kProtocol);
  CHECK(wire::from_text(wire::make_error(ErrorCode::kBusy, {}).message).empty());
  CHECK(wire::from_text(wire::make_error(ErrorCode::kBusy, std::string(1000, 'x')).message) ==
        std::string(247, 'x'));
}

}  // namespace hymcache::wire_testing
