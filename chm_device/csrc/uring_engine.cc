// io_uring with the arena and the file registered: no page is pinned, no file looked up per
// request.
#include "chm_device/csrc/io_engine.h"
#include "hymcache/csrc/error.h"

#ifdef HYMCACHE_HAVE_LIBURING

#include <liburing.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <vector>

#include "chm_device/csrc/byte_size.h"
#include "chm_device/csrc/transfer.h"
#include "hymcache/csrc/unique_fd.h"

// Flags younger than some liburing headers; a kernel without them answers EINVAL.
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

namespace hymcache::chm {
namespace {

constexpr std::uint64_t kChunkBytes = std::uint64_t{1} << 30;  // the kernel's limit a buffer
constexpr unsigned kDrainTimeoutSeconds = 30;

[[noreturn]] void fail(const char* what, int error) {
  throw Error(
      ErrorKind::kDevice,
      std::string("device.io: io_uring: ") + what + ": " + std::generic_category().message(error),
      error);
}

struct Ring : io_uring {
  Ring() : io_uring{} {}
  ~Ring() {
    if (is_open) io_uring_queue_exit(this);
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  bool is_open = false;
};

class UringEngine final : public IoEngine {
 public:
  explicit UringEngine(const IoEngineOptions& options);
  ~UringEngine() override { drain(); }

  bool queue(const IoRequest& request) override;
  void submit() override;
  std::size_t reap(std::span<IoCompletion> completions) override;
  int event_fd() const override { return event_fd_.get(); }
  void wake() override { ::eventfd_write(event_fd_.get(), 1); }
  std::string name() const override {
    return has_buffers_ ? "io_uring, registered buffers" : "io_uring, unregistered buffers";
  }

 private:
  void open_ring();
  void register_memory(const LogCallback& log);
  void prepare(std::uint32_t index);
  bool has_deferred_work() const noexcept;
  std::size_t reap_posted(std::span<IoCompletion> completions);
  void drain() noexcept;

  const int fd_;
  const bool is_direct_;
  const std::span<std::uint8_t> memory_;
  UniqueFd event_fd_;
  Ring ring_;
  bool is_deferred_ = false;  // completions are posted only when this thread asks for them
  bool is_enabled_ = true;
  bool has_file_ = false;
  bool has_buffers_ = false;
  std::vector<Transfer> transfers_;    // by user_data; `depth` of them
  std::vector<std::uint32_t> unused_;  // indices into transfers_
};

UringEngine::UringEngine(const IoEngineOptions& options)
    : fd_(options.fd),
      is_direct_(options.is_direct),
      memory_(options.memory),
      event_fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      transfers_(options.depth) {
  if (!event_fd_) fail("eventfd", errno);
  unused_.reserve(options.depth);
  for (std::uint32_t index = options.depth; index-- > 0;) unused_.push_back(index);

  open_ring();
  const int error = -io_uring_register_eventfd(&ring_, event_fd_.get());
  if (error != 0) fail("registering the eventfd", error);
  has_file_ = io_uring_register_files(&ring_, &fd_, 1) == 0;
  register_memory(options.log);
}

// Deferred task work suits an event loop: a completion raises the eventfd and interrupts nothing.
// The ring starts disabled, since such a ring belongs to the thread that enables it, which is the
// one that drives the device and not always the one that opened it.
void UringEngine::open_ring() {
  const auto depth = static_cast<unsigned>(transfers_.size());
  int error = -io_uring_queue_init(depth, &ring_,
                                   IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN |
                                       IORING_SETUP_TASKRUN_FLAG | IORING_SETUP_R_DISABLED);
  is_deferred_ = error == 0;
  is_enabled_ = !is_deferred_;
  if (error == EINVAL) error = -io_uring_queue_init(depth, &ring_, 0);  // before Linux 6.1
  if (error != 0) fail("not to be had here", error);
  ring_.is_open = true;
}

void UringEngine::register_memory(const LogCallback& log) {
  std::vector<iovec> chunks;
  for (std::uint64_t offset = 0; offset < memory_.size(); offset += kChunkBytes) {
    const auto chunk = memory_.subspan(offset, std::min(kChunkBytes, memory_.size() - offset));
    chunks.push_back({chunk.data(), chunk.size()});
  }
  const int error =
      -io_uring_register_buffers(&ring_, chunks.data(), static_cast<unsigned>(chunks.size()));
  has_buffers_ = error == 0;
  if (has_buffers_) return;
  std::string line = "device.io: io_uring: cannot register " + format_bytes(memory_.size()) +
                     " of buffers (" + std::generic_category().message(error) + ")";
  if (error == ENOMEM || error == EPERM) line += "; raise the limit of locked memory (ulimit -l)";
  log(line + "; going on without, at a higher cost in CPU");
}

bool UringEngine::queue(const IoRequest& request) {
  if (unused_.empty()) return false;
  const std::uint32_t index = unused_.back();
  unused_.pop_back();
  transfers_[index] = Transfer(request);
  prepare(index);
  return true;
}

void UringEngine::prepare(std::uint32_t index) {
  const Transfer& transfer = transfers_[index];
  // There always is one: the ring holds `depth` and each transfer has one entry at a time.
  io_uring_sqe* entry = io_uring_get_sqe(&ring_);
  if (entry == nullptr) throw Error(ErrorKind::kDevice, "device.io: io_uring: the ring is full");
  const auto offset_in_memory = static_cast<std::uint64_t>(transfer.data() - memory_.data());
  const std::uint64_t chunk = offset_in_memory / kChunkBytes;
  // A fixed transfer lies in one registered buffer; the rare one that crosses two goes unfixed.
  const bool is_fixed =
      has_buffers_ && (offset_in_memory + transfer.bytes() - 1) / kChunkBytes == chunk;
  const int fd = has_file_ ? 0 : fd_;
  const auto bytes = static_cast<unsigned>(transfer.bytes());
  if (is_fixed && transfer.is_write()) {
    io_uring_prep_write_fixed(entry, fd, transfer.data(), bytes, transfer.offset(),
                              static_cast<int>(chunk));
  } else if (is_fixed) {
    io_uring_prep_read_fixed(entry, fd, transfer.data(), bytes, transfer.offset(),
                             static_cast<int>(chunk));
  } else if (transfer.is_write()) {
    io_uring_prep_write(entry, fd, transfer.data(), bytes, transfer.offset());
  } else {
    io_uring_prep_read(entry, fd, transfer.data(), bytes, transfer.offset());
  }
  if (has_file_) entry->flags |= IOSQE_FIXED_FILE;
  // Pinning pages, or copying out of the page cache, takes the submitter about a millisecond for
  // 16 MiB: a kernel worker does it, and the owner's event loop goes on.
  if (!is_fixed || !is_direct_) entry->flags |= IOSQE_ASYNC;
  entry->user_data = index;
}

void UringEngine::submit() {
  if (!is_enabled_) {
    // By hand: liburing 2.3 declares io_uring_enable_rings() but does not export it.
    if (::syscall(__NR_io_uring_register, ring_.ring_fd, IORING_REGISTER_ENABLE_RINGS, nullptr,
                  0)) {
      fail("enabling", errno);
    }
    is_enabled_ = true;
  }
  if (io_uring_sq_ready(&ring_) == 0) return;
  const int result = io_uring_submit(&ring_);
  if (result == -EAGAIN || result == -EBUSY || result == -EINTR) {
    wake();  // the entries stay in the ring until the next call
  } else if (result < 0) {
    fail("submitting", -result);
  } else if (io_uring_sq_ready(&ring_) > 0) {
    wake();
  }
}

std::size_t UringEngine::reap(std::span<IoCompletion> completions) {
  eventfd_t ignored = 0;
  ::eventfd_read(event_fd_.get(), &ignored);
  std::size_t count = 0;
  // The kernel raises the eventfd for the first piece of deferred work only: those behind it are
  // silent until all is done. There is work without a completion too (a worker lets go of its
  // request), and it is done in rounds of limited size. So it is the ring that says whether any is
  // left, and neither the transfers under way nor what a round brought.
  do {
    if (has_deferred_work()) io_uring_get_events(&ring_);
    count += reap_posted(completions.subspan(count));
  } while (has_deferred_work());
  return count;
}

bool UringEngine::has_deferred_work() const noexcept {
  return is_deferred_ && (IO_URING_READ_ONCE(*ring_.sq.kflags) & IORING_SQ_TASKRUN) != 0;
}

std::size_t UringEngine::reap_posted(std::span<IoCompletion> completions) {
  std::size_t count = 0;
  io_uring_cqe* entry = nullptr;
  while (io_uring_peek_cqe(&ring_, &entry) == 0) {
    if (count == completions.size()) {
      wake();
      break;
    }
    const auto index = static_cast<std::uint32_t>(entry->user_data);
    Transfer& transfer = transfers_[index];
    const Transfer::Progress progress = transfer.advance(entry->res);
    io_uring_cqe_seen(&ring_, entry);
    if (progress == Transfer::Progress::kAgain) {
      prepare(index);
      wake();  // its owner submits again
      continue;
    }
    completions[count++] = {transfer.cookie(), transfer.error()};
    unused_.push_back(index);
  }
  return count;
}

// The kernel writes into the arena until each request is done, so they are waited for. A disk that
// does not answer in time is left to the kernel, which holds the pages and the file itself.
void UringEngine::drain() noexcept {
  auto in_flight = transfers_.size() - unused_.size() - io_uring_sq_ready(&ring_);
  while (in_flight > 0) {
    __kernel_timespec timeout{};
    timeout.tv_sec = kDrainTimeoutSeconds;
    io_uring_cqe* entry = nullptr;
    const int error = -io_uring_wait_cqe_timeout(&ring_, &entry, &timeout);
    if (error == EINTR) continue;
    if (error != 0) return;
    io_uring_cqe_seen(&ring_, entry);
    --in_flight;
  }
}

}  // namespace

std::unique_ptr<IoEngine> open_uring_engine(const IoEngineOptions& options) {
  return std::make_unique<UringEngine>(options);
}

}  // namespace hymcache::chm

#else

namespace hymcache::chm {

std::unique_ptr<IoEngine> open_uring_engine(const IoEngineOptions&) {
  throw Error(ErrorKind::kDevice, "device.io: io_uring: this build has no liburing");
}

}  // namespace hymcache::chm

#endif  // HYMCACHE_HAVE_LIBURING
