// A store without its sockets: a device on a scratch file, what lies on it, and one event loop.
#pragma once

#include <doctest/doctest.h>
#include <sys/epoll.h>

#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "chm_device/csrc/file_device.h"
#include "kv_manager/csrc/object_directory.h"
#include "tests/cpp/device_fixture.h"
#include "tests/cpp/faulty_device.h"
#include "tests/cpp/numbered_objects.h"
#include "tests/cpp/raw_peer.h"
#include "transport/csrc/crc32c.h"
#include "transport/csrc/event_loop.h"

namespace hymcache::testing {

using wire_testing::eventually;

struct StoreOptions {
  std::uint64_t capacity_bytes = 64u << 20;
  std::uint64_t segment_bytes = 8u << 20;
  std::uint64_t staging_bytes = 1u << 20;
  std::uint64_t write_buffer_bytes = 1u << 20;
  std::uint32_t objects_max = 1u << 16;
  FaultPlan faults{};
};

// Everything is touched inside call() only, but for what says otherwise.
class Store {
 public:
  explicit Store(const StoreOptions& options = {})
      : device_(std::make_unique<FaultyDevice>(
            open_file_device({.path = folder_.file("device"),
                              .capacity_bytes = options.capacity_bytes,
                              .staging_bytes = options.staging_bytes,
                              .write_buffer_bytes = options.write_buffer_bytes,
                              .segment_bytes = options.segment_bytes,
                              .io = "threads",
                              .io_depth = 8,
                              .preallocate = false,
                              .log = {}}),
            options.faults)),
        directory_(
            *device_, /*node=*/7, /*incarnation=*/1000, options.objects_max,
            {.stored = [this](const Entry& entry) { stored.push_back(entry); },
             .gone = [this](const ObjectKey& key,
                            Generation generation) { gone.emplace_back(key, generation); }}) {
    call([this] {
      loop().watch(device_->event_fd(), EPOLLIN, [this](std::uint32_t) {
        device_->drive(may_flush);
        if (on_driven) on_driven();
      });
    });
  }
  ~Store() { stop(); }

  void stop() { thread_.stop(); }  // from any thread; the loop is at rest afterwards
  EventLoop& loop() noexcept { return thread_.loop(); }
  FaultyDevice& device() noexcept { return *device_; }
  ObjectDirectory& directory() noexcept { return directory_; }

  // From any other thread. What a check throws in there fails the test.
  void call(const std::function<void()>& task) { loop().call(task); }
  template <class T>
  T ask(const std::function<T()>& question) {
    T answer{};
    call([&] { answer = question(); });
    return answer;
  }

  // From any other thread: an object whose content its number gives; where it lies.
  Entry put(std::uint64_t number, std::uint32_t length) {
    Entry entry;
    eventually([&] {
      return ask<bool>([&] {
        const Reservation reservation = device_->reserve(length);
        if (reservation.status != ReserveStatus::kGranted) return false;
        std::uint8_t* const bytes = device_->region().base + reservation.region_offset;
        fill(bytes, number, length);
        const ObjectKey key = numbered_key(number);
        REQUIRE(directory_.add_pending(key, /*name_space=*/1, reservation.address, length));
        device_->commit(reservation.write);
        directory_.make_valid(key, crc32c(0, bytes, length), Entry::kHasCrc);
        entry = *directory_.find_valid(key);
        return true;
      });
    });
    return entry;
  }
  // From any other thread: until everything is on the device, and nothing of it in its DRAM.
  void forget_dram() {
    eventually(
        [&] { return ask<bool>([&] { return device_->stats().write_buffer_used_bytes == 0; }); });
    call([&] {
      // A full buffer has pushed out all that it could do without.
      std::vector<WriteId> grants;
      Reservation next;
      while ((next = device_->reserve(64 * kKiB)).status == ReserveStatus::kGranted) {
        grants.push_back(next.write);
      }
      REQUIRE(next.status == ReserveStatus::kBufferFull);
      for (const WriteId write : grants) device_->abort(write);
    });
  }
  DeviceStats device_stats() {
    return ask<DeviceStats>([&] { return device_->stats(); });
  }

  std::vector<Entry> stored;
  std::vector<std::pair<ObjectKey, Generation>> gone;
  bool may_flush = true;
  std::function<void()> on_driven;

 private:
  ScratchFolder folder_;
  std::unique_ptr<FaultyDevice> device_;
  ObjectDirectory directory_;
  LoopThread thread_{"store"};
};

}  // namespace hymcache::testing
