// Lists of memory pieces as the kernel's calls take them.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "transport/csrc/wire.h"

namespace hymcache {

inline constexpr std::size_t kIovecsPerCall = 64;

inline iovec to_iovec(wire::Bytes bytes) {
  return {.iov_base = const_cast<std::byte*>(bytes.data()), .iov_len = bytes.size()};
}

// Drops the first `bytes` of parts[next...] and what is empty after them; returns the new `next`.
inline std::size_t advance(std::vector<iovec>& parts, std::size_t next, std::size_t bytes) {
  while (next < parts.size() && bytes >= parts[next].iov_len) bytes -= parts[next++].iov_len;
  if (bytes > 0) {
    parts[next].iov_base = static_cast<char*>(parts[next].iov_base) + bytes;
    parts[next].iov_len -= bytes;
  }
  return next;
}

}  // namespace hymcache
