#include "chm_device/csrc/region_memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "chm_device/csrc/region_layout.h"
#include "hymcache/csrc/error.h"

#ifndef MADV_POPULATE_READ  // Linux 5.14; older kernels refuse it
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace hymcache::region {
namespace {

[[noreturn]] void refuse(const std::string& place, const std::string& what) {
  throw Error(ErrorKind::kConfig, place + ": " + what);
}

[[noreturn]] void fail(const std::string& place, const char* what, int error) {
  throw Error(ErrorKind::kDevice,
              place + ": " + what + ": " + std::generic_category().message(error), error);
}

// A device that is not there must not become a file that takes its name: below /dev files are made
// where memory is handed out as files, and nowhere else.
bool may_make(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code ignored;  // then the path is taken as it is written
  const fs::path folder = fs::weakly_canonical(fs::absolute(path).parent_path(), ignored);
  const std::string place = (folder / "").string();
  return !place.starts_with("/dev/") || place.starts_with("/dev/shm/") ||
         place.starts_with("/dev/hugepages/");
}

void require_may_make(const std::string& path) {
  if (may_make(path)) return;
  refuse(path,
         "there is no such device, and no file is made in its place; hand the device to this host "
         "or pod, or name a file, e.g. in /dev/shm");
}

int open_or_make(const std::string& path, bool create, bool writable) {
  const int access = (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC;
  int fd = ::open(path.c_str(), access);
  if (fd < 0 && errno == ENOENT && create) {
    require_may_make(path);
    std::error_code ignored;
    if (std::filesystem::is_symlink(path, ignored)) refuse(path, "is a link to nothing");
    fd = ::open(path.c_str(), access | O_CREAT, 0660);
  }
  if (fd >= 0) return fd;
  switch (errno) {
    case ENOENT:
    case ENOTDIR:
      refuse(path, create ? "its folder does not exist" : "does not exist");
    case EISDIR:
      refuse(path, "is a folder; name a device-dax or a file");
    case EACCES:
    case EPERM:
      refuse(path, "no permission to open it; run as a user or group that may");
    default:
      fail(path, "cannot open it", errno);
  }
}

// Gives a file its room up to `end`, and its size where it is shorter. False where the file system
// has no such operation.
bool allocate(int fd, const std::string& path, std::uint64_t from, std::uint64_t end) {
  const auto bytes = static_cast<off_t>(end - from);
  while (::fallocate(fd, 0, static_cast<off_t>(from), bytes) != 0) {
    if (errno == EINTR) continue;
    if (errno == EINVAL || errno == EOPNOTSUPP) return false;
    if (errno != ENOSPC) fail(path, "cannot give it its room", errno);
    struct statfs found{};
    const bool known = ::fstatfs(fd, &found) == 0;
    throw Error(
        ErrorKind::kDevice,
        path + ": needs " + std::to_string(end - from) + " bytes, the file system has " +
            (known ? std::to_string(found.f_bavail * static_cast<std::uint64_t>(found.f_bsize)) +
                         " free"
                   : "less") +
            "; give it more (a container's /dev/shm: --shm-size, or a larger emptyDir), or "
            "make the region smaller",
        ENOSPC);
  }
  return true;
}

std::uint64_t size_of(int fd, const std::string& path) {
  struct stat found{};
  if (::fstat(fd, &found) != 0) fail(path, "cannot stat it", errno);
  return static_cast<std::uint64_t>(found.st_size);
}

// Several may let it grow at once, to different sizes: the first gives it its own, and nobody cuts
// it.
void grow(int fd, const std::string& path, std::uint64_t offset, std::uint64_t end) {
  if (::flock(fd, LOCK_EX) != 0) fail(path, "cannot lock it", errno);
  const std::uint64_t before = size_of(fd, path);
  if (before <= offset) {
    try {
      if (!allocate(fd, path, before, end) && ::ftruncate(fd, static_cast<off_t>(end)) != 0) {
        fail(path, "cannot give it its size", errno);
      }
    } catch (const Error&) {
      // Some file systems keep the part that they had room for; it is nobody's yet.
      if (size_of(fd, path) > before && ::ftruncate(fd, static_cast<off_t>(before)) != 0) {
        fail(path, "cannot take back the room it was given", errno);
      }
      throw;
    }
  }
  ::flock(fd, LOCK_UN);  // where it throws the file is closed
}

bool is_memory(int fd) {
  struct statfs found{};
  return ::fstatfs(fd, &found) == 0 &&
         (found.f_type == TMPFS_MAGIC || found.f_type == HUGETLBFS_MAGIC);
}

}  // namespace

const char* memory_kind_name(MemoryKind kind) noexcept {
  switch (kind) {
    case MemoryKind::kDax:
      return "dax";
    case MemoryKind::kFile:
      return "file";
    case MemoryKind::kMemory:
      return "memory";
  }
  return "";
}

RegionMemory::RegionMemory(const std::string& path, std::uint64_t offset, std::uint64_t bytes,
                           bool create, bool writable, SyncToDisk sync_to_disk)
    : path_(path), sync_to_disk_(std::move(sync_to_disk)), writable_(writable), offset_(offset) {
  if (!sync_to_disk_) {
    sync_to_disk_ = [](std::byte* from, std::uint64_t count) {
      return ::msync(from, count, MS_SYNC);
    };
  }
  if (path.empty()) refuse("region", "names no device or file");
  place_ = offset == 0 ? path : path + " at " + std::to_string(offset);
  if (offset % kRegionAlignment != 0) {
    refuse(path, "offset " + std::to_string(offset) + " is not a multiple of 2 MiB");
  }
  fd_ = UniqueFd(open_or_make(path, create && writable, writable));
  struct stat found{};
  if (::fstat(fd_.get(), &found) != 0) fail(path, "cannot stat it", errno);
  std::uint64_t total = 0;
  if (S_ISCHR(found.st_mode)) {
    kind_ = MemoryKind::kDax;
    const std::string sysfs = "/sys/dev/char/" + std::to_string(major(found.st_rdev)) + ":" +
                              std::to_string(minor(found.st_rdev)) + "/size";
    if (!(std::ifstream(sysfs) >> total)) refuse(path, "is not a device-dax (no " + sysfs + ")");
  } else if (S_ISREG(found.st_mode)) {
    kind_ = is_memory(fd_.get()) ? MemoryKind::kMemory : MemoryKind::kFile;
    total = static_cast<std::uint64_t>(found.st_size);
    if (total <= offset && create && writable && bytes > 0) {
      require_may_make(path);
      grow(fd_.get(), path, offset, offset + bytes);
      total = size_of(fd_.get(), path);
    }
  } else {
    refuse(path, "is neither a device-dax nor a file");
  }
  if (total <= offset) {
    refuse(place_, total == 0 && bytes == 0
                       ? "is empty: give the size of the region"
                       : "the region starts behind its " + std::to_string(total) + " bytes");
  }
  bytes_ = total - offset;
  if (bytes > bytes_) {
    refuse(place_, "has " + std::to_string(bytes_) + " bytes, the region is to have " +
                       std::to_string(bytes));
  }
  if (bytes > 0) bytes_ = bytes;
  if (kind_ == MemoryKind::kDax) bytes_ = bytes_ / kRegionAlignment * kRegionAlignment;
}

RegionMemory::~RegionMemory() {
  if (base_ != nullptr) ::munmap(base_, mapped_bytes_);
}

void RegionMemory::reserve(std::uint64_t bytes) {
  if (kind_ == MemoryKind::kDax) return;
  allocate(fd_.get(), place_, offset_, offset_ + std::min(bytes, bytes_));
}

std::vector<std::byte> RegionMemory::head_at(std::uint64_t offset, std::uint64_t bytes_max) const {
  const std::uint64_t bytes = std::min({bytes_max, kRegionAlignment, offset_ - offset});
  void* const mapped = ::mmap(nullptr, kRegionAlignment, PROT_READ, MAP_SHARED, fd_.get(),
                              static_cast<off_t>(offset));
  if (mapped == MAP_FAILED) fail(place_, "cannot map what lies in front of it", errno);
  const auto* const from = static_cast<const std::byte*>(mapped);
  std::vector<std::byte> head(from, from + bytes);
  ::munmap(mapped, kRegionAlignment);
  return head;
}

void RegionMemory::map(std::uint64_t bytes) {
  bytes = std::min(bytes, bytes_);
  void* const mapped = ::mmap(nullptr, bytes, writable_ ? PROT_READ | PROT_WRITE : PROT_READ,
                              MAP_SHARED, fd_.get(), static_cast<off_t>(offset_));
  if (mapped == MAP_FAILED) fail(place_, "cannot map it", errno);
  if (base_ != nullptr) ::munmap(base_, mapped_bytes_);
  base_ = static_cast<std::byte*>(mapped);
  mapped_bytes_ = bytes;
  // Hints. What is read of a region is never what lies behind it.
  ::madvise(base_, bytes, MADV_RANDOM);
  ::madvise(base_, bytes, MADV_HUGEPAGE);
}

void RegionMemory::prefault() const {
  constexpr std::uint64_t kStepBytes = 64u << 20;
  constexpr std::uint64_t kPageBytes = 4096;
  const int advice = writable_ ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
  for (std::uint64_t at = 0; at < mapped_bytes_; at += kStepBytes) {
    const std::uint64_t bytes = std::min(kStepBytes, mapped_bytes_ - at);
    if (::madvise(base_ + at, bytes, advice) == 0) continue;
    // Not by touching: where a page is not to be had, that is a SIGBUS.
    if (errno != EINVAL && errno != EOPNOTSUPP) {
      fail(place_, "has not all of its pages (is its file system or memory full?)", errno);
    }
    // A device-dax of older kernels, say. Adding nothing is a write that loses no other's.
    for (std::uint64_t page = at; page < at + bytes; page += kPageBytes) {
      auto* const word = reinterpret_cast<std::uint64_t*>(base_ + page);
      if (writable_) {
        __atomic_fetch_or(word, 0, __ATOMIC_RELAXED);
      } else {
        __atomic_load_n(word, __ATOMIC_RELAXED);
      }
    }
  }
}

void RegionMemory::sync(std::uint64_t from, std::uint64_t bytes) const {
  if (kind_ != MemoryKind::kFile) return;
  constexpr std::uint64_t kPageBytes = 4096;
  const std::uint64_t start = from / kPageBytes * kPageBytes;
  if (sync_to_disk_(base_ + start, bytes + (from - start)) != 0) {
    fail(place_, "cannot write it to its disk", errno);
  }
}

}  // namespace hymcache::region
