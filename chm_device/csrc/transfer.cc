#include "chm_device/csrc/transfer.h"

#include <algorithm>
#include <cerrno>

#include "chm_device/csrc/byte_size.h"

namespace hymcache::chm {

Transfer::Progress Transfer::advance(std::int64_t result) {
  if (result < 0 && result != -EINTR && result != -EAGAIN) {
    error_ = static_cast<int>(-result);
    return Progress::kFailed;
  }
  if (result == 0) {
    // A read past the end of the file, which therefore was cut; a write of nothing never ends.
    error_ = EIO;
    return Progress::kFailed;
  }
  std::uint64_t moved = result > 0 ? static_cast<std::uint64_t>(result) : 0;
  if (moved >= bytes()) return Progress::kDone;
  moved = align_down(moved, kGranuleBytes);
  done_bytes_ += moved;
  idle_attempts_ = moved > 0 ? 0 : idle_attempts_ + 1;
  if (idle_attempts_ < kIdleAttemptsMax) return Progress::kAgain;
  error_ = result < 0 ? static_cast<int>(-result) : EIO;
  return Progress::kFailed;
}

}  // namespace hymcache::chm
