// One read or write on its way: what is left to move after the system moved a part of it.
#pragma once

#include <cstdint>

#include "chm_device/csrc/io_engine.h"

namespace hymcache::chm {

class Transfer {
 public:
  enum class Progress : std::uint8_t { kDone, kAgain, kFailed };

  Transfer() = default;
  explicit Transfer(const IoRequest& request) : request_(request) {}

  bool is_write() const noexcept { return request_.is_write; }
  std::uint64_t cookie() const noexcept { return request_.cookie; }
  std::uint64_t offset() const noexcept { return request_.offset + done_bytes_; }
  std::uint8_t* data() const noexcept { return request_.data + done_bytes_; }
  std::uint64_t bytes() const noexcept { return request_.bytes - done_bytes_; }
  int error() const noexcept { return error_; }

  // Takes in what a system call returned: bytes moved, or -errno. A part moved goes on from the
  // last whole granule, since O_DIRECT wants aligned offsets.
  Progress advance(std::int64_t result);

 private:
  // Attempts in a row that move nothing, before the transfer fails.
  static constexpr std::uint32_t kIdleAttemptsMax = 64;

  IoRequest request_;
  std::uint64_t done_bytes_ = 0;
  std::uint32_t idle_attempts_ = 0;
  int error_ = 0;
};

}  // namespace hymcache::chm
