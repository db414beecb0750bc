// What a device writes: from its buffer, when it may, to addresses that are nobody else's.
#include <doctest/doctest.h>

#include <cerrno>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/device_rig.h"

namespace hymcache {
namespace {

using testing::DeviceRig;
using testing::holds;
using testing::io_kinds;
using testing::StoredObject;

constexpr std::uint32_t k64K = 64 << 10;
constexpr std::uint32_t k512K = DeviceRig::kBufferBytes;

TEST_CASE("device: nothing is flushed before it may be") {
  DeviceRig rig;
  rig.write(k64K, 1);
  for (int i = 0; i < 10; ++i) rig->drive(false);
  CHECK(rig->stats().writes == 0);
  CHECK(rig->stats().write_buffer_used_bytes == k64K);
  rig.flush();
  CHECK(rig->stats().writes == 1);
}

TEST_CASE("device: a full write buffer is an answer, and has room after a flush") {
  DeviceRig rig;
  std::vector<StoredObject> objects;
  for (std::uint64_t i = 0; i < 8; ++i) objects.push_back(rig.write(k64K, i));
  CHECK(rig->reserve(1).status == ReserveStatus::kBufferFull);
  CHECK(rig->stats().used_bytes == k512K);  // a refusal takes no address
  rig.flush();
  CHECK(rig->reserve(1).status == ReserveStatus::kGranted);
  for (const StoredObject& object : objects) rig.check_read(object);
}

TEST_CASE("device: what a request pins in the write buffer stays there") {
  DeviceRig rig;
  const StoredObject object = rig.write(k512K, 1);
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

TEST_CASE("device: a full device is an answer, and whole segments come back") {
  DeviceRig rig;
  rig.options.capacity_bytes = 4 << 20;
  rig.open();
  std::vector<StoredObject> objects;
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
  DeviceRig rig;
  for (int i = 0; i < 100; ++i) {
    const Reservation reservation = rig->reserve(k512K);
    REQUIRE(reservation.status == ReserveStatus::kGranted);
    rig->abort(reservation.write);
  }
  CHECK(rig->stats().live_bytes == 0);
  CHECK(rig->stats().write_buffer_used_bytes == 0);
}

TEST_CASE("device: sizes that could never fit are told from those that do not fit now") {
  DeviceRig rig;
  CHECK(rig->reserve(0).status == ReserveStatus::kTooLarge);
  CHECK(rig->reserve(k512K + 1).status == ReserveStatus::kTooLarge);
  CHECK(rig->reserve(~0u).status == ReserveStatus::kTooLarge);
  CHECK(rig->reserve(k512K).status == ReserveStatus::kGranted);
}

TEST_CASE("device: an object freed while dirty is never written") {
  DeviceRig rig;
  const StoredObject object = rig.write(k64K, 1);
  rig->free(object.address, object.length);
  CHECK(rig->stats().write_buffer_used_bytes == 0);
  CHECK(rig->stats().live_bytes == 0);
  rig->drive(true);
  CHECK(rig->stats().writes_in_flight == 0);
  CHECK(rig->stats().writes == 0);
}

TEST_CASE("device: an address that a flush still writes to is not given out again") {
  for (const std::string& io : io_kinds()) {
    CAPTURE(io);
    DeviceRig rig("", io);
    rig.options.capacity_bytes = k512K;
    rig.options.write_buffer_bytes = 1 << 20;
    rig.open();
    const StoredObject object = rig.write(k512K, 1);
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
    DeviceRig rig;
    rig.options.capacity_bytes = k512K;
    rig.options.write_buffer_bytes = 1 << 20;
    rig.open();
    const StoredObject object = rig.write(k512K, 1);
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

TEST_CASE("device: a flush that fails loses the object, once, and its address is free") {
  for (const std::string& io : io_kinds()) {
    CAPTURE(io);
    DeviceRig rig("", io);
    const StoredObject good = rig.write(k64K, 1);
    const StoredObject bad = rig.write(k64K, 2);
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
  DeviceRig rig;
  const StoredObject object = rig.write(k64K, 1);
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

}  // namespace
}  // namespace hymcache
