// The emulated device as its owner sees it: both I/O engines, on disk and in memory.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "chm_device/csrc/file_device.h"
#include "hymcache/csrc/error.h"
#include "tests/cpp/device_fixture.h"

namespace hymcache {
namespace {

using testing::drive_until;
using testing::fill;
using testing::holds;

constexpr std::uint32_t k64K = 64 << 10;
constexpr std::uint32_t k512K = 512 << 10;

struct Object {
  std::uint64_t address = 0;
  std::uint32_t length = 0;
  std::uint64_t seed = 0;
};

class Rig {
 public:
  explicit Rig(const std::string& parent = "", const std::string& io = "auto") : folder_(parent) {
    options.path = folder_.file("device");
    options.capacity_bytes = 64 << 20;
    options.staging_bytes = 1 << 20;
    options.write_buffer_bytes = k512K;
    options.segment_bytes = k512K;
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
  void close() { device_.reset(); }
  Device* operator->() const { return device_.get(); }
  std::uint8_t* at(std::uint64_t region_offset) const {
    return device_->region().base + region_offset;
  }

  // Committed, not flushed.
  Object write(std::uint32_t length, std::uint64_t seed) {
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
  Object write_out(std::uint32_t length, std::uint64_t seed) {
    const Object object = write(length, seed);
    flush();
    device_->abort(device_->reserve(k512K).write);
    return object;
  }

  RequestId prefetch(const Object& object) {
    return device_->prefetch_object(object.address, object.length);
  }
  PrefetchState wait(RequestId request, StagedObject* staged_object) {
    const auto is_over = [&] {
      return device_->prefetch_poll(request, staged_object) != PrefetchState::kPending;
    };
    REQUIRE(drive_until(*device_, false, is_over));
    return device_->prefetch_poll(request, staged_object);
  }

  void check_read(const Object& object) {
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
  testing::ScratchFolder folder_;
  std::unique_ptr<Device> device_;
};

bool has_io_uring() {
  static const bool has = Rig()->description().find("io_uring") != std::string::npos;
  return has;
}

std::vector<std::string> engines() {
  return has_io_uring() ? std::vector<std::string>{"io_uring", "threads"}
                        : std::vector<std::string>{"threads"};
}

TEST_CASE("device: what was written is read: from the buffer, from the file, from the window") {
  for (const std::string& parent : testing::scratch_parents()) {
    for (const std::string& io : engines()) {
      CAPTURE(parent);
      CAPTURE(io);
      Rig rig(parent, io);
      std::uint64_t seed = 1;
      for (const std::uint32_t length : {1u, 4095u, 4096u, 4097u, k64K, 300'001u, k512K}) {
        CAPTURE(length);
        const Object object = rig.write(length, ++seed);
        rig.check_read(object);
        rig.flush();
        rig.check_read(object);
        CHECK(rig->stats().resident_hits == 2);
        rig->abort(rig->reserve(k512K).write);
        rig.check_read(object);
        CHECK(rig->stats().resident_hits == 2);
        rig.check_read(object);
        CHECK(rig->stats().resident_hits == 3);
        CHECK(rig->stats().reads == 1);
        CHECK(rig->stats().read_bytes == length);
        CHECK(rig->stats().written_bytes == length);
        rig.open();
      }
    }
  }
}

TEST_CASE("device: a pending prefetch is called back once, one ready at once is not") {
  Rig rig;
  const Object object = rig.write_out(k64K, 1);
  const RequestId first = rig.prefetch(object);
  const RequestId second = rig.prefetch(object);
  REQUIRE(first != second);
  StagedObject staged;
  CHECK(rig->prefetch_poll(first, &staged) == PrefetchState::kPending);
  CHECK(rig->stats().reads_in_flight == 1);
  StagedObject other;
  CHECK(rig.wait(first, &staged) == PrefetchState::kReady);
  CHECK(rig->prefetch_poll(second, &other) == PrefetchState::kReady);
  CHECK(staged.region_offset == other.region_offset);
  CHECK(std::set(rig.staged.begin(), rig.staged.end()) == std::set{first, second});
  CHECK(rig.staged.size() == 2);
  const RequestId third = rig.prefetch(object);
  CHECK(rig->prefetch_poll(third, &staged) == PrefetchState::kReady);
  rig->drive(false);
  CHECK(rig.staged.size() == 2);
  CHECK(rig->stats().reads == 1);
  CHECK(rig->stats().staging_used_bytes == k64K);
  for (const RequestId request : {first, second, third}) rig->prefetch_release(request);
  CHECK(rig->stats().staging_used_bytes == 0);
}

TEST_CASE("device: a request may be released before its read, during it and after") {
  for (const std::string& io : engines()) {
    CAPTURE(io);
    Rig rig("", io);
    const Object object = rig.write_out(k64K, 1);
    rig->prefetch_release(rig.prefetch(object));
    CHECK(rig->stats().reads_in_flight == 0);
    CHECK(rig->stats().staging_used_bytes == 0);

    const RequestId request = rig.prefetch(object);
    rig->drive(false);
    rig->prefetch_release(request);
    const auto is_read = [&] { return rig->stats().reads_in_flight == 0; };
    REQUIRE(drive_until(*rig.operator->(), false, is_read));
    CHECK(rig.staged.empty());
    CHECK(rig->stats().staging_used_bytes == 0);
    // It came all the same, and is still there.
    rig.check_read(object);
    CHECK(rig->stats().resident_hits == 1);
  }
}

TEST_CASE("device: every request of a shared read may go in any order") {
  for (const int order : {0, 1, 2}) {
    CAPTURE(order);
    Rig rig;
    const Object object = rig.write_out(k64K, 1);
    std::vector<RequestId> requests;
    for (int i = 0; i < 3; ++i) requests.push_back(rig.prefetch(object));
    rig->prefetch_release(requests[static_cast<unsigned>(order)]);
    requests.erase(requests.begin() + order);
    StagedObject staged;
    CHECK(rig.wait(requests[0], &staged) == PrefetchState::kReady);
    CHECK(rig.staged.size() == 2);
    for (const RequestId request : requests) rig->prefetch_release(request);
  }
}

TEST_CASE("device: calls leave the event descriptor readable, drive() does not") {
  Rig rig;
  const auto is_readable = [&] {
    pollfd event{rig->event_fd(), POLLIN, 0};
    return ::poll(&event, 1, 0) == 1;
  };
  rig->drive(false);
  CHECK_FALSE(is_readable());
  const Object object = rig.write(k64K, 1);
  CHECK(is_readable());
  rig->drive(false);
  CHECK_FALSE(is_readable());
  CHECK(rig->stats().writes_in_flight == 0);
  rig.flush();
  rig->abort(rig->reserve(k512K).write);
  rig->drive(false);
  CHECK_FALSE(is_readable());
  rig->prefetch_release(rig.prefetch(object));
  CHECK(is_readable());
}

TEST_CASE("device: nothing is flushed before it may be") {
  Rig rig;
  rig.write(k64K, 1);
  for (int i = 0; i < 10; ++i) rig->drive(false);
  CHECK(rig->stats().writes == 0);
  CHECK(rig->stats().write_buffer_used_bytes == k64K);
  rig.flush();
  CHECK(rig->stats().writes == 1);
}

TEST_CASE("device: a full write buffer is an answer, and has room after a flush") {
  Rig rig;
  std::vector<Object> objects;
  for (std::uint64_t i = 0; i < 8; ++i) objects.push_back(rig.write(k64K, i));
  CHECK(rig->reserve(1).status == ReserveStatus::kBufferFull);
  CHECK(rig->stats().used_bytes == k512K);  // a refusal takes no address
  rig.flush();
  CHECK(rig->reserve(1).status == ReserveStatus::kGranted);
  for (const Object& object : objects) rig.check_read(object);
}

TEST_CASE("device: what a request pins in the write buffer stays there") {
  Rig rig;
  const Object object = rig.write(k512K, 1);
  const RequestId request = rig.prefetch(object);
  rig.flush();
  CHECK(rig->reserve(1).status == ReserveStatus::kBufferFull);
  StagedObject staged;
  REQUIRE(rig->prefetch_poll(request, &staged) == PrefetchState::kReady);
  CHECK(staged.region_offset >= rig->region().read_write_offset);
  CHECK(holds(rig.at(staged.region_offset), 1, k512K));
  rig->prefetch_release(request);
  CHECK(rig->reserve(1).status == ReserveStatus::kGranted);
}

TEST_CASE("device: a full staging window gives no request, and has room after a release") {
  Rig rig;
  std::vector<Object> objects;
  for (std::uint64_t i = 0; i < 3; ++i) objects.push_back(rig.write_out(k512K, i));
  const RequestId first = rig.prefetch(objects[0]);
  const RequestId second = rig.prefetch(objects[1]);
  REQUIRE(first != 0);
  REQUIRE(second != 0);
  CHECK(rig.prefetch(objects[2]) == 0);
  CHECK(rig->stats().staging_used_bytes == 1 << 20);
  StagedObject staged;
  CHECK(rig.wait(first, &staged) == PrefetchState::kReady);
  CHECK(rig.wait(second, &staged) == PrefetchState::kReady);
  CHECK(rig.prefetch(objects[2]) == 0);
  rig->prefetch_release(first);
  const RequestId third = rig.prefetch(objects[2]);
  REQUIRE(third != 0);
  CHECK(rig.wait(third, &staged) == PrefetchState::kReady);
  CHECK(holds(rig.at(staged.region_offset), 2, k512K));
  rig->prefetch_release(second);
  rig->prefetch_release(third);
}

TEST_CASE("device: idle slots give way first come, first gone") {
  Rig rig;
  std::vector<Object> objects;
  for (std::uint64_t i = 0; i < 3; ++i) objects.push_back(rig.write_out(k512K, i));
  for (const Object& object : objects) rig.check_read(object);
  const std::uint64_t reads = rig->stats().reads;
  rig.check_read(objects[1]);
  rig.check_read(objects[2]);
  CHECK(rig->stats().reads == reads);
  rig.check_read(objects[0]);
  CHECK(rig->stats().reads == reads + 1);
}

TEST_CASE("device: a full device is an answer, and whole segments come back") {
  Rig rig;
  rig.options.capacity_bytes = 4 << 20;
  rig.open();
  std::vector<Object> objects;
  for (std::uint64_t i = 0; i < 16; ++i) {
    objects.push_back(rig.write(k512K / 2, i));
    rig.flush();
  }
  CHECK(rig->reserve(1).status == ReserveStatus::kDeviceFull);
  CHECK(rig->stats().used_bytes == rig->stats().capacity_bytes);
  rig->free(objects[0].address, objects[0].length);
  CHECK(rig->reserve(1).status == ReserveStatus::kDeviceFull);
  rig->free(objects[1].address, objects[1].length);
  const Reservation reservation = rig->reserve(k512K / 2);
  CHECK(reservation.status == ReserveStatus::kGranted);
  CHECK(reservation.address == objects[0].address);
  rig->abort(reservation.write);
  CHECK(rig->stats().live_bytes == 14 * (k512K / 2));
  for (std::size_t i = 2; i < objects.size(); ++i) rig.check_read(objects[i]);
}

TEST_CASE("device: an aborted write gives its room and its address back") {
  Rig rig;
  for (int i = 0; i < 100; ++i) {
    const Reservation reservation = rig->reserve(k512K);
    REQUIRE(reservation.status == ReserveStatus::kGranted);
    rig->abort(reservation.write);
  }
  CHECK(rig->stats().live_bytes == 0);
  CHECK(rig->stats().write_buffer_used_bytes == 0);
}

TEST_CASE("device: sizes that could never fit are told from those that do not fit now") {
  Rig rig;
  CHECK(rig->reserve(0).status == ReserveStatus::kTooLarge);
  CHECK(rig->reserve(k512K + 1).status == ReserveStatus::kTooLarge);
  CHECK(rig->reserve(~0u).status == ReserveStatus::kTooLarge);
  CHECK(rig->reserve(k512K).status == ReserveStatus::kGranted);
}

TEST_CASE("device: the generation word changes before the bytes do, and not while they stay") {
  Rig rig;
  std::vector<Object> objects;
  for (std::uint64_t i = 0; i < 3; ++i) objects.push_back(rig.write_out(k512K, i));
  const RequestId request = rig.prefetch(objects[0]);
  StagedObject staged;
  REQUIRE(rig.wait(request, &staged) == PrefetchState::kReady);
  CHECK(staged.generation_word % sizeof(std::uint64_t) == 0);
  CHECK(rig.word(staged.generation_word) == staged.generation_value);
  rig->prefetch_release(request);
  CHECK(rig.word(staged.generation_word) == staged.generation_value);
  rig.check_read(objects[1]);
  CHECK(rig.word(staged.generation_word) == staged.generation_value);
  CHECK(holds(rig.at(staged.region_offset), 0, k512K));
  // The next takes its place; nothing was read yet.
  const RequestId next = rig.prefetch(objects[2]);
  CHECK(rig.word(staged.generation_word) != staged.generation_value);
  CHECK(holds(rig.at(staged.region_offset), 0, k512K));
  rig->prefetch_release(next);
}

TEST_CASE("device: an object freed while dirty is never written") {
  Rig rig;
  const Object object = rig.write(k64K, 1);
  rig->free(object.address, object.length);
  CHECK(rig->stats().write_buffer_used_bytes == 0);
  CHECK(rig->stats().live_bytes == 0);
  rig->drive(true);
  CHECK(rig->stats().writes_in_flight == 0);
  CHECK(rig->stats().writes == 0);
}

TEST_CASE("device: an address that a flush still writes to is not given out again") {
  for (const std::string& io : engines()) {
    CAPTURE(io);
    Rig rig("", io);
    rig.options.capacity_bytes = k512K;
    rig.options.write_buffer_bytes = 1 << 20;
    rig.open();
    const Object object = rig.write(k512K, 1);
    rig->drive(true);
    REQUIRE(rig->stats().writes_in_flight == 1);
    rig->free(object.address, object.length);
    CHECK(rig->reserve(1).status == ReserveStatus::kDeviceFull);
    rig.flush();
    const Reservation reservation = rig->reserve(k512K);
    CHECK(reservation.status == ReserveStatus::kGranted);
    CHECK(reservation.address == object.address);
    CHECK(rig.lost.empty());
  }
}

TEST_CASE("device: bytes of a freed object stay for those who pin them, and so does the address") {
  for (const bool is_flushed : {false, true}) {
    CAPTURE(is_flushed);
    Rig rig;
    rig.options.capacity_bytes = k512K;
    rig.options.write_buffer_bytes = 1 << 20;
    rig.open();
    const Object object = rig.write(k512K, 1);
    if (is_flushed) rig.flush();
    const RequestId request = rig.prefetch(object);
    StagedObject staged;
    REQUIRE(rig.wait(request, &staged) == PrefetchState::kReady);
    rig->free(object.address, object.length);
    CHECK(rig->reserve(1).status == ReserveStatus::kDeviceFull);
    CHECK(holds(rig.at(staged.region_offset), 1, k512K));
    CHECK(rig.word(staged.generation_word) == staged.generation_value);
    CHECK(rig->prefetch_poll(request, &staged) == PrefetchState::kReady);
    rig->prefetch_release(request);
    CHECK(rig.word(staged.generation_word) != staged.generation_value);
    CHECK(rig->stats().live_bytes == 0);
    CHECK(rig->reserve(1).status == ReserveStatus::kGranted);
  }
}

TEST_CASE("device: an object freed while it is read, waited for or not") {
  for (const bool is_released : {false, true}) {
    for (const bool is_started : {false, true}) {
      Rig rig;
      const Object object = rig.write_out(k64K, 1);
      const RequestId request = rig.prefetch(object);
      if (is_started) rig->drive(false);
      rig->free(object.address, object.length);
      StagedObject staged;
      if (is_released) {
        rig->prefetch_release(request);
      } else {
        CHECK(rig.wait(request, &staged) == PrefetchState::kReady);
        CHECK(holds(rig.at(staged.region_offset), 1, k64K));
        rig->prefetch_release(request);
      }
      const auto is_idle = [&] { return rig->stats().reads_in_flight == 0; };
      REQUIRE(drive_until(*rig.operator->(), false, is_idle));
      CHECK(rig->stats().live_bytes == 0);
      CHECK(rig->stats().staging_used_bytes == 0);
    }
  }
}

TEST_CASE("device: a read that fails is told, and the next request tries again") {
  for (const std::string& io : engines()) {
    CAPTURE(io);
    Rig rig("", io);
    const Object object = rig.write_out(k64K, 1);
    const auto size = std::filesystem::file_size(rig.options.path);
    const std::string copy = rig.options.path + ".copy";
    std::filesystem::copy_file(rig.options.path, copy);
    std::filesystem::resize_file(rig.options.path, (1 << 20) + 4096);
    const RequestId request = rig.prefetch(object);
    StagedObject staged;
    CHECK(rig.wait(request, &staged) == PrefetchState::kFailed);
    CHECK(rig.staged == std::vector{request});
    CHECK(rig->stats().read_errors == 1);
    CHECK(rig->stats().live_bytes == k64K);

    // The bytes come back: into the same file, since the device holds it open.
    std::filesystem::resize_file(rig.options.path, size);
    const int fd = ::open(rig.options.path.c_str(), O_WRONLY);
    std::vector<std::uint8_t> bytes(k64K);
    fill(bytes.data(), 1, k64K);
    CHECK(::pwrite(fd, bytes.data(), k64K, 1 << 20) == k64K);
    ::fsync(fd);
    ::close(fd);
    rig.check_read(object);
    CHECK(rig->prefetch_poll(request, &staged) == PrefetchState::kFailed);
    rig->prefetch_release(request);
    rig->free(object.address, object.length);
    CHECK(rig->stats().live_bytes == 0);
    CHECK(rig->stats().staging_used_bytes == 0);
  }
}

TEST_CASE("device: a flush that fails loses the object, once, and its address is free") {
  for (const std::string& io : engines()) {
    CAPTURE(io);
    Rig rig("", io);
    const Object good = rig.write(k64K, 1);
    const Object bad = rig.write(k64K, 2);
    const RequestId request = rig.prefetch(bad);
    {
      // The second object is cut in its middle: a part is written, the rest is not.
      const testing::FileSizeLimit limit((1 << 20) + k64K + k64K / 2);
      rig.flush();
    }
    REQUIRE(rig.lost.size() == 1);
    CHECK(rig.lost[0] == std::pair<std::uint64_t, int>{bad.address, EFBIG});
    CHECK(rig->stats().writes == 1);
    CHECK(rig->stats().write_errors == 1);
    // Those who pin it keep it.
    StagedObject staged;
    REQUIRE(rig->prefetch_poll(request, &staged) == PrefetchState::kReady);
    CHECK(holds(rig.at(staged.region_offset), 2, k64K));
    CHECK(rig->stats().live_bytes == 2 * k64K);
    rig->prefetch_release(request);
    CHECK(rig->stats().live_bytes == k64K);
    rig.check_read(good);
  }
}

TEST_CASE("device: an object freed while its flush fails is not reported as lost") {
  Rig rig;
  const Object object = rig.write(k64K, 1);
  {
    const testing::FileSizeLimit limit(1 << 20);
    rig->drive(true);
    REQUIRE(rig->stats().writes_in_flight == 1);
    rig->free(object.address, object.length);
    rig.flush();
  }
  CHECK(rig.lost.empty());
  CHECK(rig->stats().live_bytes == 0);
}

TEST_CASE("device: callbacks may use the device: a window that moves on by itself") {
  for (const std::string& io : engines()) {
    CAPTURE(io);
    Rig rig("", io);
    std::vector<Object> objects;
    for (std::uint64_t i = 0; i < 30; ++i) objects.push_back(rig.write_out(k64K + 1, i));
    std::size_t next = 0;
    std::size_t read = 0;
    std::vector<std::size_t> of_request(100);
    const auto issue = [&] {
      if (next == objects.size()) return;
      const RequestId request = rig.prefetch(objects[next]);
      REQUIRE(request != 0);
      of_request.at(request) = next++;
    };
    rig->on_staged = [&](RequestId request) {
      StagedObject staged;
      REQUIRE(rig->prefetch_poll(request, &staged) == PrefetchState::kReady);
      const Object& object = objects[of_request.at(request)];
      CHECK(holds(rig.at(staged.region_offset), object.seed, object.length));
      rig->prefetch_release(request);
      rig->free(object.address, object.length);
      ++read;
      issue();
    };
    for (int i = 0; i < 4; ++i) issue();
    const auto is_done = [&] { return read == objects.size(); };
    REQUIRE(drive_until(*rig.operator->(), false, is_done));
    CHECK(rig->stats().live_bytes == 0);
  }
}

TEST_CASE("device: a callback may release others that are about to be called back") {
  Rig rig;
  const Object object = rig.write_out(k64K, 1);
  std::vector<RequestId> requests;
  for (int i = 0; i < 4; ++i) requests.push_back(rig.prefetch(object));
  int calls = 0;
  std::vector<RequestId> again;
  rig->on_staged = [&](RequestId) {
    ++calls;
    for (const RequestId request : std::exchange(requests, {})) rig->prefetch_release(request);
    // The same numbers, for requests that are ready at once.
    for (int i = 0; i < 4 && calls == 1; ++i) again.push_back(rig.prefetch(object));
  };
  REQUIRE(drive_until(*rig.operator->(), false, [&] { return calls > 0; }));
  rig->drive(false);
  CHECK(calls == 1);
  for (const RequestId request : again) rig->prefetch_release(request);
  CHECK(rig->stats().staging_used_bytes == 0);
}

TEST_CASE("device: misuse is an error of the caller") {
  Rig rig;
  StagedObject staged;
  CHECK_THROWS_AS(rig->prefetch_poll(1, &staged), std::logic_error);
  CHECK_THROWS_AS(rig->prefetch_release(0), std::logic_error);
  CHECK_THROWS_AS(rig->commit(1), std::logic_error);
  CHECK_THROWS_AS(rig->abort(7), std::logic_error);
  CHECK_THROWS_AS(rig->prefetch_object(0, 4096), std::logic_error);
  CHECK_THROWS_AS(rig->free(0, 4096), std::logic_error);
  const Object object = rig.write(k64K, 1);
  CHECK_THROWS_AS(rig->prefetch_object(object.address, 4096), std::logic_error);
  CHECK_THROWS_AS(rig->prefetch_object(object.address + 1, 4096), std::logic_error);
  CHECK_THROWS_AS(rig->free(object.address, k64K - 1), std::logic_error);
  const Reservation reservation = rig->reserve(k64K);
  CHECK_THROWS_AS(rig->prefetch_object(reservation.address, k64K), std::logic_error);
  CHECK_THROWS_AS(rig->free(reservation.address, k64K), std::logic_error);
  rig.check_read(object);
}

TEST_CASE("device: clients of the host map the region") {
  Rig rig;
  const DeviceRegion& region = rig->region();
  CHECK(region.read_write_offset % (2 << 20) == 0);
  CHECK((::fcntl(region.fd, F_GETFD) & FD_CLOEXEC) != 0);
  CHECK((::fcntl(region.fd, F_GET_SEALS) & (F_SEAL_SHRINK | F_SEAL_GROW)) ==
        (F_SEAL_SHRINK | F_SEAL_GROW));
  auto* client = static_cast<std::uint8_t*>(
      ::mmap(nullptr, region.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, region.fd, 0));
  REQUIRE(client != MAP_FAILED);
  const Reservation reservation = rig->reserve(k64K);
  CHECK(reservation.region_offset >= region.read_write_offset);
  CHECK(reservation.region_offset % 4096 == 0);
  fill(client + reservation.region_offset, 9, k64K);
  rig->commit(reservation.write);
  rig.flush();
  rig->abort(rig->reserve(k512K).write);
  const RequestId request = rig->prefetch_object(reservation.address, k64K);
  StagedObject staged;
  REQUIRE(rig.wait(request, &staged) == PrefetchState::kReady);
  CHECK(staged.region_offset + k64K <= region.read_write_offset);
  CHECK(holds(client + staged.region_offset, 9, k64K));
  ::munmap(client, region.bytes);
}

TEST_CASE("device: it can go in the middle of I/O, and its file be opened at once") {
  for (const std::string& io : engines()) {
    CAPTURE(io);
    Rig rig("", io);
    for (int i = 0; i < 5; ++i) {
      const Object object = rig.write_out(k512K, 1);
      rig.write(k64K, 2);
      rig->reserve(k64K);
      rig.prefetch(object);
      rig->drive(true);
      rig.open();
      CHECK(rig->stats().used_bytes == 0);
    }
  }
}

TEST_CASE("device: depth 1 still reads and writes") {
  for (const std::string& io : engines()) {
    CAPTURE(io);
    Rig rig("", io);
    rig.options.io_depth = 1;
    rig.open();
    std::vector<Object> objects;
    for (std::uint64_t i = 0; i < 8; ++i) objects.push_back(rig.write(k64K, i));
    rig.flush();
    for (const Object& object : objects) rig.check_read(object);
  }
}

TEST_CASE("device: it says what it is") {
  Rig rig("", "threads");
  const std::string text = rig->description();
  CHECK(text.find("file " + rig.options.path) == 0);
  CHECK(text.find("64 MiB in segments of 512 KiB, threads, ") != std::string::npos);
  CHECK(text.find("depth 8") != std::string::npos);
}

std::string refusal(FileDeviceOptions options) {
  try {
    open_file_device(options);
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kConfig);
    CHECK_FALSE(std::filesystem::exists(options.path));
    return error.what();
  }
  return "was opened";
}

TEST_CASE("device: options that cannot be are refused by name") {
  const testing::ScratchFolder folder;
  FileDeviceOptions good;
  good.path = folder.file("device");
  good.capacity_bytes = 1 << 20;
  good.staging_bytes = 1 << 20;
  good.write_buffer_bytes = 1 << 20;
  const auto refused = [&](auto change) {
    FileDeviceOptions options = good;
    change(options);
    return refusal(options);
  };
  const auto starts = [](const std::string& text, const char* with) {
    return text.find(with) == 0;
  };
  using Options = FileDeviceOptions;
  CHECK(starts(refused([](Options& o) { o.capacity_bytes = 0; }), "device.capacity: 0 bytes"));
  CHECK(starts(refused([](Options& o) { o.staging_bytes = 4096; }), "device.staging: 4 KiB"));
  CHECK(starts(refused([](Options& o) { o.write_buffer_bytes = ~std::uint64_t{0}; }),
               "device.write_buffer: "));
  CHECK(starts(refused([](Options& o) { o.segment_bytes = 2 << 20; }), "device.segment: 2 MiB"));
  CHECK(starts(refused([](Options& o) { o.io = "aio"; }), "device.io: \"aio\""));
  CHECK(starts(refused([](Options& o) { o.io_depth = 0; }), "device.io_depth: 0"));
  CHECK(starts(refused([](Options& o) { o.io_depth = 1025; }), "device.io_depth: 1025"));
  CHECK(starts(refused([](Options& o) { o.staging_bytes = std::uint64_t{1} << 45; }),
               "device.staging, device.write_buffer: they take"));
  CHECK_NOTHROW(open_file_device(good));
}

}  // namespace
}  // namespace hymcache
