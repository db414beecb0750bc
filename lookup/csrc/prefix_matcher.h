// Matches prefixes in the background, so that a scheduler never waits for the network.
//
// start() hands in the keys of a request, poll() asks for the answer; in between a thread of the
// matcher looks the keys up in batches and starts the prefetch with the first hit.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "lookup/csrc/store_client.h"

namespace hymcache {

struct Match {
  std::uint32_t hits = 0;  // length of the run of hits from the front
  std::string plan;        // ReadPlan::serialize(); empty without a hit
  std::string reason;      // why the lookup failed; empty when it did not
  double seconds = 0;
};

class PrefixMatcher {
 public:
  using Ticket = std::uint64_t;

  explicit PrefixMatcher(std::shared_ptr<StoreClient> client);
  ~PrefixMatcher();

  Ticket start(std::vector<ObjectKey> keys);
  // True when the answer is there; it stays until cancel() or take(). False for an unknown ticket
  // too, with `known` false.
  bool poll(Ticket ticket, Match* match, bool* known);
  // Waits for at most `timeout`; the same answers as poll().
  bool wait(Ticket ticket, Clock::duration timeout, Match* match, bool* known);
  // Forgets the ticket; its prefetches go on, for whoever has the plan.
  void take(Ticket ticket);
  // Forgets the ticket and takes its prefetches back.
  void cancel(Ticket ticket);

 private:
  struct Job {
    std::vector<ObjectKey> keys;
    TimePoint deadline{};
    TimePoint started{};
    std::atomic<bool> stop{false};
    bool done = false;  // this and the rest: guarded by mutex_
    bool cancelled = false;
    Match match;
    ReadPlan plan;
  };

  void run();
  void work(Job& job);
  bool answer(Ticket ticket, Match* match, bool* known) const;

  const std::shared_ptr<StoreClient> client_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;   // for the thread
  std::condition_variable finished_;  // for who waits
  std::unordered_map<Ticket, std::shared_ptr<Job>> jobs_;
  std::deque<std::shared_ptr<Job>> queue_;
  std::deque<ReadPlan> to_abandon_;
  Ticket next_ticket_ = 1;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace hymcache
