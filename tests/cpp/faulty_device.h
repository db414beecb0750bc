// A device that wraps a real one and makes it fail, by a seeded plan: for tests of what stands on
// devices. What it does is done to the real one's bytes and events, so that a consumer cannot tell.
#pragma once

#include <sys/eventfd.h>

#include <cerrno>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "chm_device/csrc/device.h"

namespace hymcache::testing {

// Shares of 1. A request has one fault at most; they are tried in this order.
struct FaultPlan {
  std::uint64_t seed = 1;
  double fail_read = 0;     // kFailed
  double corrupt_read = 0;  // one bit of the staged bytes is flipped
  double delay_read = 0;    // kPending for up to delay_drives_max calls of drive() longer
  double fail_flush = 0;    // lost at the first drive() that may flush
  std::uint32_t delay_drives_max = 8;
};

class FaultyDevice final : public Device {
 public:
  struct Counts {
    std::uint64_t failed_reads = 0, corrupted_reads = 0, delayed_reads = 0, failed_flushes = 0;
  };

  FaultyDevice(std::unique_ptr<Device> inner, const FaultPlan& plan)
      : inner_(std::move(inner)), plan_(plan), random_(plan.seed) {
    inner_->on_staged = [this](RequestId request) { staged(request); };
    inner_->on_flush_failed = [this](std::uint64_t address, int error) {
      doomed_.erase(address);
      if (on_flush_failed) on_flush_failed(address, error);
    };
  }

  const DeviceRegion& region() const override { return inner_->region(); }
  DeviceStats stats() const override { return inner_->stats(); }
  std::string description() const override { return inner_->description() + ", with faults"; }
  const Counts& counts() const { return counts_; }

  RequestId prefetch_object(std::uint64_t address, std::uint32_t length) override {
    const RequestId request = inner_->prefetch_object(address, length);
    if (request == 0) return 0;
    Fault& fault = faults_[request] = draw(length);
    StagedObject ignored;
    if (inner_->prefetch_poll(request, &ignored) != PrefetchState::kPending) apply(request, fault);
    return request;
  }

  PrefetchState prefetch_poll(RequestId request, StagedObject* staged) const override {
    const PrefetchState state = inner_->prefetch_poll(request, staged);
    const Fault& fault = faults_.at(request);
    if (fault.drives_left > 0) return PrefetchState::kPending;
    const bool fails = state == PrefetchState::kReady && fault.kind == Kind::kFail;
    return fails ? PrefetchState::kFailed : state;
  }

  void prefetch_release(RequestId request) override {
    faults_.erase(request);
    inner_->prefetch_release(request);
  }

  Reservation reserve(std::uint32_t length) override {
    const Reservation reservation = inner_->reserve(length);
    if (reservation.status == ReserveStatus::kGranted) {
      grants_[reservation.write] = {reservation.address, length};
    }
    return reservation;
  }

  void commit(WriteId write) override {
    inner_->commit(write);
    const auto [address, length] = grants_.at(write);
    grants_.erase(write);
    if (chance(plan_.fail_flush)) doomed_[address] = length;
  }

  void abort(WriteId write) override {
    grants_.erase(write);
    inner_->abort(write);
  }

  void free(std::uint64_t address, std::uint32_t length) override {
    doomed_.erase(address);
    inner_->free(address, length);
  }

  int event_fd() const override { return inner_->event_fd(); }

  std::uint32_t drive(bool may_flush) override {
    if (may_flush) lose_doomed();
    const std::uint32_t reaped = inner_->drive(may_flush);
    end_delays();
    return reaped;
  }

 private:
  enum class Kind : std::uint8_t { kNone, kFail, kCorrupt, kDelay };
  struct Fault {
    Kind kind = Kind::kNone;
    std::uint32_t place = 0;        // the byte to corrupt
    std::uint32_t drives_left = 0;  // of a delay that runs
    bool is_due = false;            // its delay is over: on_staged has to be called
  };

  bool chance(double share) { return std::uniform_real_distribution<>(0, 1)(random_) < share; }

  Fault draw(std::uint32_t length) {
    if (chance(plan_.fail_read)) return {Kind::kFail};
    if (chance(plan_.corrupt_read)) {
      return {Kind::kCorrupt, static_cast<std::uint32_t>(random_() % length)};
    }
    if (chance(plan_.delay_read)) return {Kind::kDelay};
    return {};
  }

  void staged(RequestId request) {
    Fault& fault = faults_.at(request);
    apply(request, fault);
    if (fault.drives_left == 0 && on_staged) on_staged(request);
  }

  // The real read has ended, well or badly.
  void apply(RequestId request, Fault& fault) {
    StagedObject staged;
    if (inner_->prefetch_poll(request, &staged) != PrefetchState::kReady) return;
    if (fault.kind == Kind::kFail) {
      ++counts_.failed_reads;
    } else if (fault.kind == Kind::kCorrupt) {
      ++counts_.corrupted_reads;
      inner_->region().base[staged.region_offset + fault.place] ^= 1;
    } else if (fault.kind == Kind::kDelay) {
      ++counts_.delayed_reads;
      fault.drives_left = 1 + static_cast<std::uint32_t>(random_() % plan_.delay_drives_max);
      ::eventfd_write(event_fd(), 1);
    }
  }

  void end_delays() {
    std::vector<RequestId> ended;
    bool is_waiting = false;
    for (auto& [request, fault] : faults_) {
      if (fault.drives_left == 0) continue;
      fault.is_due = --fault.drives_left == 0;
      if (fault.is_due) ended.push_back(request);
      is_waiting |= !fault.is_due;
    }
    if (is_waiting) ::eventfd_write(event_fd(), 1);
    for (const RequestId request : ended) {
      // A callback may have released it, and its number may be another's by now.
      const auto found = faults_.find(request);
      if (found == faults_.end() || !std::exchange(found->second.is_due, false)) continue;
      if (on_staged) on_staged(request);
    }
  }

  void lose_doomed() {
    while (!doomed_.empty()) {
      const auto [address, length] = *doomed_.begin();
      doomed_.erase(address);
      ++counts_.failed_flushes;
      inner_->free(address, length);
      if (on_flush_failed) on_flush_failed(address, EIO);
    }
  }

  std::unique_ptr<Device> inner_;
  const FaultPlan plan_;
  std::mt19937_64 random_;
  Counts counts_;
  std::map<RequestId, Fault> faults_;  // of every request that is not released
  std::map<WriteId, std::pair<std::uint64_t, std::uint32_t>> grants_;
  std::map<std::uint64_t, std::uint32_t> doomed_;  // lengths by address
};

}  // namespace hymcache::testing
