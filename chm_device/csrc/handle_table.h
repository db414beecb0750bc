// Records under small numbers: a bounded table with 0 for "none".
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

namespace hymcache::chm {

// Handles are 1 to `capacity`; the last one erased is the next one given, so they stay small.
template <typename Record>
class HandleTable {
 public:
  explicit HandleTable(std::uint32_t capacity) : rows_(capacity) {
    if (capacity == 0) throw std::logic_error("HandleTable: no room at all");
    unused_.reserve(capacity);
    for (std::uint32_t handle = capacity; handle > 0; --handle) unused_.push_back(handle);
  }

  bool full() const noexcept { return unused_.empty(); }

  // 0 when full.
  std::uint32_t insert(const Record& record) {
    if (full()) return 0;
    const std::uint32_t handle = unused_.back();
    unused_.pop_back();
    rows_[handle - 1] = record;
    return handle;
  }

  // Null for a handle that is not in use.
  Record* find(std::uint32_t handle) noexcept {
    if (handle == 0 || handle > rows_.size() || !rows_[handle - 1]) return nullptr;
    return &*rows_[handle - 1];
  }
  const Record* find(std::uint32_t handle) const noexcept {
    if (handle == 0 || handle > rows_.size() || !rows_[handle - 1]) return nullptr;
    return &*rows_[handle - 1];
  }

  // Of a handle in use.
  void erase(std::uint32_t handle) {
    rows_[handle - 1].reset();
    unused_.push_back(handle);
  }

 private:
  std::vector<std::optional<Record>> rows_;
  std::vector<std::uint32_t> unused_;
};

}  // namespace hymcache::chm
