// The emulated device as its owner drives it, for tests of what it does.
#pragma once

#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "chm_device/csrc/file_device.h"
#include "tests/cpp/device_fixture.h"

namespace hymcache::testing {

struct StoredObject {  // its content follows from the seed
  std::uint64_t address = 0;
  std::uint32_t length = 0;
  std::uint64_t seed = 0;
};

// A small device, what it called back, and the ways to put objects where a test wants them.
class DeviceRig {
 public:
  static constexpr std::uint32_t kBufferBytes = 512 << 10;  // and of a segment

  explicit DeviceRig(const std::string& parent = "", const std::string& io = "auto")
      : folder_(parent) {
    options.path = folder_.file("device");
    options.capacity_bytes = 64 << 20;
    options.staging_bytes = 1 << 20;
    options.write_buffer_bytes = kBufferBytes;
    options.segment_bytes = kBufferBytes;
    options.io = io;
    options.io_depth = 8;
    open();
  }

  void open() {
    device_.reset();
    device_ = open_file_device(options);
    device_->on_staged = [this](RequestId request) { staged.push_back(request); };
    device_->on_flush_failed = [this](std::uint64_t address, int error) {
      lost.emplace_back(address, error);
    };
  }
  Device* operator->() const { return device_.get(); }
  Device& operator*() const { return *device_; }
  std::uint8_t* at(std::uint64_t region_offset) const {
    return device_->region().base + region_offset;
  }

  // Committed, not flushed.
  StoredObject write(std::uint32_t length, std::uint64_t seed) {
    const Reservation reservation = device_->reserve(length);
    REQUIRE(reservation.status == ReserveStatus::kGranted);
    fill(at(reservation.region_offset), seed, length);
    device_->commit(reservation.write);
    return {reservation.address, length, seed};
  }

  void flush() {
    REQUIRE(
        drive_until(*device_, true, [&] { return device_->stats().write_buffer_used_bytes == 0; }));
  }

  // Flushed, and out of the write buffer: the next read is a read of the file.
  StoredObject write_out(std::uint32_t length, std::uint64_t seed) {
    const StoredObject object = write(length, seed);
    flush();
    device_->abort(device_->reserve(kBufferBytes).write);
    return object;
  }

  RequestId prefetch(const StoredObject& object) {
    return device_->prefetch_object(object.address, object.length);
  }
  PrefetchState wait(RequestId request, StagedObject* staged_object) {
    const auto is_over = [&] {
      return device_->prefetch_poll(request, staged_object) != PrefetchState::kPending;
    };
    REQUIRE(drive_until(*device_, false, is_over));
    return device_->prefetch_poll(request, staged_object);
  }

  void check_read(const StoredObject& object) {
    const RequestId request = prefetch(object);
    REQUIRE(request != 0);
    StagedObject at_place;
    REQUIRE(wait(request, &at_place) == PrefetchState::kReady);
    CHECK(holds(at(at_place.region_offset), object.seed, object.length));
    device_->prefetch_release(request);
  }

  std::uint64_t word(std::uint64_t offset) const {
    std::uint64_t value = 0;
    std::memcpy(&value, at(offset), sizeof value);
    return value;
  }

  FileDeviceOptions options;
  std::vector<RequestId> staged;
  std::vector<std::pair<std::uint64_t, int>> lost;

 private:
  ScratchFolder folder_;
  std::unique_ptr<Device> device_;
};

inline bool has_io_uring() {
  static const bool has = DeviceRig()->description().find("io_uring") != std::string::npos;
  return has;
}

// What to open a device with, to meet every I/O engine that works here.
inline std::vector<std::string> io_kinds() {
  return has_io_uring() ? std::vector<std::string>{"io_uring", "threads"}
                        : std::vector<std::string>{"threads"};
}

}  // namespace hymcache::testing
