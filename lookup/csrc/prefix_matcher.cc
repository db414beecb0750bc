#include "lookup/csrc/prefix_matcher.h"

#include <utility>

namespace hymcache {
namespace {

// Requests whose prefix is not yet looked up. So many wait only where the master does not answer.
constexpr std::size_t kQueuedMax = 16'384;

}  // namespace

PrefixMatcher::PrefixMatcher(std::shared_ptr<StoreClient> client)
    : client_(std::move(client)), thread_([this] { run(); }) {}

PrefixMatcher::~PrefixMatcher() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    for (const auto& [ticket, job] : jobs_) job->stop.store(true, std::memory_order_relaxed);
  }
  changed_.notify_all();
  thread_.join();
}

PrefixMatcher::Ticket PrefixMatcher::start(std::vector<ObjectKey> keys) {
  auto job = std::make_shared<Job>();
  job->keys = std::move(keys);
  job->started = Clock::now();
  job->deadline = client_->deadline();
  const std::lock_guard lock(mutex_);
  const Ticket ticket = next_ticket_++;
  jobs_.emplace(ticket, job);
  if (queue_.size() >= kQueuedMax) {
    job->done = true;
    job->match.reason = "too many lookups wait already";
    return ticket;
  }
  queue_.push_back(std::move(job));
  changed_.notify_one();
  return ticket;
}

bool PrefixMatcher::answer(Ticket ticket, Match* match, bool* known) const {
  const auto found = jobs_.find(ticket);
  *known = found != jobs_.end();
  if (!*known || !found->second->done) return false;
  *match = found->second->match;
  return true;
}

bool PrefixMatcher::poll(Ticket ticket, Match* match, bool* known) {
  const std::lock_guard lock(mutex_);
  return answer(ticket, match, known);
}

bool PrefixMatcher::wait(Ticket ticket, Clock::duration timeout, Match* match, bool* known) {
  std::unique_lock lock(mutex_);
  finished_.wait_for(lock, timeout, [&] { return answer(ticket, match, known) || !*known; });
  return answer(ticket, match, known);
}

void PrefixMatcher::take(Ticket ticket) {
  const std::lock_guard lock(mutex_);
  jobs_.erase(ticket);
}

void PrefixMatcher::cancel(Ticket ticket) {
  const std::lock_guard lock(mutex_);
  const auto found = jobs_.find(ticket);
  if (found == jobs_.end()) return;
  Job& job = *found->second;
  job.stop.store(true, std::memory_order_relaxed);
  job.cancelled = true;
  if (job.done) to_abandon_.push_back(std::move(job.plan));
  jobs_.erase(found);
  changed_.notify_one();
}

void PrefixMatcher::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !queue_.empty() || !to_abandon_.empty(); });
    if (stopping_) break;
    if (!queue_.empty()) {
      const std::shared_ptr<Job> job = std::move(queue_.front());
      queue_.pop_front();
      if (job->cancelled) continue;
      lock.unlock();
      work(*job);
      lock.lock();
      job->done = true;
      if (job->cancelled) to_abandon_.push_back(std::move(job->plan));
      finished_.notify_all();
      continue;
    }
    // Takes back what nobody will read, when nobody waits for a lookup.
    const ReadPlan plan = std::move(to_abandon_.front());
    to_abandon_.pop_front();
    lock.unlock();
    client_->abandon(plan);
    lock.lock();
  }
}

void PrefixMatcher::work(Job& job) {
  Match match;
  ReadPlan plan;
  try {
    plan = client_->match(job.keys, job.deadline, &job.stop);
    match.hits = static_cast<std::uint32_t>(plan.rows.size());
    if (match.hits > 0) match.plan = plan.serialize();
  } catch (const std::exception& error) {
    match.reason = error.what();
  }
  match.seconds = std::chrono::duration<double>(Clock::now() - job.started).count();
  const std::lock_guard lock(mutex_);
  job.match = std::move(match);
  job.plan = std::move(plan);
}

}  // namespace hymcache
