// pread and pwrite in a bounded pool of threads: the engine for hosts that forbid io_uring.
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "chm_device/csrc/io_engine.h"
#include "chm_device/csrc/transfer.h"
#include "hymcache/csrc/error.h"
#include "hymcache/csrc/unique_fd.h"

namespace hymcache::chm {
namespace {

constexpr std::uint32_t kThreadsMax = 8;

class ThreadEngine final : public IoEngine {
 public:
  explicit ThreadEngine(const IoEngineOptions& options);
  ~ThreadEngine() override;

  bool queue(const IoRequest& request) override;
  void submit() override;
  std::size_t reap(std::span<IoCompletion> completions) override;
  int event_fd() const override { return event_fd_.get(); }
  void wake() override { ::eventfd_write(event_fd_.get(), 1); }
  std::string name() const override { return "threads"; }

 private:
  void start_threads(std::uint32_t count);
  void stop_threads() noexcept;
  void work();
  IoCompletion move(const IoRequest& request) const;

  const int fd_;
  const std::uint32_t depth_;
  UniqueFd event_fd_;
  std::uint32_t in_engine_ = 0;  // queued, running, or not reaped
  std::vector<IoRequest> queued_;
  std::vector<std::thread> threads_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable work_to_do_;
  std::deque<IoRequest> submitted_;
  std::vector<IoCompletion> completed_;
  bool stopping_ = false;
};

ThreadEngine::ThreadEngine(const IoEngineOptions& options)
    : fd_(options.fd), depth_(options.depth), event_fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!event_fd_) throw Error(ErrorKind::kDevice, "device.io: no eventfd to be had", errno);
  queued_.reserve(depth_);
  completed_.reserve(depth_);
  try {
    start_threads(std::min(depth_, kThreadsMax));
  } catch (const std::system_error& error) {
    stop_threads();
    throw Error(ErrorKind::kDevice,
                std::string("device.io: cannot start a thread: ") + error.what(),
                error.code().value());
  }
}

ThreadEngine::~ThreadEngine() { stop_threads(); }

void ThreadEngine::start_threads(std::uint32_t count) {
  // Signals are for the process's own threads: these are born with all of them blocked.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (std::uint32_t i = 0; i < count; ++i) {
      threads_.emplace_back([this] { work(); });
      pthread_setname_np(threads_.back().native_handle(), "hymcache-io");
    }
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void ThreadEngine::stop_threads() noexcept {
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  work_to_do_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

bool ThreadEngine::queue(const IoRequest& request) {
  if (in_engine_ == depth_) return false;
  ++in_engine_;
  queued_.push_back(request);
  return true;
}

void ThreadEngine::submit() {
  if (queued_.empty()) return;
  {
    const std::scoped_lock lock(mutex_);
    submitted_.insert(submitted_.end(), queued_.begin(), queued_.end());
  }
  if (queued_.size() == 1) {
    work_to_do_.notify_one();
  } else {
    work_to_do_.notify_all();
  }
  queued_.clear();
}

std::size_t ThreadEngine::reap(std::span<IoCompletion> completions) {
  eventfd_t ignored = 0;
  ::eventfd_read(event_fd_.get(), &ignored);
  const std::scoped_lock lock(mutex_);
  const std::size_t count = std::min(completions.size(), completed_.size());
  const auto end = completed_.begin() + static_cast<std::ptrdiff_t>(count);
  std::copy(completed_.begin(), end, completions.begin());
  completed_.erase(completed_.begin(), end);
  if (!completed_.empty()) wake();
  in_engine_ -= static_cast<std::uint32_t>(count);
  return count;
}

void ThreadEngine::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    work_to_do_.wait(lock, [this] { return stopping_ || !submitted_.empty(); });
    if (stopping_) return;
    const IoRequest request = submitted_.front();
    submitted_.pop_front();
    lock.unlock();
    const IoCompletion completion = move(request);
    lock.lock();
    completed_.push_back(completion);
    if (completed_.size() == 1) wake();
  }
}

IoCompletion ThreadEngine::move(const IoRequest& request) const {
  Transfer transfer(request);
  for (;;) {
    const auto offset = static_cast<off_t>(transfer.offset());
    const ssize_t moved = transfer.is_write()
                              ? ::pwrite(fd_, transfer.data(), transfer.bytes(), offset)
                              : ::pread(fd_, transfer.data(), transfer.bytes(), offset);
    if (transfer.advance(moved < 0 ? -errno : moved) == Transfer::Progress::kAgain) continue;
    return {transfer.cookie(), transfer.error()};
  }
}

}  // namespace

std::unique_ptr<IoEngine> open_thread_engine(const IoEngineOptions& options) {
  return std::make_unique<ThreadEngine>(options);
}

}  // namespace hymcache::chm
