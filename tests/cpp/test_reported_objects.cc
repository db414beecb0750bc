// What becomes of an object that a reader reports as damaged.
#include <doctest/doctest.h>

#include <memory>
#include <vector>

#include "kv_manager/csrc/reported_objects.h"
#include "tests/cpp/store_fixture.h"

namespace hymcache::testing {
namespace {

constexpr std::uint32_t kBlock = 64 * kKiB;

class Reports {
 public:
  explicit Reports(const StoreOptions& options = {}) : store_(options) {
    store_.call([&] {
      reported_ = std::make_unique<ReportedObjects>(
          store_.device(), store_.directory(),
          [this](const Entry& entry) { dropped.push_back(entry); });
      store_.device().on_staged = [this](RequestId request) { reported_->on_staged(request); };
      store_.on_driven = [this] { reported_->pump(); };
    });
  }
  ~Reports() {
    store_.stop();
    reported_.reset();
  }
  Store& store() { return store_; }
  void report(const Entry& entry) {
    store_.call([&] { reported_->report(entry); });
  }
  void settle() {
    eventually([&] {
      const DeviceStats stats = store_.device_stats();
      return stats.reads_in_flight == 0 && stats.staging_used_bytes == 0;
    });
  }
  std::size_t dropped_count() {
    return store_.ask<std::size_t>([&] { return dropped.size(); });
  }

  std::vector<Entry> dropped;

 private:
  Store store_;
  std::unique_ptr<ReportedObjects> reported_;
};

TEST_CASE("reports: a good object is kept") {
  Reports reports;
  const Entry in_dram = reports.store().put(1, kBlock);
  reports.report(in_dram);
  reports.store().forget_dram();
  reports.report(in_dram);
  reports.settle();
  CHECK(reports.dropped_count() == 0);
  reports.store().call(
      [&] { CHECK(reports.store().directory().find_valid(in_dram.key) != nullptr); });
}

TEST_CASE("reports: an object that does not match its checksum is dropped, once") {
  Reports reports({.faults = {.corrupt_read = 1}});
  const Entry entry = reports.store().put(1, kBlock);
  reports.store().forget_dram();
  for (int i = 0; i < 3; ++i) reports.report(entry);
  reports.settle();
  CHECK(reports.dropped_count() == 1);
  reports.store().call([&] {
    CHECK(reports.store().directory().find(entry.key) == nullptr);
    CHECK(reports.store().gone.size() == 1);
    CHECK(reports.store().device().stats().live_bytes == 0);
  });
  reports.report(entry);  // stale by now
  CHECK(reports.dropped_count() == 1);
}

TEST_CASE("reports: a device that cannot read it says nothing about the object") {
  Reports reports({.faults = {.fail_read = 1}});
  const Entry entry = reports.store().put(1, kBlock);
  reports.store().forget_dram();
  reports.report(entry);
  reports.settle();
  CHECK(reports.dropped_count() == 0);
}

TEST_CASE("reports: without a checksum there is nothing to compare") {
  Reports reports({.faults = {.corrupt_read = 1}});
  Entry entry = reports.store().put(1, kBlock);
  reports.store().forget_dram();
  entry.flags = Entry::kValid;
  reports.report(entry);
  CHECK(reports.store().device_stats().staging_used_bytes == 0);
}

TEST_CASE("reports: a check waits for a slot; many wait, and not without end") {
  Reports reports({.faults = {.corrupt_read = 1}});
  std::vector<Entry> entries;
  for (std::uint64_t i = 0; i < 100; ++i) entries.push_back(reports.store().put(i, kBlock));
  reports.store().forget_dram();
  std::vector<RequestId> taken;
  reports.store().call([&] {
    RequestId request = 0;
    while ((request = reports.store().device().prefetch_object(entries[taken.size()].address,
                                                               kBlock)) != 0) {
      taken.push_back(request);
    }
  });
  REQUIRE(taken.size() == 16);
  for (std::size_t i = 16; i < 100; ++i) reports.report(entries[i]);
  eventually([&] { return reports.store().device_stats().reads_in_flight == 0; });
  CHECK(reports.dropped_count() == 0);
  reports.store().call([&] {
    for (const RequestId request : taken) reports.store().device().prefetch_release(request);
    ::eventfd_write(reports.store().device().event_fd(), 1);
  });
  eventually([&] { return reports.dropped_count() == 64; });
  reports.settle();
  CHECK(reports.dropped_count() == 64);  // the others are left to their next reader
}

}  // namespace
}  // namespace hymcache::testing
