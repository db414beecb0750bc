// How a device is opened, what it shares with clients, and what it refuses.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>

#include <filesystem>
#include <string>
#include <vector>

#include "chm_device/csrc/file_device.h"
#include "hymcache/csrc/error.h"
#include "tests/cpp/device_rig.h"

namespace hymcache {
namespace {

using testing::DeviceRig;
using testing::fill;
using testing::holds;
using testing::io_kinds;
using testing::StoredObject;

constexpr std::uint32_t k64K = 64 << 10;
constexpr std::uint32_t k512K = DeviceRig::kBufferBytes;

TEST_CASE("device: calls leave the event descriptor readable, drive() does not") {
  DeviceRig rig;
  const auto is_readable = [&] {
    pollfd event{rig->event_fd(), POLLIN, 0};
    return ::poll(&event, 1, 0) == 1;
  };
  rig->drive(false);
  CHECK_FALSE(is_readable());
  const StoredObject object = rig.write(k64K, 1);
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

TEST_CASE("device: misuse is an error of the caller") {
  DeviceRig rig;
  StagedObject staged;
  CHECK_THROWS_AS(rig->prefetch_poll(1, &staged), std::logic_error);
  CHECK_THROWS_AS(rig->prefetch_release(0), std::logic_error);
  CHECK_THROWS_AS(rig->commit(1), std::logic_error);
  CHECK_THROWS_AS(rig->abort(7), std::logic_error);
  CHECK_THROWS_AS(rig->prefetch_object(0, 4096), std::logic_error);
  CHECK_THROWS_AS(rig->free(0, 4096), std::logic_error);
  const StoredObject object = rig.write(k64K, 1);
  CHECK_THROWS_AS(rig->prefetch_object(object.address, 4096), std::logic_error);
  CHECK_THROWS_AS(rig->prefetch_object(object.address + 1, 4096), std::logic_error);
  CHECK_THROWS_AS(rig->free(object.address, k64K - 1), std::logic_error);
  const Reservation reservation = rig->reserve(k64K);
  CHECK_THROWS_AS(rig->prefetch_object(reservation.address, k64K), std::logic_error);
  CHECK_THROWS_AS(rig->free(reservation.address, k64K), std::logic_error);
  rig.check_read(object);
}

TEST_CASE("device: clients of the host map the region") {
  DeviceRig rig;
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
  for (const std::string& io : io_kinds()) {
    CAPTURE(io);
    DeviceRig rig("", io);
    for (int i = 0; i < 5; ++i) {
      const StoredObject object = rig.write_out(k512K, 1);
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
  for (const std::string& io : io_kinds()) {
    CAPTURE(io);
    DeviceRig rig("", io);
    rig.options.io_depth = 1;
    rig.open();
    std::vector<StoredObject> objects;
    for (std::uint64_t i = 0; i < 8; ++i) objects.push_back(rig.write(k64K, i));
    rig.flush();
    for (const StoredObject& object : objects) rig.check_read(object);
  }
}

TEST_CASE("device: it says what it is") {
  DeviceRig rig("", "threads");
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
