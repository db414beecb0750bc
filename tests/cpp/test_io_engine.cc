#include <doctest/doctest.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <future>
#include <thread>
#include <vector>

#include "chm_device/csrc/byte_size.h"
#include "chm_device/csrc/io_engine.h"
#include "chm_device/csrc/transfer.h"
#include "hymcache/csrc/error.h"
#include "hymcache/csrc/unique_fd.h"
#include "tests/cpp/device_fixture.h"

namespace hymcache::chm {
namespace {

using testing::fill;
using testing::holds;

constexpr std::uint32_t kFileBytes = 4 << 20;
constexpr std::uint32_t kPartBytes = 64 << 10;
constexpr std::uint32_t kParts = kFileBytes / kPartBytes;

class AlignedMemory {
 public:
  explicit AlignedMemory(std::size_t bytes) : bytes_(bytes) {
    void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(base != MAP_FAILED);
    base_ = static_cast<std::uint8_t*>(base);
  }
  ~AlignedMemory() { ::munmap(base_, bytes_); }
  AlignedMemory(const AlignedMemory&) = delete;
  AlignedMemory& operator=(const AlignedMemory&) = delete;

  std::uint8_t* at(std::size_t offset) const { return base_ + offset; }
  std::span<std::uint8_t> span() const { return {base_, bytes_}; }

 private:
  std::size_t bytes_;
  std::uint8_t* base_ = nullptr;
};

// A file, memory of its size, and what an engine needs of both.
class Bench {
 public:
  explicit Bench(const std::string& parent = "") : folder_(parent), memory_(kFileBytes) {
    const std::string path = folder_.file("data");
    fd_ = UniqueFd(::open(path.c_str(), O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600));
    is_direct_ = static_cast<bool>(fd_) && parent.empty();
    if (!fd_) fd_ = UniqueFd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    REQUIRE(fd_);
    REQUIRE(::ftruncate(fd_.get(), kFileBytes) == 0);
  }

  int fd() const { return fd_.get(); }
  std::uint8_t* at(std::size_t offset) const { return memory_.at(offset); }
  IoEngineOptions options(const std::string& kind, std::uint32_t depth) {
    return {.kind = kind,
            .fd = fd_.get(),
            .is_direct = is_direct_,
            .depth = depth,
            .memory = memory_.span(),
            .log = [this](std::string_view line) { log_.append(line).push_back('\n'); }};
  }
  const std::string& log() const { return log_; }

 private:
  testing::ScratchFolder folder_;
  AlignedMemory memory_;
  UniqueFd fd_;
  bool is_direct_ = false;
  std::string log_;
};

// In a thread of its own: the kernel keeps rights, and the owner of a ring, by thread.
template <typename Body>
void in_thread(Body body) {
  std::async(std::launch::async, body).get();
}

std::vector<IoCompletion> wait_for(IoEngine& engine, std::size_t count,
                                   std::size_t at_a_time = 64) {
  std::vector<IoCompletion> all;
  std::vector<IoCompletion> some(at_a_time);
  while (all.size() < count) {
    pollfd event{engine.event_fd(), POLLIN, 0};
    REQUIRE(::poll(&event, 1, 10'000) == 1);
    const std::size_t reaped = engine.reap(some);
    all.insert(all.end(), some.begin(), some.begin() + static_cast<std::ptrdiff_t>(reaped));
    engine.submit();
  }
  return all;
}

IoRequest part(const Bench& bench, bool is_write, std::uint32_t index) {
  const std::uint64_t offset = std::uint64_t{index} * kPartBytes;
  return {is_write, offset, bench.at(offset), kPartBytes, index};
}

bool io_uring_works() {
  Bench bench;
  try {
    open_uring_engine(bench.options("io_uring", 2));
    return true;
  } catch (const Error& error) {
    MESSAGE("io_uring is left out: " << std::string(error.what()));
    return false;
  }
}

std::vector<std::string> kinds() {
  static const bool has_io_uring = io_uring_works();
  std::vector<std::string> kinds{"threads"};
  if (has_io_uring) kinds.emplace_back("io_uring");
  return kinds;
}

TEST_CASE("engine: what was written is read, in any order, from disk and from memory") {
  for (const std::string& parent : testing::scratch_parents()) {
    for (const std::string& kind : kinds()) {
      CAPTURE(parent);
      CAPTURE(kind);
      Bench bench(parent);
      const auto engine = open_io_engine(bench.options(kind, kParts));
      for (const bool is_write : {true, false}) {
        for (std::uint32_t i = 0; i < kParts; ++i) {
          const std::uint32_t index = i * 37 % kParts;
          if (is_write) fill(bench.at(std::size_t{index} * kPartBytes), index, kPartBytes);
          REQUIRE(engine->queue(part(bench, is_write, index)));
        }
        engine->submit();
        std::vector<bool> seen(kParts);
        for (const IoCompletion& completion : wait_for(*engine, kParts)) {
          CHECK(completion.error == 0);
          CHECK_FALSE(seen.at(completion.cookie));
          seen[completion.cookie] = true;
        }
        if (is_write) std::fill_n(bench.at(0), kFileBytes, std::uint8_t{0});
      }
      for (std::uint32_t i = 0; i < kParts; ++i) {
        CHECK(holds(bench.at(std::size_t{i} * kPartBytes), i, kPartBytes));
      }
    }
  }
}

TEST_CASE("engine: depth is a bound, and a completion makes room") {
  for (const std::string& kind : kinds()) {
    CAPTURE(kind);
    Bench bench;
    const auto engine = open_io_engine(bench.options(kind, 3));
    for (std::uint32_t i = 0; i < 3; ++i) REQUIRE(engine->queue(part(bench, false, i)));
    CHECK_FALSE(engine->queue(part(bench, false, 3)));
    engine->submit();
    wait_for(*engine, 3);
    CHECK(engine->queue(part(bench, false, 3)));
    engine->submit();
    CHECK(wait_for(*engine, 1).front().cookie == 3);
  }
}

TEST_CASE("engine: completions that did not fit one reap() call again") {
  for (const std::string& kind : kinds()) {
    CAPTURE(kind);
    Bench bench;
    const auto engine = open_io_engine(bench.options(kind, kParts));
    for (std::uint32_t i = 0; i < kParts; ++i) REQUIRE(engine->queue(part(bench, false, i)));
    engine->submit();
    CHECK(wait_for(*engine, kParts, 3).size() == kParts);
  }
}

TEST_CASE("engine: nothing in it, nothing to reap; a wake is seen") {
  for (const std::string& kind : kinds()) {
    CAPTURE(kind);
    Bench bench;
    const auto engine = open_io_engine(bench.options(kind, 4));
    std::vector<IoCompletion> some(4);
    CHECK(engine->reap(some) == 0);
    engine->wake();
    pollfd event{engine->event_fd(), POLLIN, 0};
    CHECK(::poll(&event, 1, 0) == 1);
    CHECK(engine->reap(some) == 0);
    CHECK(::poll(&event, 1, 0) == 0);
  }
}

TEST_CASE("engine: a file that ends in the middle of a read is an I/O error") {
  for (const std::string& kind : kinds()) {
    CAPTURE(kind);
    Bench bench;
    REQUIRE(::ftruncate(bench.fd(), kPartBytes / 2) == 0);
    const auto engine = open_io_engine(bench.options(kind, 4));
    REQUIRE(engine->queue(part(bench, false, 0)));
    REQUIRE(engine->queue(part(bench, false, 1)));
    engine->submit();
    for (const IoCompletion& completion : wait_for(*engine, 2)) CHECK(completion.error == EIO);
  }
}

TEST_CASE("engine: it waits for what is in flight before it goes") {
  for (const std::string& kind : kinds()) {
    CAPTURE(kind);
    Bench bench;
    auto engine = open_io_engine(bench.options(kind, kParts));
    for (std::uint32_t i = 0; i < kParts; ++i) REQUIRE(engine->queue(part(bench, true, i)));
    engine->submit();
    engine.reset();
  }
}

TEST_CASE("engine: opened and destroyed by one thread, driven by another") {
  for (const std::string& kind : kinds()) {
    CAPTURE(kind);
    Bench bench;
    auto engine = open_io_engine(bench.options(kind, kParts));
    std::size_t reaped = 0;
    in_thread([&] {
      for (std::uint32_t i = 0; i < kParts; ++i) engine->queue(part(bench, true, i));
      engine->submit();
      reaped = wait_for(*engine, 1).size();
    });
    CHECK(reaped >= 1);
    engine.reset();
  }
}

bool forbid_io_uring() {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{4, filter};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

TEST_CASE("engine: where io_uring is not allowed, threads do it and the log says so") {
  Bench bench;
  in_thread([&] {
    if (!forbid_io_uring()) {
      MESSAGE("left out: no seccomp filter can be set here");
      return;
    }
    CHECK_THROWS_AS(open_io_engine(bench.options("io_uring", 2)), Error);
    const auto engine = open_io_engine(bench.options("auto", 2));
    CHECK(engine->name() == "threads");
    CHECK(bench.log().find("io_uring") != std::string::npos);
    CHECK(bench.log().find("using pread/pwrite threads") != std::string::npos);
    REQUIRE(engine->queue(part(bench, true, 0)));
    engine->submit();
    CHECK(wait_for(*engine, 1).front().error == 0);
  });
}

bool drop_ipc_lock() {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[2]{};
  if (::syscall(SYS_capget, &header, data) != 0) return false;
  data[0].effective &= ~(1u << CAP_IPC_LOCK);
  return ::syscall(SYS_capset, &header, data) == 0;
}

TEST_CASE("engine: buffers that may not be locked are used unregistered, and the log says so") {
  if (kinds().size() < 2) return;
  Bench bench;
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_MEMLOCK, &before) == 0);
  // Enough for the ring itself.
  const rlimit little{kFileBytes / 4, before.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_MEMLOCK, &little) == 0);
  in_thread([&] {
    CHECK(drop_ipc_lock());
    // Memory of the rings before is given back a little after they are gone.
    std::unique_ptr<IoEngine> engine;
    for (int attempt = 0; attempt < 100 && !engine; ++attempt) {
      try {
        engine = open_io_engine(bench.options("io_uring", 2));
      } catch (const Error&) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
    }
    REQUIRE(engine);
    CHECK(engine->name() == "io_uring, unregistered buffers");
    CHECK(bench.log().find("ulimit -l") != std::string::npos);
    fill(bench.at(0), 7, kPartBytes);
    REQUIRE(engine->queue(part(bench, true, 0)));
    engine->submit();
    CHECK(wait_for(*engine, 1).front().error == 0);
  });
  ::setrlimit(RLIMIT_MEMLOCK, &before);
}

TEST_CASE("transfer: a part moved goes on from the last whole granule") {
  AlignedMemory memory(64 << 10);
  Transfer transfer({false, 1 << 20, memory.at(0), 64 << 10, 5});
  CHECK(transfer.advance(8192) == Transfer::Progress::kAgain);
  CHECK(transfer.offset() == (1 << 20) + 8192);
  CHECK(transfer.data() == memory.at(8192));
  CHECK(transfer.bytes() == (64 << 10) - 8192);
  CHECK(transfer.advance(4097) == Transfer::Progress::kAgain);
  CHECK(transfer.bytes() == (64 << 10) - 8192 - 4096);
  CHECK(transfer.advance(-EINTR) == Transfer::Progress::kAgain);
  CHECK(transfer.advance((64 << 10) - 8192 - 4096) == Transfer::Progress::kDone);
  CHECK(transfer.error() == 0);
}

TEST_CASE("transfer: errors end it, and so do attempts that move nothing") {
  AlignedMemory memory(8192);
  const IoRequest request{true, 0, memory.at(0), 8192, 0};
  Transfer broken(request);
  CHECK(broken.advance(-ENOSPC) == Transfer::Progress::kFailed);
  CHECK(broken.error() == ENOSPC);
  Transfer empty(request);
  CHECK(empty.advance(0) == Transfer::Progress::kFailed);
  CHECK(empty.error() == EIO);
  Transfer idle(request);
  int attempts = 1;
  while (idle.advance(-EAGAIN) == Transfer::Progress::kAgain) ++attempts;
  CHECK(attempts == 64);
  CHECK(idle.error() == EAGAIN);
}

}  // namespace
}  // namespace hymcache::chm
