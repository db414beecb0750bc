#include "chm_device/csrc/backing_file.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <system_error>
#include <thread>

#include "chm_device/csrc/byte_size.h"
#include "hymcache/csrc/error.h"

namespace hymcache::chm {
namespace {

struct Header {
  static constexpr char kMagic[16] = "HyMCache device";
  static constexpr std::uint32_t kVersion = 1;

  char magic[16];
  std::uint32_t version;
};

[[noreturn]] void refuse(const std::string& message, int error = 0) {
  throw Error(ErrorKind::kConfig, message, error);
}

[[noreturn]] void fail(const std::string& path, const char* what, int error) {
  throw Error(ErrorKind::kDevice,
              "device.path: " + path + ": " + what + ": " + std::generic_category().message(error),
              error);
}

struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};
using AlignedBytes = std::unique_ptr<std::uint8_t, FreeDeleter>;

AlignedBytes aligned_zeros(std::size_t bytes) {
  AlignedBytes memory(static_cast<std::uint8_t*>(std::aligned_alloc(kGranuleBytes, bytes)));
  if (!memory) throw std::bad_alloc();
  std::memset(memory.get(), 0, bytes);
  return memory;
}

bool is_place_of_devices(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  return folder == "/dev" || folder == "/dev/disk" || folder.parent_path() == "/dev/disk" ||
         folder == "/dev/mapper";
}

// What keeps the lock of a process that has just died may be its last I/O in the kernel.
template <typename Try>
bool retry_while_busy(Try try_once) {
  constexpr int kAttempts = 40;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    if (try_once()) return true;
    if (errno != EWOULDBLOCK && errno != EBUSY && errno != EINTR) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return false;
}

[[noreturn]] void refuse_open(const std::string& path, int error) {
  if (error == ENOENT || error == ENOTDIR) {
    const std::string folder = std::filesystem::path(path).parent_path();
    refuse("device.path: " + path + ": the folder " + folder + " does not exist", error);
  }
  if (error == EBUSY) fail(path, "in use (mounted, or another node's)", error);
  fail(path, "cannot open it", error);
}

}  // namespace

BackingFile::BackingFile(const BackingFileOptions& options) {
  if (options.path.empty()) refuse("device.path: names no file");
  open_path(options);
  try {
    set_up(options);
  } catch (...) {
    if (is_new_) ::unlink(options.path.c_str());
    throw;
  }
}

BackingFile::~BackingFile() {
  // Not left to close(): io_uring may hold the file open for a moment longer.
  if (fd_) ::flock(fd_.get(), LOCK_UN);
}

void BackingFile::open_path(const BackingFileOptions& options) {
  const char* path = options.path.c_str();
  struct stat status{};
  const bool exists = ::stat(path, &status) == 0;
  if (exists && S_ISDIR(status.st_mode)) {
    refuse("device.path: " + options.path + " is a folder; name a file in it or a block device",
           EISDIR);
  }
  if (exists && !S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode)) {
    refuse("device.path: " + options.path + " is neither a file nor a block device");
  }
  if (!exists && is_place_of_devices(options.path)) {
    // A file that takes the place of a disk would be in memory, and in the disk's way.
    refuse("device.path: there is no device " + options.path + "; `lsblk` lists those there are",
           ENOENT);
  }
  is_block_device_ = exists && S_ISBLK(status.st_mode);
  int flags = O_RDWR | O_CLOEXEC | O_DIRECT;
  if (is_block_device_) flags |= O_EXCL;  // refuses a disk that is mounted
  if (!exists) flags |= O_CREAT | O_EXCL;
  const auto open_with = [&](int with) {
    return retry_while_busy([&] {
      fd_ = UniqueFd(::open(path, with, S_IRUSR | S_IWUSR));
      return static_cast<bool>(fd_);
    });
  };
  is_direct_ = open_with(flags);
  if (!is_direct_) {
    if (errno != EINVAL) refuse_open(options.path, errno);
    // The file system has no O_DIRECT; some have made the file by then.
    if (!open_with((flags & ~(O_DIRECT | O_EXCL)) | (is_block_device_ ? O_EXCL : 0))) {
      refuse_open(options.path, errno);
    }
  }
  is_new_ = !exists;
}

void BackingFile::set_up(const BackingFileOptions& options) {
  lock(options.path);
  choose_direct(options);
  check_header(options.path);
  if (is_block_device_) {
    check_block_device(options);
  } else {
    size_file(options);
  }
  write_header(options.path);
}

void BackingFile::lock(const std::string& path) {
  if (retry_while_busy([&] { return ::flock(fd_.get(), LOCK_EX | LOCK_NB) == 0; })) return;
  if (errno == EWOULDBLOCK) {
    is_new_ = false;  // somebody else's by now
    fail(path, "another node uses it", EBUSY);
  }
  fail(path, "cannot lock it", errno);
}

void BackingFile::choose_direct(const BackingFileOptions& options) {
  struct statfs status{};
  // Of a block device it would be asked of /dev.
  const bool is_memory = !is_block_device_ && ::fstatfs(fd_.get(), &status) == 0 &&
                         (status.f_type == TMPFS_MAGIC || status.f_type == RAMFS_MAGIC);
  if (is_direct_ && is_memory) {
    // Newer kernels accept the flag there, and copy all the same.
    const int flags = ::fcntl(fd_.get(), F_GETFL);
    if (flags < 0 || ::fcntl(fd_.get(), F_SETFL, flags & ~O_DIRECT) != 0) {
      fail(options.path, "cannot switch O_DIRECT off", errno);
    }
    is_direct_ = false;
  }
  if (!is_direct_) {
    options.log("device.path: " + options.path +
                ": the file system has no O_DIRECT; using buffered I/O");
  }
}

void BackingFile::check_header(const std::string& path) const {
  const AlignedBytes bytes = aligned_zeros(kDataOffset);
  std::uint64_t read_bytes = 0;
  while (read_bytes < kDataOffset) {
    const ssize_t moved = ::pread(fd_.get(), bytes.get() + read_bytes, kDataOffset - read_bytes,
                                  static_cast<off_t>(read_bytes));
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) fail(path, "cannot read its header", errno);
    read_bytes += static_cast<std::uint64_t>(moved);
    if (moved == 0 || read_bytes % kGranuleBytes != 0) break;  // the end of the file
  }
  Header header{};
  std::memcpy(&header, bytes.get(), sizeof header);
  if (std::memcmp(header.magic, Header::kMagic, sizeof header.magic) == 0) {
    if (header.version == Header::kVersion) return;
    refuse("device.path: " + path + " was written by another HyMCache (device format " +
           std::to_string(header.version) + ", this is " + std::to_string(Header::kVersion) +
           "); remove it or name another path");
  }
  if (std::all_of(bytes.get(), bytes.get() + read_bytes, [](auto byte) { return byte == 0; })) {
    return;  // blank
  }
  refuse("device.path: " + path + " holds something that HyMCache did not write; " +
         (is_block_device_ ? "wipe its first MiB" : "remove it") + " or name another path");
}

void BackingFile::write_header(const std::string& path) const {
  const AlignedBytes bytes = aligned_zeros(kGranuleBytes);
  Header header{};
  std::memcpy(header.magic, Header::kMagic, sizeof header.magic);
  header.version = Header::kVersion;
  std::memcpy(bytes.get(), &header, sizeof header);
  const ssize_t moved = ::pwrite(fd_.get(), bytes.get(), kGranuleBytes, 0);
  if (moved != static_cast<ssize_t>(kGranuleBytes)) {
    fail(path, "cannot write its header", moved < 0 ? errno : EIO);
  }
}

void BackingFile::check_block_device(const BackingFileOptions& options) const {
  std::uint64_t size_bytes = 0;
  int logical_block_bytes = 0;
  if (::ioctl(fd_.get(), BLKGETSIZE64, &size_bytes) != 0 ||
      ::ioctl(fd_.get(), BLKSSZGET, &logical_block_bytes) != 0) {
    fail(options.path, "cannot ask for its size", errno);
  }
  if (static_cast<std::uint64_t>(logical_block_bytes) > kGranuleBytes) {
    refuse("device.path: " + options.path + " has blocks of " +
           format_bytes(static_cast<std::uint64_t>(logical_block_bytes)) + ", more than 4 KiB");
  }
  if (size_bytes >= kDataOffset + options.capacity_bytes) return;
  const std::uint64_t usable = size_bytes > kDataOffset ? size_bytes - kDataOffset : 0;
  refuse("device.capacity: " + format_bytes(options.capacity_bytes) + " do not fit on " +
             options.path + ", which has room for " + std::to_string(usable) + " bytes",
         ENOSPC);
}

void BackingFile::size_file(const BackingFileOptions& options) const {
  const auto total = static_cast<off_t>(kDataOffset + options.capacity_bytes);
  struct stat status{};
  struct statvfs room{};
  if (::fstat(fd_.get(), &status) != 0 || ::fstatvfs(fd_.get(), &room) != 0) {
    fail(options.path, "cannot ask for its size", errno);
  }
  const std::uint64_t free_bytes = std::uint64_t{room.f_bavail} * room.f_frsize;
  const std::uint64_t held_bytes = static_cast<std::uint64_t>(status.st_blocks) * 512;
  const auto refuse_full = [&] {
    refuse("device.capacity: " + options.path + " needs " +
               format_bytes(static_cast<std::uint64_t>(total)) + ", its file system has " +
               format_bytes(free_bytes + held_bytes) + " free; lower device.capacity or make room",
           ENOSPC);
  };
  if (options.preallocate) {
    // Asked first: an attempt would fill the file system for everybody before it fails. Some have
    // no size and report none.
    const bool is_sized = room.f_blocks > 0;
    if (is_sized && static_cast<std::uint64_t>(total) > free_bytes + held_bytes) refuse_full();
    int error = 0;
    do {
      // Not posix_fallocate, which writes the whole file where the file system cannot reserve.
      error = ::fallocate(fd_.get(), 0, 0, total) == 0 ? 0 : errno;
    } while (error == EINTR);
    if (error == EOPNOTSUPP) {
      options.log("device.path: " + options.path +
                  ": the file system cannot reserve room; writes may fail when it is full");
    } else if (error != 0) {
      if (::ftruncate(fd_.get(), status.st_size) != 0)
        fail(options.path, "cannot shrink it", errno);
      if (error == ENOSPC) refuse_full();
      fail(options.path, "cannot reserve its room", error);
    }
  }
  if (::ftruncate(fd_.get(), total) != 0) {
    if (errno == EFBIG || errno == EINVAL) {
      refuse("device.capacity: " + format_bytes(options.capacity_bytes) +
                 " are more than the file system of " + options.path + " allows in a file",
             errno);
    }
    fail(options.path, "cannot set its size", errno);
  }
}

}  // namespace hymcache::chm
