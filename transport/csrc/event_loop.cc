#include "transport/csrc/event_loop.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <memory>

#include "hymcache/csrc/error.h"

namespace hymcache {
namespace {

[[noreturn]] void fail(const char* call) {
  const int error = errno;
  throw Error(ErrorKind::kDevice, std::string(call) + ": " + std::strerror(error), error);
}

constexpr int kEventsPerRound = 64;

}  // namespace

EventLoop::EventLoop()
    : epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      timer_fd_(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
  if (!epoll_) fail("epoll_create1");
  if (!wake_) fail("eventfd");
  if (!timer_fd_) fail("timerfd_create");
  watch(wake_.get(), EPOLLIN, [this](std::uint32_t) {
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &count, sizeof count);
    drain_posted();
  });
  watch(timer_fd_.get(), EPOLLIN, [this](std::uint32_t) {
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(timer_fd_.get(), &count, sizeof count);
    armed_for_ = TimePoint::max();
  });
}

EventLoop::~EventLoop() = default;

void EventLoop::watch(int fd, std::uint32_t epoll_events, FdHandler handler) {
  if (static_cast<std::size_t>(fd) >= watches_.size()) watches_.resize(fd + 1);
  Watch& watch = watches_[fd];
  watch = {.serial = ++serial_,
           .active = true,
           .handler = std::make_shared<const FdHandler>(std::move(handler))};
  epoll_event event{};
  event.events = epoll_events;
  event.data.u64 = (std::uint64_t{watch.serial} << 32) | static_cast<std::uint32_t>(fd);
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    watch.active = false;
    fail("epoll_ctl(ADD)");
  }
}

void EventLoop::rewatch(int fd, std::uint32_t epoll_events) {
  epoll_event event{};
  event.events = epoll_events;
  event.data.u64 = (std::uint64_t{watches_[fd].serial} << 32) | static_cast<std::uint32_t>(fd);
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) != 0) fail("epoll_ctl(MOD)");
}

void EventLoop::unwatch(int fd) {
  Watch& watch = watches_[fd];
  watch.active = false;
  watch.handler = nullptr;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

EventLoop::TimerId EventLoop::after(Clock::duration delay, Task task) {
  const TimerId id{.when = Clock::now() + delay, .sequence = ++timer_sequence_};
  timers_.emplace(id, std::move(task));
  return id;
}

void EventLoop::cancel(TimerId timer) { timers_.erase(timer); }

void EventLoop::post(Task task) {
  {
    const std::lock_guard lock(mutex_);
    posted_.push_back(std::move(task));
  }
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t put = ::write(wake_.get(), &one, sizeof one);
}

void EventLoop::call(const Task& task) {
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    std::exception_ptr error;
  };
  const auto shared = std::make_shared<Shared>();
  {
    const std::lock_guard lock(mutex_);
    if (!running_ || stopping_) throw Error(ErrorKind::kUnavailable, "the service is not running");
    posted_.push_back([shared, &task] {
      std::exception_ptr error;
      try {
        task();
      } catch (...) {
        error = std::current_exception();
      }
      const std::lock_guard inner(shared->mutex);
      shared->error = std::move(error);  // the exception is the caller's alone from here on
      shared->done = true;
      shared->changed.notify_one();
    });
  }
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t put = ::write(wake_.get(), &one, sizeof one);
  std::unique_lock lock(shared->mutex);
  shared->changed.wait(lock, [&] { return shared->done; });
  if (shared->error) std::rethrow_exception(std::move(shared->error));
}

void EventLoop::drain_posted() {
  std::vector<Task> tasks;
  {
    const std::lock_guard lock(mutex_);
    tasks.swap(posted_);
  }
  for (const Task& task : tasks) task();
}

void EventLoop::run_timers() {
  while (!timers_.empty() && timers_.begin()->first.when <= now_) {
    const Task task = std::move(timers_.begin()->second);
    timers_.erase(timers_.begin());
    task();
  }
}

// A timer that was cancelled still wakes the loop, once: cheaper than to set the clock anew.
void EventLoop::arm_timer() {
  if (timers_.empty() || timers_.begin()->first.when >= armed_for_) return;
  armed_for_ = timers_.begin()->first.when;
  // Zero would disarm it.
  const std::int64_t at_ns = std::max<std::int64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(armed_for_.time_since_epoch()).count(),
      1);
  itimerspec at{};
  at.it_value = {.tv_sec = at_ns / 1'000'000'000, .tv_nsec = at_ns % 1'000'000'000};
  if (::timerfd_settime(timer_fd_.get(), TFD_TIMER_ABSTIME, &at, nullptr) != 0) {
    fail("timerfd_settime");
  }
}

void EventLoop::run() {
  {
    const std::lock_guard lock(mutex_);
    running_ = true;
  }
  std::array<epoll_event, kEventsPerRound> events;
  std::vector<Task> round;
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) break;
    }
    arm_timer();
    const int timeout_ms = deferred_.empty() ? -1 : 0;
    const int count = ::epoll_wait(epoll_.get(), events.data(), kEventsPerRound, timeout_ms);
    if (count < 0 && errno != EINTR) fail("epoll_wait");
    now_ = Clock::now();
    for (int i = 0; i < count; ++i) {
      const auto fd = static_cast<std::uint32_t>(events[i].data.u64);
      const auto serial = static_cast<std::uint32_t>(events[i].data.u64 >> 32);
      if (!watches_[fd].active || watches_[fd].serial != serial) continue;
      const std::shared_ptr<const FdHandler> handler = watches_[fd].handler;
      (*handler)(events[i].events);
    }
    run_timers();
    round.swap(deferred_);
    for (const Task& task : round) task();
    round.clear();
  }
  // Whoever waits in call() gets an answer before the loop is gone.
  drain_posted();
  const std::lock_guard lock(mutex_);
  running_ = false;
}

void EventLoop::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t put = ::write(wake_.get(), &one, sizeof one);
}

LoopThread::LoopThread(const char* name) {
  std::mutex mutex;
  std::condition_variable changed;
  bool started = false;
  thread_ = std::thread([&] {
    ::pthread_setname_np(::pthread_self(), name);
    loop_.post([&] {
      const std::lock_guard lock(mutex);
      started = true;
      changed.notify_one();
    });
    loop_.run();
  });
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return started; });
}

void LoopThread::stop() {
  if (!thread_.joinable()) return;
  loop_.stop();
  thread_.join();
}

}  // namespace hymcache
