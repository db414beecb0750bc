#include "kv_manager/csrc/object_directory.h"

#include <utility>

namespace hymcache {

ObjectDirectory::ObjectDirectory(Device& device, NodeId node, std::uint64_t incarnation,
                                 std::uint32_t rows_max, Listener listener)
    : device_(device),
      node_(node),
      next_generation_(incarnation),
      index_(rows_max),
      listener_(std::move(listener)) {}

const Entry* ObjectDirectory::find(const ObjectKey& key) const noexcept {
  return index_.find(key, node_);
}

const Entry* ObjectDirectory::find_valid(const ObjectKey& key) const noexcept {
  const Entry* const row = find(key);
  return row != nullptr && row->valid() ? row : nullptr;
}

const Entry* ObjectDirectory::verify(const ObjectKey& key, std::uint64_t address,
                                     Generation generation) const noexcept {
  const Entry* const row = find_valid(key);
  if (row == nullptr || row->address != address || row->generation != generation) return nullptr;
  return row;
}

bool ObjectDirectory::add_pending(const ObjectKey& key, std::uint64_t name_space,
                                  std::uint64_t address, std::uint32_t length) {
  Entry row;
  row.key = key;
  row.name_space = name_space;
  row.address = address;
  row.length = length;
  row.node = node_;
  return index_.upsert(row) != nullptr;
}

void ObjectDirectory::make_valid(const ObjectKey& key, std::uint32_t crc32c,
                                 std::uint32_t extra_flags) {
  Entry* const row = index_.find(key, node_);
  row->generation = ++next_generation_;
  row->crc32c = crc32c;
  row->flags = Entry::kValid | extra_flags;
  ++objects_;
  object_bytes_ += row->length;
  listener_.stored(*row);
}

void ObjectDirectory::forget_pending(const ObjectKey& key) { index_.erase(key, node_); }

bool ObjectDirectory::remove(const ObjectKey& key, Generation generation) {
  const Entry* const row = find_valid(key);
  if (row == nullptr || row->generation != generation) return false;
  --objects_;
  object_bytes_ -= row->length;
  index_.erase(key, node_);
  listener_.gone(key, generation);
  return true;
}

bool ObjectDirectory::drop(const ObjectKey& key, Generation generation) {
  const Entry* const row = find_valid(key);
  if (row == nullptr) return false;
  const Entry gone = *row;
  // Told before the address can hold anything else: a location must never name other bytes.
  if (!remove(gone.key, generation)) return false;
  device_.free(gone.address, gone.length);
  return true;
}

bool ObjectDirectory::forget_lost(std::uint64_t address) {
  Entry found;
  std::uint32_t cursor = 0;
  index_.sweep(cursor, index_.rows_max(), [&](const Entry& row) {
    if (row.valid() && row.address == address) found = row;
    return false;
  });
  return found.valid() && remove(found.key, found.generation);
}

std::size_t ObjectDirectory::copy_rows(std::uint32_t& cursor, std::span<Entry> rows) {
  std::size_t count = 0;
  do {
    // As many rows as there is room for, so that none has to be visited twice.
    const auto room = static_cast<std::uint32_t>(rows.size() - count);
    index_.sweep(cursor, room, [&](const Entry& row) {
      if (row.valid()) rows[count++] = row;
      return false;
    });
  } while (cursor != 0 && count < rows.size());
  return count;
}

}  // namespace hymcache
