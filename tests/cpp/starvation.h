// What a test says of time holds on a machine that lets it run: a stalled one is asked again.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <stop_token>
#include <string>
#include <thread>

namespace hymcache::testing {

// The longest time in which a thread that had little to do did not run.
class StallWitness {
 public:
  std::chrono::milliseconds longest() {
    watching_ = {};  // stops it, and waits
    return longest_;
  }

 private:
  using Milliseconds = std::chrono::milliseconds;
  static constexpr Milliseconds kStep{5};

  Milliseconds longest_{0};
  std::jthread watching_{[this](const std::stop_token& stop) {
    auto last = std::chrono::steady_clock::now();
    while (!stop.stop_requested()) {
      std::this_thread::sleep_for(kStep);
      const auto now = std::chrono::steady_clock::now();
      longest_ = std::max(longest_, std::chrono::duration_cast<Milliseconds>(now - last) - kStep);
      last = now;
    }
  }};
};

// `body` tells what is wrong, "" for nothing. Something wrong while the machine stalled for `limit`
// and more is no answer; and when it never stops stalling, none can be had.
template <class Body>
void check_unless_stalled(std::chrono::milliseconds limit, Body body) {
  constexpr int kAttempts = 20;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    StallWitness witness;
    const std::string wrong = body();
    if (wrong.empty()) return;
    if (witness.longest() < limit) {
      FAIL_CHECK(wrong);
      return;
    }
  }
  WARN_MESSAGE(false, "not judged: the machine stalled for " << limit.count() << " ms and more");
}

}  // namespace hymcache::testing
