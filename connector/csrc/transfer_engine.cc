#include "connector/csrc/transfer_engine.h"

#include <algorithm>
#include <utility>

namespace hymcache {

TransferEngine::TransferEngine(std::shared_ptr<StoreClient> client,
                               std::vector<BlockLayout> layouts, std::uint32_t load_threads,
                               std::uint32_t save_threads)
    : client_(std::move(client)), layouts_(std::move(layouts)) {
  if (load_threads == 0 || save_threads == 0 || load_threads > 64 || save_threads > 64) {
    throw Error(ErrorKind::kConfig, "load_threads and save_threads must be from 1 to 64");
  }
  for (std::uint32_t i = 0; i < load_threads; ++i) {
    threads_.emplace_back([this] { run(loads_); });
  }
  for (std::uint32_t i = 0; i < save_threads; ++i) {
    threads_.emplace_back([this] { run(saves_); });
  }
}

TransferEngine::~TransferEngine() { close(); }

void TransferEngine::close() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    for (const auto& [id, job] : open_) job->cancelled.store(true, std::memory_order_relaxed);
  }
  loads_.changed.notify_all();
  saves_.changed.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  // What was still queued ends here: nobody waits for it in vain.
  const std::lock_guard lock(mutex_);
  for (const auto& [id, job] : open_) {
    TransferResult& result = results_.emplace_back();
    result.job = id;
    result.is_load = job->is_load;
    result.statuses.assign(job->blocks.size(), BlockStatus::kCancelled);
  }
  open_.clear();
  finished_.notify_all();
}

void TransferEngine::submit_load(std::int64_t id, std::uint32_t layout, std::string plan,
                                 std::uint32_t first, std::vector<std::int64_t> blocks,
                                 Clock::duration deadline) {
  auto job = std::make_shared<Job>();
  job->id = id;
  job->is_load = true;
  job->layout = layout;
  job->plan = std::move(plan);
  job->first = first;
  job->blocks = std::move(blocks);
  submit(std::move(job), deadline);
}

void TransferEngine::submit_save(std::int64_t id, std::uint32_t layout, std::vector<ObjectKey> keys,
                                 std::uint64_t name_space, std::vector<std::int64_t> blocks,
                                 Clock::duration deadline) {
  if (keys.size() != blocks.size()) {
    throw Error(ErrorKind::kConfig, std::to_string(keys.size()) + " keys for " +
                                        std::to_string(blocks.size()) + " blocks");
  }
  auto job = std::make_shared<Job>();
  job->id = id;
  job->layout = layout;
  job->keys = std::move(keys);
  job->name_space = name_space;
  job->blocks = std::move(blocks);
  submit(std::move(job), deadline);
}

void TransferEngine::submit(std::shared_ptr<Job> job, Clock::duration deadline) {
  if (job->layout >= layouts_.size()) {
    throw Error(ErrorKind::kConfig, "there is no block layout " + std::to_string(job->layout));
  }
  for (const std::int64_t block : job->blocks) {
    if (block < 0 || block >= layouts_[job->layout].blocks()) {
      throw Error(ErrorKind::kConfig, "there is no block " + std::to_string(block));
    }
  }
  job->submitted = Clock::now();
  job->deadline = job->submitted + deadline;
  Queue& queue = job->is_load ? loads_ : saves_;
  const std::lock_guard lock(mutex_);
  if (stopping_) throw Error(ErrorKind::kUnavailable, "the transfer engine is closed");
  if (!open_.emplace(job->id, job).second) {
    throw Error(ErrorKind::kConfig, "job " + std::to_string(job->id) + " exists already");
  }
  queue.jobs.push_back(std::move(job));
  queue.changed.notify_one();
}

std::vector<TransferResult> TransferEngine::poll() {
  const std::lock_guard lock(mutex_);
  return std::exchange(results_, {});
}

bool TransferEngine::wait(const std::vector<std::int64_t>& jobs, Clock::duration timeout) {
  std::unique_lock lock(mutex_);
  return finished_.wait_for(lock, timeout, [&] {
    return std::none_of(jobs.begin(), jobs.end(),
                        [this](std::int64_t id) { return open_.contains(id); });
  });
}

void TransferEngine::cancel(const std::vector<std::int64_t>& jobs) {
  const std::lock_guard lock(mutex_);
  for (const std::int64_t id : jobs) {
    const auto found = open_.find(id);
    if (found != open_.end()) found->second->cancelled.store(true, std::memory_order_relaxed);
  }
}

void TransferEngine::run(Queue& queue) {
  std::unique_lock lock(mutex_);
  for (;;) {
    queue.changed.wait(lock, [&] { return stopping_ || !queue.jobs.empty(); });
    if (stopping_) return;
    const std::shared_ptr<Job> job = std::move(queue.jobs.front());
    queue.jobs.pop_front();
    lock.unlock();
    TransferResult result = work(*job);
    lock.lock();
    results_.push_back(std::move(result));
    open_.erase(job->id);
    finished_.notify_all();
  }
}

TransferResult TransferEngine::work(const Job& job) {
  TransferResult result;
  result.job = job.id;
  result.is_load = job.is_load;
  result.statuses.assign(job.blocks.size(), BlockStatus::kCancelled);
  const BlockLayout& layout = layouts_[job.layout];
  std::vector<Segment> segments;
  const BlockPlaces places = [&](std::uint32_t i) -> std::span<const Segment> {
    layout.locate(job.blocks[i], segments);
    return segments;
  };
  const TransferOptions options{.checksums = client_->options().checksums,
                                .cancelled = &job.cancelled};
  if (job.is_load) {
    try {
      const ReadPlan plan = ReadPlan::parse(job.plan);
      if (job.cancelled.load(std::memory_order_relaxed)) {
        client_->abandon(plan);
      } else {
        result.transport =
            client_->read(plan, job.first, places, options, job.deadline, result.statuses);
      }
    } catch (const Error&) {
      std::fill(result.statuses.begin(), result.statuses.end(), BlockStatus::kMiss);
    }
  } else if (!job.cancelled.load(std::memory_order_relaxed)) {
    result.transport = client_->write(job.name_space, /*prefix_order=*/true, job.keys, places,
                                      options, job.deadline, result.statuses);
  }
  result.bytes_moved =
      layout.block_bytes() * static_cast<std::uint64_t>(std::count(
                                 result.statuses.begin(), result.statuses.end(), BlockStatus::kOk));
  result.seconds = std::chrono::duration<double>(Clock::now() - job.submitted).count();
  return result;
}

}  // namespace hymcache
