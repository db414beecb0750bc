#include "transport/csrc/region_mapping.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <cstring>

namespace hymcache {

RegionMapping::RegionMapping(UniqueFd fd, const wire::AttachReply& attach)
    : bytes_(attach.region_bytes),
      read_write_offset_(attach.read_write_offset),
      incarnation_(attach.incarnation) {
  struct stat found {};
  if (!fd || ::fstat(fd.get(), &found) != 0 || read_write_offset_ > bytes_ ||
      static_cast<std::uint64_t>(found.st_size) < bytes_ || bytes_ == 0) {
    throw Error(ErrorKind::kProtocol, "ATTACH: the region is not what the node says it is");
  }
  void* const mapped = ::mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (mapped == MAP_FAILED) {
    throw Error(ErrorKind::kUnavailable,
                std::string("cannot map the node's region: ") + std::strerror(errno), errno);
  }
  base_ = static_cast<std::byte*>(mapped);
  if (::mprotect(base_ + read_write_offset_, bytes_ - read_write_offset_,
                 PROT_READ | PROT_WRITE) != 0) {
    const int error = errno;
    ::munmap(base_, bytes_);
    throw Error(ErrorKind::kUnavailable,
                std::string("cannot map the node's write buffer: ") + std::strerror(error), error);
  }
  ::madvise(base_, bytes_, MADV_DONTFORK);
}

RegionMapping::~RegionMapping() { ::munmap(base_, bytes_); }

const std::byte* RegionMapping::readable(std::uint64_t offset, std::uint64_t bytes) const noexcept {
  if (offset > bytes_ || bytes > bytes_ - offset) return nullptr;
  return base_ + offset;
}

std::byte* RegionMapping::writable(std::uint64_t offset, std::uint64_t bytes) const noexcept {
  if (offset < read_write_offset_ || readable(offset, bytes) == nullptr) return nullptr;
  return base_ + offset;
}

std::uint64_t RegionMapping::load_generation(std::uint64_t offset) const noexcept {
  if (offset % sizeof(std::uint64_t) != 0 || readable(offset, sizeof(std::uint64_t)) == nullptr) {
    return 0;
  }
  // As the reader's side of a sequence lock: the copy's loads come before this one.
  std::atomic_thread_fence(std::memory_order_acquire);
  return __atomic_load_n(reinterpret_cast<const std::uint64_t*>(base_ + offset),
                         __ATOMIC_RELAXED);
}

}  // namespace hymcache
