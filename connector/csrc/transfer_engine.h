// Moves blocks between the store and an engine's memory, in threads of its own.
//
// A job is one request's blocks of one layout. Loads and saves have threads apart, so that a save
// never delays a load. A job ends when all its blocks have a status; wait() after cancel() is how
// an engine takes its blocks back.
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

#include "connector/csrc/block_layout.h"
#include "lookup/csrc/store_client.h"

namespace hymcache {

struct TransferResult {
  std::int64_t job = 0;
  bool is_load = false;
  std::vector<BlockStatus> statuses;
  std::uint64_t bytes_moved = 0;
  double seconds = 0;  // from submission to the end
  std::string transport;
};

class TransferEngine {
 public:
  TransferEngine(std::shared_ptr<StoreClient> client, std::vector<BlockLayout> layouts,
                 std::uint32_t load_threads, std::uint32_t save_threads);
  ~TransferEngine();

  // Reads rows first, first + 1, ... of the plan into these blocks. Throws ConfigError for a block
  // or layout that is not there, or a job number in use.
  void submit_load(std::int64_t job, std::uint32_t layout, std::string plan, std::uint32_t first,
                   std::vector<std::int64_t> blocks, Clock::duration deadline);
  // Writes these blocks under these keys, which are consecutive blocks of one prefix.
  void submit_save(std::int64_t job, std::uint32_t layout, std::vector<ObjectKey> keys,
                   std::uint64_t name_space, std::vector<std::int64_t> blocks,
                   Clock::duration deadline);
  std::vector<TransferResult> poll();
  // True when none of the jobs is running or queued any more.
  bool wait(const std::vector<std::int64_t>& jobs, Clock::duration timeout);
  void cancel(const std::vector<std::int64_t>& jobs);
  // Cancels everything and ends the threads; no memory of the engine is touched afterwards.
  void close();

 private:
  struct Job {
    std::int64_t id = 0;
    bool is_load = false;
    std::uint32_t layout = 0;
    std::string plan;
    std::uint32_t first = 0;
    std::vector<ObjectKey> keys;
    std::uint64_t name_space = 0;
    std::vector<std::int64_t> blocks;
    TimePoint submitted{};
    TimePoint deadline{};
    std::atomic<bool> cancelled{false};
  };
  struct Queue {
    std::deque<std::shared_ptr<Job>> jobs;
    std::condition_variable changed;
  };

  void submit(std::shared_ptr<Job> job, Clock::duration deadline);
  void run(Queue& queue);
  TransferResult work(const Job& job);

  const std::shared_ptr<StoreClient> client_;
  const std::vector<BlockLayout> layouts_;
  std::mutex mutex_;
  Queue loads_, saves_;
  std::unordered_map<std::int64_t, std::shared_ptr<Job>> open_;  // queued or running
  std::condition_variable finished_;
  std::vector<TransferResult> results_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace hymcache
