#include <doctest/doctest.h>
#include <fcntl.h>
#include <linux/loop.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <future>
#include <thread>

#include "chm_device/csrc/backing_file.h"
#include "hymcache/csrc/error.h"
#include "hymcache/csrc/unique_fd.h"
#include "tests/cpp/device_fixture.h"

namespace hymcache::chm {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kCapacity = 1 << 20;

struct Attempt {
  std::string log;
  BackingFileOptions options(const std::string& path, std::uint64_t capacity = kCapacity) {
    return {path, capacity, true, [this](std::string_view line) { log += line; }};
  }
};

// What opening it says: the kind of error and its text.
struct Refusal {
  ErrorKind kind;
  std::string text;
  int error_number;
};

Refusal refusal(const BackingFileOptions& options) {
  try {
    const BackingFile file(options);
  } catch (const Error& error) {
    return {error.kind(), error.what(), error.error_number()};
  }
  FAIL("was opened: " << options.path);
  return {};
}

bool says(const Refusal& refusal, const std::string& words) {
  const bool found = refusal.text.find(words) != std::string::npos;
  if (!found) MESSAGE("said: " << refusal.text);
  return found;
}

TEST_CASE("backing file: made, reserved, opened again, resized") {
  const testing::ScratchFolder folder;
  const std::string path = folder.file("device");
  Attempt attempt;
  {
    const BackingFile file(attempt.options(path));
    struct stat status{};
    REQUIRE(::fstat(file.fd(), &status) == 0);
    CHECK(static_cast<std::uint64_t>(status.st_size) == BackingFile::kDataOffset + kCapacity);
    CHECK(static_cast<std::uint64_t>(status.st_blocks) * 512 >= kCapacity);
    CHECK((status.st_mode & 077) == 0);
    CHECK_FALSE(file.is_block_device());
  }
  {
    const BackingFile file(attempt.options(path, 3 * kCapacity));
  }
  CHECK(fs::file_size(path) == BackingFile::kDataOffset + 3 * kCapacity);
  {
    const BackingFile file(attempt.options(path, kCapacity / 2));
  }
  CHECK(fs::file_size(path) == BackingFile::kDataOffset + kCapacity / 2);
}

TEST_CASE("backing file: without preallocation it takes no room") {
  const testing::ScratchFolder folder;
  Attempt attempt;
  BackingFileOptions options = attempt.options(folder.file("device"), std::uint64_t{1} << 40);
  options.preallocate = false;
  const BackingFile file(options);
  struct stat status{};
  REQUIRE(::fstat(file.fd(), &status) == 0);
  CHECK(status.st_blocks * 512 < 1 << 20);
}

TEST_CASE("backing file: memory file systems are said to have no O_DIRECT") {
  if (!fs::is_directory("/dev/shm")) return;
  const testing::ScratchFolder folder("/dev/shm");
  Attempt attempt;
  const BackingFile file(attempt.options(folder.file("device")));
  CHECK_FALSE(file.is_direct());
  CHECK((::fcntl(file.fd(), F_GETFL) & O_DIRECT) == 0);
  CHECK(attempt.log.find("buffered I/O") != std::string::npos);
}

TEST_CASE("backing file: a file system that refuses O_DIRECT is used without") {
  const testing::ScratchFolder folder;
  // A mount of its own, seen by this thread alone.
  const auto mounted = [&] {
    if (::unshare(CLONE_NEWNS) != 0 ||
        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("none", folder.path().c_str(), "ramfs", 0, nullptr) != 0) {
      MESSAGE("left out: may not mount");
      return;
    }
    Attempt attempt;
    {
      const BackingFile file(attempt.options(folder.file("device")));
      CHECK_FALSE(file.is_direct());
      CHECK(attempt.log.find("buffered I/O") != std::string::npos);
    }
    {
      const BackingFile file(attempt.options(folder.file("device")));
    }
    ::umount(folder.path().c_str());
  };
  std::async(std::launch::async, mounted).get();
}

TEST_CASE("backing file: paths that cannot be are refused by name") {
  const testing::ScratchFolder folder;
  Attempt attempt;
  const Refusal nothing = refusal(attempt.options(""));
  CHECK(nothing.kind == ErrorKind::kConfig);
  CHECK(says(nothing, "device.path"));

  const Refusal is_folder = refusal(attempt.options(folder.path()));
  CHECK(is_folder.kind == ErrorKind::kConfig);
  CHECK(says(is_folder, folder.path() + " is a folder"));

  const Refusal no_parent = refusal(attempt.options(folder.file("absent/device")));
  CHECK(no_parent.kind == ErrorKind::kConfig);
  CHECK(says(no_parent, "the folder " + folder.file("absent") + " does not exist"));

  REQUIRE(::mkfifo(folder.file("pipe").c_str(), 0600) == 0);
  CHECK(says(refusal(attempt.options(folder.file("pipe"))), "neither a file nor a block device"));

  if (::geteuid() != 0) {
    {
      const BackingFile file(attempt.options(folder.file("closed")));
    }
    REQUIRE(::chmod(folder.file("closed").c_str(), 0) == 0);
    const Refusal closed = refusal(attempt.options(folder.file("closed")));
    CHECK(closed.kind == ErrorKind::kDevice);
    CHECK(closed.error_number == EACCES);
  }
}

TEST_CASE("backing file: one node at a time") {
  const testing::ScratchFolder folder;
  Attempt attempt;
  const std::string path = folder.file("device");
  const BackingFile first(attempt.options(path));
  const Refusal second = refusal(attempt.options(path));
  CHECK(second.kind == ErrorKind::kDevice);
  CHECK(second.error_number == EBUSY);
  CHECK(says(second, "another node uses it"));
  CHECK(fs::exists(path));
}

TEST_CASE("backing file: the lock of one that goes is waited for") {
  const testing::ScratchFolder folder;
  Attempt attempt;
  const std::string path = folder.file("device");
  auto first = std::make_unique<BackingFile>(attempt.options(path));
  std::thread leaver([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(120));
    first.reset();
  });
  Attempt other;
  {
    const BackingFile second(other.options(path));
  }
  leaver.join();
}

TEST_CASE("backing file: what something else wrote is left alone") {
  const testing::ScratchFolder folder;
  Attempt attempt;
  const std::string path = folder.file("precious");
  const auto write_at = [&](std::streamoff place, const std::string& text) {
    std::ofstream(path, std::ios::binary).seekp(place) << text;
  };
  for (const std::streamoff place : {0, 70'000, (1 << 20) - 9}) {
    CAPTURE(place);
    write_at(place, "precious\n");
    const auto size = fs::file_size(path);
    const Refusal foreign = refusal(attempt.options(path));
    CHECK(foreign.kind == ErrorKind::kConfig);
    CHECK(says(foreign, "holds something that HyMCache did not write"));
    CHECK(fs::file_size(path) == size);
  }
  write_at(0, std::string("HyMCache device\0\x63\0\0\0", 20));
  CHECK(says(refusal(attempt.options(path)), "device format 99, this is 1"));
}

TEST_CASE("backing file: an empty or blank file is taken") {
  const testing::ScratchFolder folder;
  Attempt attempt;
  std::ofstream(folder.file("empty")).flush();
  {
    const BackingFile file(attempt.options(folder.file("empty")));
  }
  std::ofstream(folder.file("blank")) << std::string(5000, '\0');
  {
    const BackingFile file(attempt.options(folder.file("blank")));
  }
}

// A block device on a file, where the tests may make one.
class LoopDevice {
 public:
  explicit LoopDevice(const std::string& file) {
    const UniqueFd control(::open("/dev/loop-control", O_RDWR | O_CLOEXEC));
    const int number = control ? ::ioctl(control.get(), LOOP_CTL_GET_FREE) : -1;
    if (number < 0) return;
    const std::string path = "/dev/loop" + std::to_string(number);
    const UniqueFd backing(::open(file.c_str(), O_RDWR | O_CLOEXEC));
    fd_ = UniqueFd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (fd_ && ::ioctl(fd_.get(), LOOP_SET_FD, backing.get()) == 0) path_ = path;
  }
  ~LoopDevice() {
    if (!path_.empty()) ::ioctl(fd_.get(), LOOP_CLR_FD);
  }
  LoopDevice(const LoopDevice&) = delete;
  LoopDevice& operator=(const LoopDevice&) = delete;

  const std::string& path() const { return path_; }  // empty: there is none

 private:
  UniqueFd fd_;
  std::string path_;
};

TEST_CASE("backing file: a block device, of its own size, for one node") {
  const testing::ScratchFolder folder;
  std::ofstream(folder.file("image")).flush();
  fs::resize_file(folder.file("image"), 4 << 20);
  const LoopDevice loop(folder.file("image"));
  if (loop.path().empty()) {
    MESSAGE("left out: no loop device can be had");
    return;
  }
  Attempt attempt;
  const std::uint64_t room = (4 << 20) - BackingFile::kDataOffset;
  const Refusal too_small = refusal(attempt.options(loop.path(), room + 4096));
  CHECK(too_small.error_number == ENOSPC);
  CHECK(says(too_small, "which has room for " + std::to_string(room) + " bytes"));
  {
    const BackingFile first(attempt.options(loop.path(), room));
    CHECK(first.is_block_device());
    CHECK(first.is_direct());
    CHECK(refusal(attempt.options(loop.path(), room)).error_number == EBUSY);
  }
  {
    const BackingFile again(attempt.options(loop.path(), room));
  }
  CHECK(attempt.log.empty());
}

TEST_CASE("backing file: more than the disk has is refused, and nothing is left behind") {
  const testing::ScratchFolder folder;
  Attempt attempt;
  const std::string path = folder.file("device");
  const Refusal full = refusal(attempt.options(path, std::uint64_t{1} << 49));
  CHECK(full.kind == ErrorKind::kConfig);
  CHECK(full.error_number == ENOSPC);
  CHECK(says(full, "device.capacity"));
  CHECK(says(full, "512.0 TiB"));
  CHECK(says(full, " free; lower device.capacity or make room"));
  CHECK_FALSE(fs::exists(path));
}

}  // namespace
}  // namespace hymcache::chm
