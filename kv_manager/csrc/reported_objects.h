// Objects that a reader found damaged: looked at again here, and dropped if they are.
//
// A report is believed only after a look of our own. The bytes may have been damaged on the way to
// the reader, or by the reader, and then they are good here.
//
//   reported --staged--> checked --> kept | dropped
//      ^  \--no slot free: retried--/
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "chm_device/csrc/device.h"
#include "kv_manager/csrc/object_directory.h"

namespace hymcache {

class ReportedObjects {
 public:
  using Dropped = std::function<void(const Entry&)>;

  ReportedObjects(Device& device, ObjectDirectory& directory, Dropped dropped);
  ~ReportedObjects();
  ReportedObjects(const ReportedObjects&) = delete;
  ReportedObjects& operator=(const ReportedObjects&) = delete;

  // Without a checksum nothing can be said, and a report beyond kChecksMax is left to the next
  // reader.
  void report(const Entry& entry);
  // False when the request is none of ours.
  bool on_staged(RequestId request);
  // Tries again what found no slot. Call it when slots may have become free.
  void pump();

 private:
  static constexpr std::size_t kChecksMax = 64;
  struct Check {
    Entry entry;
    RequestId request = 0;  // 0: no slot was free
  };

  // True when the check is over.
  bool advance(Check& check);

  Device& device_;
  ObjectDirectory& directory_;
  const Dropped dropped_;
  std::vector<Check> checks_;
};

}  // namespace hymcache
