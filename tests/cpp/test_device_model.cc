// Random use of the emulated device against a model that remembers every content: no wrong byte
// is ever read, no address is in two hands, and when all is released nothing is left.
#include <doctest/doctest.h>
#include <poll.h>

#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "chm_device/csrc/file_device.h"
#include "tests/cpp/device_fixture.h"

namespace hymcache {
namespace {

constexpr std::uint64_t kDataOffset = 1 << 20;  // where the address space starts in the file

struct Object {
  std::uint32_t length = 0;
  std::uint64_t seed = 0;
};

struct Write {
  std::uint64_t address = 0;
  Object object;
};

struct Reading {
  std::uint64_t address = 0;
  Object object;
  bool is_ready = false;
  StagedObject staged;
};

// What a client without a request may remember of a place in the region.
struct Memory {
  StagedObject staged;
  Object object;
};

class Run {
 public:
  Run(const FileDeviceOptions& options, std::uint64_t seed, bool has_faults)
      : options_(options),
        random_(seed),
        has_faults_(has_faults),
        device_(open_file_device(options)) {
    device_->on_staged = [this](RequestId request) {
      REQUIRE(readings_.count(request) == 1);
      REQUIRE_FALSE(readings_[request].is_ready);
      look(request);
    };
    device_->on_flush_failed = [this](std::uint64_t address, int) {
      REQUIRE(has_faults_);
      REQUIRE(objects_.erase(address) == 1);
      ++lost_;
    };
  }

  void step() {
    const std::uint64_t choice = random_() % 100;
    if (choice < 20) return reserve();
    if (choice < 40) return end_write();
    if (choice < 55) return prefetch();
    if (choice < 75) return release();
    if (choice < 76) return free_one();
    if (choice < 77) return random_() % 2 == 0 ? free_segment() : recall();
    if (choice < 85) return recall();
    pollfd event{device_->event_fd(), POLLIN, 0};
    if (random_() % 2 == 0) ::poll(&event, 1, 1);  // lets transfers end that were started
    device_->drive(random_() % 2 == 0);
    check_stats();
  }

  void finish() {
    while (!writes_.empty()) end_write();
    while (!readings_.empty()) release();
    REQUIRE(testing::drive_until(*device_, true, [this] {
      const DeviceStats stats = device_->stats();
      return stats.write_buffer_used_bytes == 0 && stats.reads_in_flight == 0;
    }));
    check_every_object();
    while (!objects_.empty()) free_one();
    const DeviceStats stats = device_->stats();
    CHECK(stats.live_bytes == 0);
    CHECK(stats.staging_used_bytes == 0);
    CHECK(stats.write_buffer_used_bytes == 0);
    CHECK(stats.writes_in_flight == 0);
    CHECK(stats.read_errors == 0);
    CHECK(stats.write_errors >= lost_);
    CHECK(stats.used_bytes <= options_.segment_bytes);
    // Nothing went by chance alone.
    CHECK(granted_ > 200);
    CHECK(ready_ > 200);
    CHECK(stats.reads > 20);
    CHECK(stats.resident_hits > 50);
    CHECK((lost_ > 0) == has_faults_);
  }

 private:
  std::uint8_t* at(std::uint64_t region_offset) const {
    return device_->region().base + region_offset;
  }

  std::uint64_t word(const StagedObject& staged) const {
    std::uint64_t value = 0;
    std::memcpy(&value, at(staged.generation_word), sizeof value);
    return value;
  }

  template <typename Map>
  typename Map::iterator any_of(Map& map) {
    return std::next(map.begin(), static_cast<std::ptrdiff_t>(random_() % map.size()));
  }

  static std::uint64_t padded(std::uint32_t length) { return (length + 4095ull) / 4096 * 4096; }

  void check_address_is_free(std::uint64_t address, std::uint32_t length) const {
    const auto overlaps = [&](std::uint64_t other, std::uint32_t other_length) {
      return address < other + padded(other_length) && other < address + padded(length);
    };
    for (const auto& [other, object] : objects_) REQUIRE_FALSE(overlaps(other, object.length));
    for (const auto& [id, write] : writes_) {
      REQUIRE_FALSE(overlaps(write.address, write.object.length));
    }
    for (const auto& [id, reading] : readings_) {
      REQUIRE_FALSE(overlaps(reading.address, reading.object.length));
    }
  }

  void reserve() {
    const auto length = static_cast<std::uint32_t>(1 + random_() % (random_() % 2 ? 8000 : 120000));
    const Reservation reservation = device_->reserve(length);
    if (reservation.status != ReserveStatus::kGranted) {
      REQUIRE(reservation.status != ReserveStatus::kTooLarge);
      return;
    }
    ++granted_;
    check_address_is_free(reservation.address, length);
    REQUIRE(reservation.region_offset >= device_->region().read_write_offset);
    REQUIRE(reservation.region_offset + length <= device_->region().bytes);
    const Object object{length, ++contents_};
    testing::fill(at(reservation.region_offset), object.seed, length);
    REQUIRE(writes_.emplace(reservation.write, Write{reservation.address, object}).second);
  }

  void end_write() {
    if (writes_.empty()) return;
    const auto write = any_of(writes_);
    if (random_() % 5 == 0) {
      device_->abort(write->first);
    } else {
      device_->commit(write->first);
      objects_[write->second.address] = write->second.object;
    }
    writes_.erase(write);
  }

  void prefetch() {
    if (objects_.empty()) return;
    const auto [address, object] = *any_of(objects_);
    const RequestId request = device_->prefetch_object(address, object.length);
    if (request == 0) return;
    REQUIRE(readings_.emplace(request, Reading{address, object, false, {}}).second);
    StagedObject ignored;
    if (device_->prefetch_poll(request, &ignored) != PrefetchState::kPending) look(request);
  }

  // A request came to its end: the right bytes, under a word that says so.
  void look(RequestId request) {
    Reading& reading = readings_[request];
    REQUIRE(device_->prefetch_poll(request, &reading.staged) == PrefetchState::kReady);
    reading.is_ready = true;
    ++ready_;
    check(reading);
  }

  void check(const Reading& reading) const {
    REQUIRE(word(reading.staged) == reading.staged.generation_value);
    REQUIRE(testing::holds(at(reading.staged.region_offset), reading.object.seed,
                           reading.object.length));
  }

  void release() {
    if (readings_.empty()) return;
    const auto reading = any_of(readings_);
    if (reading->second.is_ready) {
      check(reading->second);
      memories_.push_back({reading->second.staged, reading->second.object});
    }
    device_->prefetch_release(reading->first);
    readings_.erase(reading);
  }

  void free_one() {
    if (objects_.empty()) return;
    const auto object = any_of(objects_);
    device_->free(object->first, object->second.length);
    objects_.erase(object);
  }

  // As eviction does.
  void free_segment() {
    if (objects_.empty()) return;
    const std::uint64_t segment = any_of(objects_)->first / options_.segment_bytes;
    for (auto object = objects_.begin(); object != objects_.end();) {
      if (object->first / options_.segment_bytes != segment) {
        ++object;
        continue;
      }
      device_->free(object->first, object->second.length);
      object = objects_.erase(object);
    }
  }

  // A word that has not changed vouches for the bytes.
  void recall() {
    if (memories_.empty()) return;
    std::swap(memories_[random_() % memories_.size()], memories_.back());
    const Memory& memory = memories_.back();
    if (word(memory.staged) == memory.staged.generation_value) {
      REQUIRE(testing::holds(at(memory.staged.region_offset), memory.object.seed,
                             memory.object.length));
    } else {
      memories_.pop_back();
    }
  }

  void check_every_object() {
    for (const auto& [address, object] : objects_) {
      const RequestId request = device_->prefetch_object(address, object.length);
      REQUIRE(request != 0);
      readings_[request] = {address, object, false, {}};
      StagedObject ignored;
      const auto is_over = [&] {
        return device_->prefetch_poll(request, &ignored) != PrefetchState::kPending;
      };
      REQUIRE(testing::drive_until(*device_, false, is_over));
      if (!readings_[request].is_ready) look(request);
      device_->prefetch_release(request);
      readings_.erase(request);
    }
  }

  void check_stats() const {
    const DeviceStats stats = device_->stats();
    std::uint64_t live_bytes = 0;
    for (const auto& [address, object] : objects_) live_bytes += padded(object.length);
    REQUIRE(stats.live_bytes >= live_bytes);
    REQUIRE(stats.used_bytes >= stats.live_bytes);
    REQUIRE(stats.used_bytes <= stats.capacity_bytes);
    REQUIRE(stats.staging_used_bytes <= stats.staging_bytes);
    REQUIRE(stats.write_buffer_used_bytes <= stats.write_buffer_bytes);
    REQUIRE(stats.reads_in_flight * 4096ull <= stats.staging_bytes);
  }

  const FileDeviceOptions options_;
  std::mt19937_64 random_;
  const bool has_faults_;
  std::unique_ptr<Device> device_;
  std::map<std::uint64_t, Object> objects_;  // committed, by address
  std::map<WriteId, Write> writes_;
  std::map<RequestId, Reading> readings_;
  std::vector<Memory> memories_;
  std::uint64_t contents_ = 0, granted_ = 0, ready_ = 0, lost_ = 0;
};

void run(const std::string& parent, const std::string& io, bool has_faults) {
  const std::uint64_t seed = testing::test_seed();
  CAPTURE(parent);
  CAPTURE(io);
  CAPTURE(has_faults);
  CAPTURE(seed);
  const testing::ScratchFolder folder(parent);
  FileDeviceOptions options;
  options.path = folder.file("device");
  options.capacity_bytes = 4 << 20;
  options.staging_bytes = 300 << 10;
  options.write_buffer_bytes = 200 << 10;
  options.segment_bytes = 256 << 10;
  options.io = io;
  options.io_depth = 6;
  Run random_run(options, seed, has_faults);
  {
    // As a disk that is full by three quarters of the address space.
    std::optional<testing::FileSizeLimit> limit;
    if (has_faults) limit.emplace(kDataOffset + options.capacity_bytes / 4 * 3);
    for (int step = 0; step < 6000; ++step) random_run.step();
  }
  random_run.finish();
}

TEST_CASE("device: random use agrees with a model") {
  for (const std::string& parent : testing::scratch_parents()) {
    for (const bool has_faults : {false, true}) {
      run(parent, "threads", has_faults);
      run(parent, "auto", has_faults);
    }
  }
}

}  // namespace
}  // namespace hymcache
