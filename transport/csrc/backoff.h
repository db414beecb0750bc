// When a peer that failed may be tried again.
#pragma once

#include <algorithm>
#include <chrono>

#include "transport/csrc/event_loop.h"

namespace hymcache {

class Backoff {
 public:
  explicit Backoff(Clock::duration last = std::chrono::seconds(3)) noexcept : last_(last) {}
  bool may_try(TimePoint now) const noexcept { return now >= next_try_; }
  void failed(TimePoint now) noexcept {
    delay_ =
        delay_ == Clock::duration::zero() ? kFirst : std::min<Clock::duration>(delay_ * 2, last_);
    next_try_ = now + delay_;
  }
  void succeeded() noexcept {
    delay_ = Clock::duration::zero();
    next_try_ = {};
  }

 private:
  static constexpr std::chrono::milliseconds kFirst{100};
  Clock::duration last_;
  Clock::duration delay_{};
  TimePoint next_try_{};
};

}  // namespace hymcache
