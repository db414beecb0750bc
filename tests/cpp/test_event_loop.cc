// The event loop: order, timers, descriptors that come and go, and calls from other threads.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <atomic>
#include <stdexcept>
#include <string>

#include "tests/cpp/served_peers.h"
#include "transport/csrc/event_loop.h"

namespace hymcache::wire_testing {
namespace {

UniqueFd event(bool readable) {
  UniqueFd fd(::eventfd(readable ? 1 : 0, EFD_CLOEXEC | EFD_NONBLOCK));
  REQUIRE(fd);
  return fd;
}

void take(int fd) {
  std::uint64_t count = 0;
  REQUIRE(::read(fd, &count, sizeof count) == sizeof count);
}

using std::chrono::milliseconds;

}  // namespace

TEST_CASE("event loop: posted tasks run in order, deferred ones after the round") {
  EventLoop loop;
  std::string order;
  loop.post([&] {
    order += 'a';
    loop.defer([&] {
      order += 'd';
      loop.defer([&] {
        order += 'e';
        loop.stop();
      });
    });
  });
  loop.post([&] { order += 'b'; });
  loop.post([&] { order += 'c'; });
  loop.run();
  CHECK(order == "abcde");
}

TEST_CASE("event loop: timers run in the order of their times, the cancelled not at all") {
  EventLoop loop;
  std::string order;
  EventLoop::TimerId c;
  loop.after(milliseconds(15), [&] {
    order += 'd';
    loop.stop();
  });
  loop.after(milliseconds(5), [&] {
    order += 'a';
    loop.cancel(c);
    // Not in this round, although it is due: a timer cannot keep the loop for itself.
    loop.after(milliseconds(0), [&] { order += 'b'; });
  });
  c = loop.after(milliseconds(10), [&] { order += 'c'; });
  const auto gone = loop.after(milliseconds(1), [&] { order += 'x'; });
  loop.cancel(gone);
  loop.cancel(gone);
  loop.cancel({});
  const TimePoint start = Clock::now();
  loop.run();
  CHECK(order == "abd");
  CHECK(Clock::now() - start >= milliseconds(15));
  CHECK(Clock::now() - loop.now() < milliseconds(1000));
}

TEST_CASE("event loop: timers of one time run in the order in which they were set") {
  EventLoop loop;
  std::vector<int> order;
  for (int i = 0; i < 100; ++i) loop.after(milliseconds(0), [&order, i] { order.push_back(i); });
  loop.after(milliseconds(1), [&] { loop.stop(); });
  loop.run();
  REQUIRE(order.size() == 100);
  CHECK(std::is_sorted(order.begin(), order.end()));
}

TEST_CASE("event loop: a descriptor is heard until it is not watched any more") {
  EventLoop loop;
  const UniqueFd fd = event(false);
  int heard = 0;
  loop.watch(fd.get(), EPOLLIN, [&](std::uint32_t events) {
    CHECK(events == EPOLLIN);
    take(fd.get());
    if (++heard == 3) {
      loop.unwatch(fd.get());  // from within its own handler
      loop.after(milliseconds(5), [&] { loop.stop(); });
    }
    const std::uint64_t one = 1;
    CHECK(::write(fd.get(), &one, sizeof one) == sizeof one);
  });
  loop.post([&] {
    const std::uint64_t one = 1;
    CHECK(::write(fd.get(), &one, sizeof one) == sizeof one);
  });
  loop.run();
  CHECK(heard == 3);
}

TEST_CASE("event loop: interest can change") {
  EventLoop loop;
  const UniqueFd fd = event(true);
  std::string heard;
  loop.watch(fd.get(), 0, [&](std::uint32_t events) {
    if ((events & EPOLLOUT) != 0) heard += 'w';
    if ((events & EPOLLIN) != 0) heard += 'r';
    if (heard.size() == 1) loop.rewatch(fd.get(), EPOLLIN);
    if (heard.size() == 2) loop.stop();
  });
  loop.after(milliseconds(2), [&] {
    CHECK(heard.empty());
    loop.rewatch(fd.get(), EPOLLOUT);
  });
  loop.run();
  CHECK(heard == "wr");
}

TEST_CASE("event loop: what one handler takes away, another does not get in the same round") {
  EventLoop loop;
  UniqueFd a = event(true);
  UniqueFd b = event(true);
  int heard = 0;
  int successor_heard = 0;
  UniqueFd successor;
  const auto handler = [&](UniqueFd& mine, UniqueFd& other) {
    return [&](std::uint32_t) {
      ++heard;
      take(mine.get());
      // The other is readable too, and reported in this round. Its number goes to a successor.
      const int number = other.get();
      loop.unwatch(number);
      other.reset();
      successor = event(false);
      REQUIRE(successor.get() == number);
      loop.watch(number, EPOLLIN, [&](std::uint32_t) { ++successor_heard; });
    };
  };
  loop.watch(a.get(), EPOLLIN, handler(a, b));
  loop.watch(b.get(), EPOLLIN, handler(b, a));
  loop.after(milliseconds(5), [&] { loop.stop(); });
  loop.run();
  CHECK(heard == 1);
  CHECK(successor_heard == 0);
}

TEST_CASE("event loop: what cannot be watched is said") {
  EventLoop loop;
  const UniqueFd folder(::open("/tmp", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const Thrown thrown = thrown_by([&] { loop.watch(folder.get(), EPOLLIN, [](std::uint32_t) {}); });
  CHECK(thrown.kind == ErrorKind::kDevice);
  CHECK(thrown.error_number == EPERM);
}

TEST_CASE("event loop: a call runs in the loop, and brings back what it throws") {
  LoopThread thread("test");
  std::thread::id id;
  thread.loop().call([&] { id = std::this_thread::get_id(); });
  CHECK(id != std::thread::id());
  CHECK(id != std::this_thread::get_id());
  CHECK_THROWS_WITH_AS(thread.loop().call([] { throw std::out_of_range("far"); }), "far",
                       std::out_of_range);
  int after = 0;
  thread.loop().call([&] { after = 1; });
  CHECK(after == 1);
}

TEST_CASE("event loop: a call where nothing runs is refused, not kept waiting") {
  EventLoop idle;
  CHECK(thrown_by([&] { idle.call([] {}); }).kind == ErrorKind::kUnavailable);
  LoopThread thread("test");
  thread.stop();
  thread.stop();
  CHECK(thrown_by([&] { thread.loop().call([] {}); }).kind == ErrorKind::kUnavailable);
}

TEST_CASE("event loop: calls from many threads are each answered, also at the end") {
  constexpr int kThreads = 4;
  constexpr int kCalls = 500;
  LoopThread thread("test");
  int in_loop = 0;  // the loop's own: no lock
  std::atomic<int> answered = 0;
  std::atomic<int> refused = 0;
  std::vector<std::thread> callers;
  for (int i = 0; i < kThreads; ++i) {
    callers.emplace_back([&] {
      for (int call = 0; call < kCalls; ++call) {
        try {
          thread.loop().call([&] { ++in_loop; });
          ++answered;
        } catch (const Error&) {
          ++refused;
        }
        thread.loop().post([&] { ++in_loop; });
      }
    });
  }
  eventually([&] { return answered > kThreads * kCalls / 4; });
  thread.stop();  // in the middle of it
  for (std::thread& caller : callers) caller.join();
  CHECK(answered + refused == kThreads * kCalls);
  CHECK(in_loop >= answered);
}

TEST_CASE("event loop: stop may come from anywhere, before it runs too") {
  EventLoop before;
  before.stop();
  before.run();
  EventLoop within;
  within.post([&] { within.stop(); });
  within.run();
  LoopThread thread("a name that is too long for the kernel");
  bool ran = false;
  thread.loop().call([&] { ran = true; });
  CHECK(ran);
}

}  // namespace hymcache::wire_testing
