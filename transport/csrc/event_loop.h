// One thread, one epoll: everything that a master or a node owns lives in its loop, without locks.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "hymcache/csrc/unique_fd.h"

namespace hymcache {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;

class EventLoop {
 public:
  using FdHandler = std::function<void(std::uint32_t epoll_events)>;
  using Task = std::function<void()>;
  struct TimerId {
    TimePoint when{};
    std::uint64_t sequence = 0;
    auto operator<=>(const TimerId&) const = default;
  };

  EventLoop();
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // From the loop's own thread (or before run()):
  void watch(int fd, std::uint32_t epoll_events, FdHandler handler);
  void rewatch(int fd, std::uint32_t epoll_events);
  void unwatch(int fd);  // events of this round that name it are dropped
  TimerId after(Clock::duration delay, Task task);
  void cancel(TimerId timer);
  // Runs once the events of this round are handled: to batch what they brought about.
  void defer(Task task) { deferred_.push_back(std::move(task)); }
  TimePoint now() const noexcept { return now_; }  // read once a round

  // From any thread:
  void post(Task task);
  // Runs `task` in the loop and waits for it. Throws Unavailable when the loop is not running.
  void call(const Task& task);

  void run();   // until stop()
  void stop();  // from any thread

 private:
  struct Watch {
    std::uint32_t serial = 0;  // tells a reused descriptor from its predecessor
    bool active = false;
    std::shared_ptr<const FdHandler> handler;  // shared: it may remove itself while it runs
  };

  void drain_posted();
  void run_timers();
  void arm_timer();

  UniqueFd epoll_;
  UniqueFd wake_;
  // Set only when the earliest timer changes; a time-out of epoll_wait() would be set, and taken
  // back, in every round.
  UniqueFd timer_fd_;
  TimePoint armed_for_ = TimePoint::max();
  std::vector<Watch> watches_;  // by descriptor
  std::map<TimerId, Task> timers_;
  std::vector<Task> deferred_;
  std::uint64_t timer_sequence_ = 0;
  std::uint32_t serial_ = 0;
  TimePoint now_ = Clock::now();

  std::mutex mutex_;  // guards what follows
  std::vector<Task> posted_;
  bool stopping_ = false;
  bool running_ = false;
};

// A loop in a thread of its own; joined by stop() or the destructor.
class LoopThread {
 public:
  explicit LoopThread(const char* name);
  ~LoopThread() { stop(); }
  EventLoop& loop() noexcept { return loop_; }
  void stop();

 private:
  EventLoop loop_;
  std::thread thread_;
};

}  // namespace hymcache
