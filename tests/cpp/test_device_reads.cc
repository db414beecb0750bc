// What a device reads: into its window, once for all who ask, and for as long as they hold it.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "tests/cpp/device_rig.h"

namespace hymcache {
namespace {

using testing::DeviceRig;
using testing::drive_until;
using testing::fill;
using testing::holds;
using testing::io_kinds;
using testing::StoredObject;

constexpr std::uint32_t k64K = 64 << 10;
constexpr std::uint32_t k512K = DeviceRig::kBufferBytes;

TEST_CASE("device: what was written is read: from the buffer, from the file, from the window") {
  for (const std::string& parent : testing::scratch_parents()) {
    for (const std::string& io : io_kinds()) {
      CAPTURE(parent);
      CAPTURE(io);
      DeviceRig rig(parent, io);
      std::uint64_t seed = 1;
      for (const std::uint32_t length : {1u, 4095u, 4096u, 4097u, k64K, 300'001u, k512K}) {
        CAPTURE(length);
        const StoredObject object = rig.write(length, ++seed);
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
  DeviceRig rig;
  const StoredObject object = rig.write_out(k64K, 1);
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
  for (const std::string& io : io_kinds()) {
    CAPTURE(io);
    DeviceRig rig("", io);
    const StoredObject object = rig.write_out(k64K, 1);
    rig->prefetch_release(rig.prefetch(object));
    CHECK(rig->stats().reads_in_flight == 0);
    CHECK(rig->stats().staging_used_bytes == 0);

    const RequestId request = rig.prefetch(object);
    rig->drive(false);
    rig->prefetch_release(request);
    const auto is_read = [&] { return rig->stats().reads_in_flight == 0; };
    REQUIRE(drive_until(*rig, false, is_read));
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
    DeviceRig rig;
    const StoredObject object = rig.write_out(k64K, 1);
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

TEST_CASE("device: a full staging window gives no request, and has room after a release") {
  DeviceRig rig;
  std::vector<StoredObject> objects;
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
  DeviceRig rig;
  std::vector<StoredObject> objects;
  for (std::uint64_t i = 0; i < 3; ++i) objects.push_back(rig.write_out(k512K, i));
  for (const StoredObject& object : objects) rig.check_read(object);
  const std::uint64_t reads = rig->stats().reads;
  rig.check_read(objects[1]);
  rig.check_read(objects[2]);
  CHECK(rig->stats().reads == reads);
  rig.check_read(objects[0]);
  CHECK(rig->stats().reads == reads + 1);
}

TEST_CASE("device: the generation word changes before the bytes do, and not while they stay") {
  DeviceRig rig;
  std::vector<StoredObject> objects;
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

TEST_CASE("device: an object freed while it is read, waited for or not") {
  for (const bool is_released : {false, true}) {
    for (const bool is_started : {false, true}) {
      DeviceRig rig;
      const StoredObject object = rig.write_out(k64K, 1);
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
      REQUIRE(drive_until(*rig, false, is_idle));
      CHECK(rig->stats().live_bytes == 0);
      CHECK(rig->stats().staging_used_bytes == 0);
    }
  }
}

TEST_CASE("device: a read that fails is told, and the next request tries again") {
  for (const std::string& io : io_kinds()) {
    CAPTURE(io);
    DeviceRig rig("", io);
    const StoredObject object = rig.write_out(k64K, 1);
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

TEST_CASE("device: callbacks may use the device: a window that moves on by itself") {
  for (const std::string& io : io_kinds()) {
    CAPTURE(io);
    DeviceRig rig("", io);
    std::vector<StoredObject> objects;
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
      const StoredObject& object = objects[of_request.at(request)];
      CHECK(holds(rig.at(staged.region_offset), object.seed, object.length));
      rig->prefetch_release(request);
      rig->free(object.address, object.length);
      ++read;
      issue();
    };
    for (int i = 0; i < 4; ++i) issue();
    const auto is_done = [&] { return read == objects.size(); };
    REQUIRE(drive_until(*rig, false, is_done));
    CHECK(rig->stats().live_bytes == 0);
  }
}

TEST_CASE("device: a callback may release others that are about to be called back") {
  DeviceRig rig;
  const StoredObject object = rig.write_out(k64K, 1);
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
  REQUIRE(drive_until(*rig, false, [&] { return calls > 0; }));
  rig->drive(false);
  CHECK(calls == 1);
  for (const RequestId request : again) rig->prefetch_release(request);
  CHECK(rig->stats().staging_used_bytes == 0);
}

TEST_CASE("device: no completion is missed, many times over") {
  for (const std::string& parent : testing::scratch_parents()) {
    for (const std::string& io : io_kinds()) {
      CAPTURE(parent);
      CAPTURE(io);
      DeviceRig rig(parent, io);
      for (std::uint64_t seed = 1; seed <= 40; ++seed) {
        CAPTURE(seed);
        rig.check_read(rig.write_out(4096, seed));
      }
    }
  }
}

}  // namespace
}  // namespace hymcache
