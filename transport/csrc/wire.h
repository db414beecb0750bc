// The wire protocol: frames and messages, byte for byte as in docs/wire-protocol.md.
//
// Every message is a frame: a 32-byte header, `payload_bytes` of control data, then `bulk_bytes`
// of object data that never passes through a buffer of ours. All integers are little-endian; the
// structs below are the layout, so they are copied, never converted. The header checks itself and
// the payload (crc32c); object bytes carry their own crc32c, end to end.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hymcache/csrc/entry.h"
#include "hymcache/csrc/error.h"

namespace hymcache::wire {

inline constexpr std::uint32_t kMagic = 0x434D5948;  // "HYMC" in memory
inline constexpr std::uint16_t kVersionMin = 1;
inline constexpr std::uint16_t kVersionMax = 1;

// Bounds on what a peer may ask for. A frame beyond them ends the connection.
inline constexpr std::uint32_t kPayloadBytesMax = 256u << 10;
inline constexpr std::uint32_t kHandshakePayloadBytesMax = 4u << 10;  // from somebody unknown
inline constexpr std::uint64_t kBulkBytesMax = 1ull << 30;
inline constexpr std::uint32_t kLookupKeysMax = 32;  // paper: 32 blocks a request
inline constexpr std::uint32_t kPublishRowsMax = 1024;
inline constexpr std::uint32_t kPrefetchRowsMax = 1024;  // in one frame
inline constexpr std::uint32_t kSessionBlocksMax = 65536;
inline constexpr std::uint32_t kWaitRowsMax = 256;
inline constexpr std::uint32_t kOfferRowsMax = 256;
inline constexpr std::uint32_t kNodesMax = 512;
inline constexpr std::uint32_t kLinkRegionsMax = 4096;

enum class Type : std::uint16_t {
  kHello = 1,
  kAuth = 2,
  kError = 3,
  // to a master
  kLookup = 16,
  kMembers = 17,
  kRegister = 18,
  kPublish = 19,
  kWithdraw = 20,
  kSynced = 21,
  kHeartbeat = 22,
  // to a node
  kAttach = 32,
  kPrefetch = 33,
  kWait = 34,
  kRelease = 35,
  kEnd = 36,
  kReport = 37,
  kOffer = 38,
  kWrite = 39,
  kCommit = 40,
  kLink = 41,
  kUnlink = 42,
};

// Optional extensions, as HELLO names them.
inline constexpr std::uint64_t kFeatureVerbs = 1u << 0;  // a node with RDMA, a client that uses it

inline constexpr std::uint16_t kFlagResponse = 1u << 0;

struct Header {
  std::uint32_t magic = kMagic;
  Type type = Type::kError;
  std::uint16_t flags = 0;
  std::uint32_t request_id = 0;  // echoed in the response
  std::uint32_t payload_bytes = 0;
  std::uint64_t bulk_bytes = 0;
  std::uint32_t payload_crc32c = 0;
  std::uint32_t header_crc32c = 0;  // of the 28 bytes before it

  bool is_response() const noexcept { return (flags & kFlagResponse) != 0; }
};
static_assert(sizeof(Header) == 32);

// ---- handshake -------------------------------------------------------------------------------

enum class Role : std::uint8_t { kClient = 1, kNode = 2, kMaster = 3 };
constexpr bool is_known(Role role) noexcept {
  return role >= Role::kClient && role <= Role::kMaster;
}

using Nonce = std::array<std::uint8_t, 16>;
using Mac = std::array<std::uint8_t, 32>;
using SessionId = std::array<std::uint8_t, 16>;
using HostId = std::array<std::uint8_t, 16>;
template <std::size_t N>
using Text = std::array<char, N>;  // UTF-8, padded with NUL, at most N - 1 bytes

// The layout of Hello and of the header never changes: it is how versions find out about each
// other.
struct Hello {
  std::uint16_t version_min = kVersionMin;
  std::uint16_t version_max = kVersionMax;
  Role role = Role::kClient;
  std::array<std::uint8_t, 3> reserved{};
  std::uint64_t features = 0;
  Nonce nonce{};
  Text<64> name{};
};
static_assert(sizeof(Hello) == 96);

struct HelloReply {
  std::uint16_t version = 0;
  Role role = Role::kMaster;
  std::uint8_t auth_required = 0;
  std::uint32_t node = 0;  // of a node; 0 of a master
  std::uint64_t features = 0;
  std::uint64_t incarnation = 0;  // differs after every restart
  Nonce nonce{};
  Text<64> name{};
};
static_assert(sizeof(HelloReply) == 104);

struct Auth {  // request: the client's proof; response: the server's
  Mac proof{};
};
static_assert(sizeof(Auth) == 32);

enum class ErrorCode : std::uint16_t {
  kVersion = 1,
  kAuthentication = 2,
  kMalformed = 3,
  kUnexpected = 4,    // legal message, wrong moment or wrong peer
  kNoSession = 5,     // the prefetch session is unknown here: expired, ended or never opened
  kBusy = 6,          // a limit is reached; try later
  kUnregistered = 7,  // a node speaks before REGISTER
  kConflict = 8,      // another live node has this name
};

// Whether a connection lives on after an ERROR with this code. One with request id 0 is about the
// connection itself, which always ends.
constexpr bool is_recoverable(ErrorCode code) noexcept {
  return code == ErrorCode::kNoSession || code == ErrorCode::kBusy;
}

struct ErrorReply {
  ErrorCode code = ErrorCode::kMalformed;
  std::array<std::uint8_t, 6> reserved{};
  Text<248> message{};
};
static_assert(sizeof(ErrorReply) == 256);

// ---- master ----------------------------------------------------------------------------------

struct LookupRequest {  // followed by count keys
  std::uint32_t count = 0;
  std::uint32_t reserved = 0;
};
struct LookupReply {  // followed by count Entry rows; a miss is a row of zeros
  std::uint32_t count = 0;
  std::uint32_t reserved = 0;
  std::uint64_t members_version = 0;
};
static_assert(sizeof(LookupRequest) == 8 && sizeof(LookupReply) == 16);

enum class MemberState : std::uint32_t { kAlive = 1, kDraining = 2 };

struct Member {
  NodeId node = 0;
  MemberState state = MemberState::kAlive;
  std::uint64_t incarnation = 0;
  std::uint64_t capacity_bytes = 0;
  std::uint64_t used_bytes = 0;
  HostId host{};  // kernel boot id: the same on one host, whatever the container
  Text<64> name{};
  Text<64> tcp{};         // "host:port"
  Text<112> unix_path{};  // may be empty
};
static_assert(sizeof(Member) == 288);

struct MembersReply {  // followed by count Member rows
  std::uint64_t version = 0;
  std::uint32_t count = 0;
  std::uint32_t reserved = 0;
};
static_assert(sizeof(MembersReply) == 16);

// REGISTER's request is one Member row.
struct RegisterReply {
  std::uint64_t members_version = 0;
  std::uint32_t lease_ms = 0;
  std::uint32_t epoch = 0;
};
static_assert(sizeof(RegisterReply) == 16);

struct PublishRequest {  // followed by count Entry rows
  static constexpr std::uint32_t kNoAnswer = 1;
  std::uint32_t count = 0;
  std::uint32_t flags = 0;
};
struct PublishReply {
  std::uint32_t accepted = 0;
  std::uint32_t refused = 0;  // the index is full
};
struct WithdrawRequest {  // followed by count WithdrawRow
  std::uint32_t count = 0;
  std::uint32_t reserved = 0;
};
struct WithdrawRow {
  ObjectKey key{};
  Generation generation = 0;
};
struct WithdrawReply {
  std::uint32_t removed = 0;
  std::uint32_t reserved = 0;
};
static_assert(sizeof(PublishRequest) == 8 && sizeof(PublishReply) == 8 &&
              sizeof(WithdrawRequest) == 8 && sizeof(WithdrawRow) == 24 &&
              sizeof(WithdrawReply) == 8);

struct HeartbeatRequest {
  std::uint64_t capacity_bytes = 0;
  std::uint64_t used_bytes = 0;
  std::uint64_t objects = 0;
  std::uint64_t sessions = 0;
};
struct HeartbeatReply {
  static constexpr std::uint32_t kDrain = 1u << 0;  // take no more writes
  std::uint64_t members_version = 0;
  std::uint32_t lease_ms = 0;
  std::uint32_t flags = 0;
  std::uint64_t refused = 0;  // rows since REGISTER for which the index had no room
};
static_assert(sizeof(HeartbeatRequest) == 32 && sizeof(HeartbeatReply) == 24);

// ---- node: reads -----------------------------------------------------------------------------

struct AttachReply {  // the region's file descriptor comes with it (SCM_RIGHTS)
  std::uint64_t region_bytes = 0;
  std::uint64_t read_write_offset = 0;
  std::uint64_t incarnation = 0;
};
static_assert(sizeof(AttachReply) == 24);

// Appends candidates to a session, in the order in which they will be read; opens it if it is
// new. The session id is 128 random bits of the client's: (session, index) is the read token.
struct PrefetchRequest {  // followed by count PrefetchRow; no response
  SessionId session{};
  std::uint32_t lease_ms = 0;  // idle time after which the node takes everything back
  std::uint32_t count = 0;
};
struct PrefetchRow {
  ObjectKey key{};
  std::uint64_t address = 0;
  Generation generation = 0;
  std::uint32_t length = 0;
  std::uint32_t reserved = 0;
};
static_assert(sizeof(PrefetchRequest) == 24 && sizeof(PrefetchRow) == 40);

struct WaitRequest {
  static constexpr std::uint32_t kInline = 1u << 0;  // send the bytes too, and release them
  SessionId session{};
  std::uint32_t first = 0;      // index in the session
  std::uint32_t count_max = 0;  // answer with up to this many settled blocks from `first` on
  std::uint32_t timeout_ms = 0;
  std::uint32_t flags = 0;
};
static_assert(sizeof(WaitRequest) == 32);

enum class BlockState : std::uint8_t {
  kReady = 0,
  kMiss = 1,         // the location is stale
  kDeviceError = 2,  // the device could not read it
};

struct WaitReply {  // followed by count WaitRow; count 0: nothing settled before the timeout
  std::uint32_t first = 0;
  std::uint32_t count = 0;
};
struct WaitRow {
  BlockState state = BlockState::kMiss;
  std::array<std::uint8_t, 3> reserved{};
  std::uint32_t length = 0;
  std::uint32_t crc32c = 0;
  std::uint32_t flags = 0;  // Entry::kHasCrc
  std::uint64_t region_offset = 0;
  std::uint64_t generation_word = 0;   // offset in the region, see chm_device/csrc/device.h
  std::uint64_t generation_value = 0;  // what must stand there after the copy
};
static_assert(sizeof(WaitReply) == 8 && sizeof(WaitRow) == 40);

struct ReleaseRequest {  // no response
  SessionId session{};
  std::uint32_t first = 0;
  std::uint32_t count = 0;
};
struct EndRequest {  // no response
  SessionId session{};
};
struct ReportRequest {  // the bytes of this block do not match their checksum; no response
  SessionId session{};
  std::uint32_t index = 0;
  std::uint32_t reserved = 0;
};
static_assert(sizeof(ReleaseRequest) == 24 && sizeof(EndRequest) == 16 &&
              sizeof(ReportRequest) == 24);

// ---- node: writes ----------------------------------------------------------------------------

struct OfferRequest {  // followed by count OfferRow
  // Rows are consecutive blocks of one prefix: after the first that is refused, the rest are too.
  static constexpr std::uint32_t kPrefixOrder = 1u << 0;
  std::uint64_t name_space = 0;
  std::uint32_t count = 0;
  std::uint32_t flags = 0;
};
struct OfferRow {
  ObjectKey key{};
  std::uint32_t length = 0;
  std::uint32_t reserved = 0;
};
enum class OfferState : std::uint8_t {
  kGranted = 0,
  kStored = 1,  // here already, or being written by somebody else
  kBufferFull = 2,
  kDeviceFull = 3,
  kTooLarge = 4,
  kDraining = 5,
  kPrefixBroken = 6,
};
struct OfferReply {  // followed by count OfferReplyRow
  std::uint32_t count = 0;
  std::uint32_t reserved = 0;
};
struct OfferReplyRow {
  OfferState state = OfferState::kBufferFull;
  std::array<std::uint8_t, 7> reserved{};
  std::uint64_t grant = 0;
  std::uint64_t region_offset = 0;
};
static_assert(sizeof(OfferRequest) == 16 && sizeof(OfferRow) == 24 && sizeof(OfferReply) == 8 &&
              sizeof(OfferReplyRow) == 24);

struct WriteRequest {  // followed by count WriteRow, then the bytes as bulk; no response
  std::uint32_t count = 0;
  std::uint32_t reserved = 0;
};
struct WriteRow {
  std::uint64_t grant = 0;
  std::uint32_t length = 0;
  std::uint32_t reserved = 0;
};
static_assert(sizeof(WriteRequest) == 8 && sizeof(WriteRow) == 16);

struct CommitRequest {  // followed by count CommitRow
  std::uint32_t count = 0;
  std::uint32_t reserved = 0;
};
struct CommitRow {
  static constexpr std::uint32_t kAbort = 1u << 0;          // not written: forget the grant
  static constexpr std::uint32_t kHasCrc = Entry::kHasCrc;  // crc32c is meaningful
  std::uint64_t grant = 0;
  std::uint32_t crc32c = 0;
  std::uint32_t flags = 0;
};
enum class CommitState : std::uint8_t { kStored = 0, kNoGrant = 1, kAborted = 2, kNotWritten = 3 };
struct CommitReply {  // followed by count CommitState bytes
  std::uint32_t count = 0;
  std::uint32_t reserved = 0;
};
static_assert(sizeof(CommitRequest) == 8 && sizeof(CommitRow) == 16 && sizeof(CommitReply) == 8);

// ---- node: RDMA ------------------------------------------------------------------------------

// One end of a queue pair; the numbers are those of the InfiniBand Architecture.
struct LinkEndpoint {
  std::array<std::uint8_t, 16> gid{};
  std::uint32_t queue_pair = 0;    // 24 bits
  std::uint32_t first_packet = 0;  // sequence number, 24 bits
  std::uint16_t lid = 0;
  std::uint8_t link_layer = 0;  // 1 InfiniBand, 2 Ethernet
  std::uint8_t gid_type = 0;    // 0 InfiniBand, 1 RoCE v1, 2 RoCE v2
  std::uint8_t mtu = 0;         // 1 to 5: 256 to 4096 bytes
  std::uint8_t reads_out = 0;   // READs that it has under way at most
  std::uint8_t reads_in = 0;    // READs that it answers at once at most
  std::uint8_t reserved = 0;
};
static_assert(sizeof(LinkEndpoint) == 32);

// LINK's request is the client's LinkEndpoint.
struct LinkReply {                                      // followed by count LinkRegion
  static constexpr std::uint32_t kBlockKeys = 1u << 0;  // a key comes with each block
  LinkEndpoint endpoint;
  std::uint64_t address = 0;  // of the region's first byte, for READ and WRITE
  std::uint64_t region_bytes = 0;
  std::uint32_t flags = 0;
  std::uint32_t count = 0;
};
struct LinkRegion {
  static constexpr std::uint32_t kRead = 1u << 0;
  static constexpr std::uint32_t kWrite = 1u << 1;
  std::uint64_t region_offset = 0;
  std::uint64_t bytes = 0;
  std::uint32_t key = 0;
  std::uint32_t access = 0;
};
static_assert(sizeof(LinkReply) == 56 && sizeof(LinkRegion) == 24);

using VerbsKey = std::uint32_t;  // of a block; 0: it has to go another way

// ---- encoding --------------------------------------------------------------------------------

using Bytes = std::span<const std::byte>;

template <class T>
Bytes as_bytes(const T& value) noexcept {
  return std::as_bytes(std::span<const T, 1>(&value, 1));
}

// A header for this frame, with both checksums.
Header make_header(Type type, std::uint16_t flags, std::uint32_t request_id, Bytes payload,
                   std::uint64_t bulk_bytes) noexcept;
// The same for a payload that lies in two pieces.
Header make_header(Type type, std::uint16_t flags, std::uint32_t request_id, Bytes head, Bytes tail,
                   std::uint64_t bulk_bytes) noexcept;
// Throws ProtocolError when the header is not one of ours, is damaged, or exceeds the bounds.
Header parse_header(Bytes bytes, std::uint32_t payload_bytes_max = kPayloadBytesMax);
void check_payload(const Header& header, Bytes payload);

// Reads a payload front to back; a short one is a ProtocolError that names `what`.
class PayloadReader {
 public:
  PayloadReader(Bytes payload, const char* what) : rest_(payload), what_(what) {}

  template <class T>
  T take() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value;
    std::memcpy(&value, take_bytes(sizeof(T)).data(), sizeof(T));
    return value;
  }
  // `count` rows of T as bytes; ProtocolError above `count_max`.
  template <class T>
  Bytes take_rows(std::uint32_t count, std::uint32_t count_max) {
    if (count > count_max) fail_count(count, count_max);
    return take_bytes(sizeof(T) * count);
  }
  void finish() const;  // nothing may be left

 private:
  Bytes take_bytes(std::size_t bytes);
  [[noreturn]] void fail_count(std::uint32_t count, std::uint32_t count_max) const;

  Bytes rest_;
  const char* what_;
};

// A payload that is one T and nothing else.
template <class T>
T read_all(Bytes payload, const char* what) {
  PayloadReader reader(payload, what);
  const T value = reader.take<T>();
  reader.finish();
  return value;
}

// The i-th row of what take_rows gave: rows in a payload are not aligned, so they are copied out.
template <class T>
T row_at(Bytes rows, std::size_t i) noexcept {
  T value;
  std::memcpy(&value, rows.data() + i * sizeof(T), sizeof(T));
  return value;
}

// Builds a payload: a head, then rows.
class PayloadWriter {
 public:
  explicit PayloadWriter(std::size_t bytes_hint = 0) { bytes_.reserve(bytes_hint); }

  template <class T>
  void put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    const auto* raw = reinterpret_cast<const std::byte*>(&value);
    bytes_.insert(bytes_.end(), raw, raw + sizeof(T));
  }
  void put_bytes(Bytes raw) { bytes_.insert(bytes_.end(), raw.begin(), raw.end()); }
  void clear() noexcept { bytes_.clear(); }
  Bytes bytes() const noexcept { return bytes_; }
  template <class T>
  void patch(std::size_t offset, const T& value) {
    std::memcpy(bytes_.data() + offset, &value, sizeof(T));
  }

 private:
  std::vector<std::byte> bytes_;
};

template <std::size_t N>
Text<N> to_text(std::string_view s) {
  if (s.size() >= N) {
    throw Error(ErrorKind::kConfig, "text of " + std::to_string(s.size()) + " bytes, at most " +
                                        std::to_string(N - 1) + " fit: " + std::string(s));
  }
  Text<N> text{};
  s.copy(text.data(), s.size());
  return text;
}

// The same with a '?' for each control character and for each byte that is not UTF-8: what a peer
// sends ends up in logs, in metrics and in Python strings.
std::string printable(std::string_view text);

// Text from a peer: ends at the first NUL or at the array's end.
template <std::size_t N>
std::string from_text(const Text<N>& text) {
  return printable({text.data(), strnlen(text.data(), N)});
}

// A legal message from the wrong peer, or at the wrong moment: ERROR says kUnexpected.
class Unexpected : public Error {
 public:
  explicit Unexpected(const std::string& message) : Error(ErrorKind::kProtocol, message) {}
};

ErrorReply make_error(ErrorCode code, std::string_view message) noexcept;
// Throws what the peer's ERROR frame says.
[[noreturn]] void throw_error(const ErrorReply& reply);

const char* type_name(Type type) noexcept;

}  // namespace hymcache::wire
