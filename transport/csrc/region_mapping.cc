#include "transport/csrc/region_mapping.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#ifndef MADV_POPULATE_READ  // Linux 5.14; older kernels refuse it, and pages come when touched
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace hymcache {

RegionMapping::RegionMapping(UniqueFd fd, const wire::AttachReply& attach)
    : bytes_(attach.region_bytes),
      read_write_offset_(attach.read_write_offset),
      incarnation_(attach.incarnation) {
  struct stat found{};
  const auto page_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  if (!fd || ::fstat(fd.get(), &found) != 0 || read_write_offset_ > bytes_ ||
      read_write_offset_ % page_bytes != 0 || static_cast<std::uint64_t>(found.st_size) < bytes_ ||
      bytes_ == 0) {
    throw Error(ErrorKind::kProtocol, "ATTACH: the region is not what the node says it is");
  }
  void* const mapped = ::mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (mapped == MAP_FAILED) {
    throw Error(ErrorKind::kUnavailable,
                std::string("cannot map the node's region: ") + std::strerror(errno), errno);
  }
  base_ = static_cast<std::byte*>(mapped);
  if (::mprotect(base_ + read_write_offset_, bytes_ - read_write_offset_, PROT_READ | PROT_WRITE) !=
      0) {
    const int error = errno;
    ::munmap(base_, bytes_);
    throw Error(ErrorKind::kUnavailable,
                std::string("cannot map the node's write buffer: ") + std::strerror(error), error);
  }
  // Hints. A huge page is mapped by one fault instead of 512, each of which costs as much as
  // copying the small page it brings.
  ::madvise(base_, bytes_, MADV_HUGEPAGE);
  ::madvise(base_, bytes_, MADV_DONTFORK);
  populating_ = std::thread([this] { populate(); });
}

// Where the system gives no huge pages the first touch of each small page costs several times its
// copy. The node holds the pages anyway: mapping them takes a fraction of a second for each GiB,
// in the background, once in the life of a client. A page not yet mapped is mapped when touched.
void RegionMapping::populate() noexcept {
  constexpr std::uint64_t kStepBytes = 16u << 20;
  for (std::uint64_t at = 0; at < bytes_; at += kStepBytes) {
    if (stopping_.load(std::memory_order_relaxed)) return;
    const std::uint64_t end = std::min(bytes_, at + kStepBytes);
    const std::uint64_t split = std::clamp(read_write_offset_, at, end);
    if (split > at) ::madvise(base_ + at, split - at, MADV_POPULATE_READ);
    if (end > split) ::madvise(base_ + split, end - split, MADV_POPULATE_WRITE);
  }
}

RegionMapping::~RegionMapping() {
  stopping_.store(true, std::memory_order_relaxed);
  populating_.join();
  ::munmap(base_, bytes_);
}

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
  return __atomic_load_n(reinterpret_cast<const std::uint64_t*>(base_ + offset), __ATOMIC_RELAXED);
}

std::shared_ptr<const RegionMapping> SharedRegion::attach(Channel& channel, TimePoint deadline) {
  bool answered = false;
  try {
    const Channel::Frame frame = channel.call(wire::Type::kAttach, {}, {}, deadline);
    answered = true;
    const auto attach =
        wire::PayloadReader(frame.payload, "ATTACH reply").take<wire::AttachReply>();
    UniqueFd fd = channel.take_fd();
    const std::lock_guard lock(mutex_);
    if (!mapping_ || mapping_->incarnation() != attach.incarnation) {
      mapping_ = std::make_shared<RegionMapping>(std::move(fd), attach);
    }
    return mapping_;
  } catch (const Error& error) {
    // A connection that broke or was too slow says nothing about the memory.
    if (answered || error.kind() != ErrorKind::kUnavailable) {
      failed_.store(true, std::memory_order_relaxed);
    }
    channel.close();
    throw;
  }
}

}  // namespace hymcache
