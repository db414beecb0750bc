// What became of one block of a read or a write. None of these is an error.
#pragma once

#include <cstdint>

namespace hymcache {

enum class BlockStatus : std::uint8_t {
  kOk = 0,
  // reads
  kMiss = 1,         // not there, or not there any more
  kCorrupt = 2,      // the bytes did not match their checksum
  kUnavailable = 3,  // the node or the master could not be reached
  kDeadline = 4,     // not done in time
  kDeviceError = 5,  // the node's device could not read it
  // writes
  kStoredAlready = 6,
  kSkipBufferFull = 7,
  kSkipDeviceFull = 8,
  kSkipTooLarge = 9,
  kSkipDraining = 10,
  kSkipPrefix = 11,  // an earlier block of the prefix was not stored
  // both
  kCancelled = 12,
};
inline constexpr int kBlockStatuses = 13;

// In the style of a metric's label: "ok", "miss", "skip_buffer_full", ...
const char* block_status_name(BlockStatus status) noexcept;

}  // namespace hymcache
