// What a node holds: one row for each object, and who is told when that changes.
//
// A row is pending from the moment its address is granted to a writer until the commit; only valid
// rows are found, published and read.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "chm_device/csrc/device.h"
#include "hymcache/csrc/entry.h"
#include "hymcache/csrc/object_index.h"

namespace hymcache {

class ObjectDirectory {
 public:
  struct Listener {
    std::function<void(const Entry&)> stored;
    std::function<void(const ObjectKey&, Generation)> gone;
  };

  // Generations start at `incarnation` (nanoseconds since the epoch when the node started), so a
  // location given out before a restart is never taken for a present one.
  ObjectDirectory(Device& device, NodeId node, std::uint64_t incarnation, std::uint32_t rows_max,
                  Listener listener);

  const Entry* find(const ObjectKey& key) const noexcept;  // valid or pending
  const Entry* find_valid(const ObjectKey& key) const noexcept;
  // The object that a location names, or null when the location is stale.
  const Entry* verify(const ObjectKey& key, std::uint64_t address,
                      Generation generation) const noexcept;

  // False when the directory is full.
  bool add_pending(const ObjectKey& key, std::uint64_t name_space, std::uint64_t address,
                   std::uint32_t length);
  void make_valid(const ObjectKey& key, std::uint32_t crc32c, std::uint32_t extra_flags);
  void forget_pending(const ObjectKey& key);  // its address is the caller's to give back
  // Frees the object's address and tells the listener. False if there is no such object.
  bool drop(const ObjectKey& key, Generation generation);
  // The device has lost what lay at `address` and taken it back. A scan, for the rare failed flush.
  bool forget_lost(std::uint64_t address);

  // Copies up to rows.size() valid rows, from cursor on; returns how many. `cursor` is 0 again when
  // all rows were visited.
  std::size_t copy_rows(std::uint32_t& cursor, std::span<Entry> rows);

  std::uint64_t objects() const noexcept { return objects_; }
  std::uint64_t object_bytes() const noexcept { return object_bytes_; }
  std::size_t index_bytes() const noexcept { return index_.bytes(); }

 private:
  bool remove(const ObjectKey& key, Generation generation);

  Device& device_;
  const NodeId node_;
  Generation next_generation_;
  ObjectIndex index_;
  Listener listener_;
  std::uint64_t objects_ = 0;  // valid rows
  std::uint64_t object_bytes_ = 0;
};

}  // namespace hymcache
