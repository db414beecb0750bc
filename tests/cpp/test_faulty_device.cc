// The faults that tests of other parts rely on are the faults that they see.
#include <doctest/doctest.h>

#include <memory>
#include <vector>

#include "chm_device/csrc/file_device.h"
#include "tests/cpp/device_fixture.h"
#include "tests/cpp/faulty_device.h"

namespace hymcache {
namespace {

using testing::drive_until;
using testing::FaultPlan;
using testing::FaultyDevice;

constexpr std::uint32_t k64K = 64 << 10;

class Rig {
 public:
  explicit Rig(const FaultPlan& plan) {
    FileDeviceOptions options;
    options.path = folder_.file("device");
    options.capacity_bytes = 4 << 20;
    options.staging_bytes = 1 << 20;
    options.write_buffer_bytes = 512 << 10;
    device_ = std::make_unique<FaultyDevice>(open_file_device(options), plan);
    device_->on_staged = [this](RequestId request) { staged.push_back(request); };
    device_->on_flush_failed = [this](std::uint64_t address, int) { lost.push_back(address); };
  }

  FaultyDevice* operator->() const { return device_.get(); }

  std::uint64_t write(std::uint64_t seed) {
    const Reservation reservation = device_->reserve(k64K);
    REQUIRE(reservation.status == ReserveStatus::kGranted);
    testing::fill(device_->region().base + reservation.region_offset, seed, k64K);
    device_->commit(reservation.write);
    return reservation.address;
  }

  void flush() {
    REQUIRE(
        drive_until(*device_, true, [&] { return device_->stats().write_buffer_used_bytes == 0; }));
  }

  // Out of the write buffer, so that the next prefetch reads the file.
  void push_out() { device_->abort(device_->reserve(512 << 10).write); }

  PrefetchState wait(RequestId request, StagedObject* at_place) {
    REQUIRE(drive_until(*device_, false, [&] {
      return device_->prefetch_poll(request, at_place) != PrefetchState::kPending;
    }));
    return device_->prefetch_poll(request, at_place);
  }

  bool holds(const StagedObject& at_place, std::uint64_t seed) const {
    return testing::holds(device_->region().base + at_place.region_offset, seed, k64K);
  }

  std::vector<RequestId> staged;
  std::vector<std::uint64_t> lost;

 private:
  testing::ScratchFolder folder_;
  std::unique_ptr<FaultyDevice> device_;
};

TEST_CASE("faulty device: without a plan it is the device") {
  Rig rig({});
  const std::uint64_t address = rig.write(1);
  rig.flush();
  rig.push_out();
  const RequestId request = rig->prefetch_object(address, k64K);
  StagedObject at_place;
  CHECK(rig.wait(request, &at_place) == PrefetchState::kReady);
  CHECK(rig.holds(at_place, 1));
  CHECK(rig.staged == std::vector{request});
  rig->prefetch_release(request);
}

TEST_CASE("faulty device: reads fail, from the file and from memory") {
  Rig rig({.fail_read = 1});
  const std::uint64_t address = rig.write(1);
  StagedObject at_place;
  RequestId request = rig->prefetch_object(address, k64K);
  CHECK(rig->prefetch_poll(request, &at_place) == PrefetchState::kFailed);
  rig->prefetch_release(request);
  rig.flush();
  rig.push_out();
  request = rig->prefetch_object(address, k64K);
  CHECK(rig.wait(request, &at_place) == PrefetchState::kFailed);
  CHECK(rig.staged == std::vector{request});
  CHECK(rig->counts().failed_reads == 2);
  rig->prefetch_release(request);
}

TEST_CASE("faulty device: staged bytes differ in one bit") {
  Rig rig({.corrupt_read = 1});
  const std::uint64_t address = rig.write(1);
  const RequestId request = rig->prefetch_object(address, k64K);
  StagedObject at_place;
  REQUIRE(rig.wait(request, &at_place) == PrefetchState::kReady);
  int bits = 0;
  for (std::uint32_t i = 0; i < k64K; ++i) {
    const std::uint8_t byte = rig->region().base[at_place.region_offset + i];
    bits += __builtin_popcount(byte ^ testing::content_byte(1, i));
  }
  CHECK(bits == 1);
  rig->prefetch_release(request);
}

TEST_CASE("faulty device: reads come late, and are called back when they come") {
  Rig rig({.delay_read = 1, .delay_drives_max = 5});
  const std::uint64_t address = rig.write(1);
  StagedObject at_place;
  std::vector<RequestId> requests;
  for (int i = 0; i < 10; ++i) {
    requests.push_back(rig->prefetch_object(address, k64K));
    CHECK(rig->prefetch_poll(requests.back(), &at_place) == PrefetchState::kPending);
  }
  rig->prefetch_release(requests.back());
  requests.pop_back();
  for (const RequestId request : requests) {
    CHECK(rig.wait(request, &at_place) == PrefetchState::kReady);
    CHECK(rig.holds(at_place, 1));
    rig->prefetch_release(request);
  }
  CHECK(rig.staged.size() == requests.size());
}

TEST_CASE("faulty device: flushes fail, and the object is gone") {
  Rig rig({.fail_flush = 1});
  const std::uint64_t address = rig.write(1);
  const std::uint64_t freed = rig.write(2);
  rig->free(freed, k64K);
  rig->drive(false);
  CHECK(rig.lost.empty());
  rig.flush();
  CHECK(rig.lost == std::vector{address});
  CHECK(rig->stats().live_bytes == 0);
  CHECK(rig->stats().writes == 0);
}

TEST_CASE("faulty device: the same seed makes the same faults") {
  const auto faults = [](std::uint64_t seed) {
    Rig rig({.seed = seed, .fail_read = 0.3, .corrupt_read = 0.3, .delay_read = 0.3});
    const std::uint64_t address = rig.write(1);
    std::vector<std::uint64_t> counts;
    for (int i = 0; i < 30; ++i) {
      const RequestId request = rig->prefetch_object(address, k64K);
      counts.push_back(rig->counts().failed_reads * 10'000 + rig->counts().corrupted_reads * 100 +
                       rig->counts().delayed_reads);
      rig->prefetch_release(request);
    }
    return counts;
  };
  CHECK(faults(1) == faults(1));
  CHECK(faults(1) != faults(2));
}

}  // namespace
}  // namespace hymcache
