#include "kv_manager/csrc/reported_objects.h"

#include <algorithm>

#include "transport/csrc/crc32c.h"

namespace hymcache {

ReportedObjects::ReportedObjects(Device& device, ObjectDirectory& directory, Dropped dropped)
    : device_(device), directory_(directory), dropped_(std::move(dropped)) {}

ReportedObjects::~ReportedObjects() {
  for (const Check& check : checks_) {
    if (check.request != 0) device_.prefetch_release(check.request);
  }
}

void ReportedObjects::report(const Entry& entry) {
  if ((entry.flags & Entry::kHasCrc) == 0 || checks_.size() >= kChecksMax) return;
  const bool is_known = std::any_of(checks_.begin(), checks_.end(), [&](const Check& check) {
    return check.entry.generation == entry.generation;
  });
  if (is_known) return;
  Check check{.entry = entry};
  if (!advance(check)) checks_.push_back(check);
}

bool ReportedObjects::on_staged(RequestId request) {
  const auto found = std::find_if(checks_.begin(), checks_.end(), [request](const Check& check) {
    return check.request == request;
  });
  if (found == checks_.end()) return false;
  if (advance(*found)) checks_.erase(found);
  return true;
}

void ReportedObjects::pump() {
  std::erase_if(checks_, [this](Check& check) { return check.request == 0 && advance(check); });
}

bool ReportedObjects::advance(Check& check) {
  const Entry& entry = check.entry;
  if (check.request == 0) {
    // It may have gone since it was reported, and its address be another's.
    if (directory_.verify(entry.key, entry.address, entry.generation) == nullptr) return true;
    check.request = device_.prefetch_object(entry.address, entry.length);
    if (check.request == 0) return false;
  }
  StagedObject staged;
  const PrefetchState state = device_.prefetch_poll(check.request, &staged);
  if (state == PrefetchState::kPending) return false;
  const bool is_damaged =
      state == PrefetchState::kReady &&
      crc32c(0, device_.region().base + staged.region_offset, entry.length) != entry.crc32c;
  device_.prefetch_release(check.request);
  if (is_damaged && directory_.drop(entry.key, entry.generation)) dropped_(entry);
  return true;
}

}  // namespace hymcache
