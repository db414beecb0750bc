// Where every object lies, as the nodes say: the index, seen through who is alive.
//
// Rows that are no longer shown are reclaimed by sweep(), a bounded piece at a time.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hymcache/csrc/object_index.h"
#include "master/csrc/member_table.h"

namespace hymcache {

class Catalog {
 public:
  Catalog(MemberTable& members, std::uint32_t rows_max) : members_(members), index_(rows_max) {}

  // Writes to rows_out (as many as keys) a shown row for each key, zeros for a miss. Returns the
  // number of hits. Allocates nothing.
  std::uint32_t lookup(std::span<const ObjectKey> keys, Entry* rows_out) const noexcept;
  // All rows of a key, shown or not, at most rows_max.
  std::vector<Entry> rows_of(const ObjectKey& key, std::size_t rows_max) const;

  // `rows` are packed Entry, as they came, at most kPublishRowsMax; they must be valid and of this
  // node. Returns how many found room.
  std::uint32_t publish(NodeRecord& node, wire::Bytes rows);
  // `rows` are packed wire::WithdrawRow. Those of another generation stay. Returns how many went.
  std::uint32_t withdraw(NodeRecord& node, wire::Bytes rows);

  // Looks at `rows_max` rows more and erases those that are not shown; returns how many it erased.
  std::uint32_t sweep(std::uint32_t rows_max);
  // Rows that sweep() has yet to erase.
  std::uint64_t hidden_rows() const noexcept;

  std::uint32_t rows() const noexcept { return index_.size(); }
  std::uint32_t rows_max() const noexcept { return index_.rows_max(); }
  std::size_t bytes() const noexcept { return index_.bytes(); }
  // The namespaces with the most rows, largest first; hidden rows count until they are erased.
  std::vector<std::pair<std::uint64_t, std::uint64_t>> largest_namespaces(std::size_t count) const;
  std::size_t namespace_count() const noexcept { return namespaces_.size(); }

 private:
  void put(NodeRecord& node, Entry row, std::uint32_t& accepted);
  void forget_row(NodeRecord& node, const Entry& row);
  void forget_namespace_row(std::uint64_t name_space);

  MemberTable& members_;
  ObjectIndex index_;
  std::unordered_map<std::uint64_t, std::uint64_t> namespaces_;  // rows of each; none is 0
  std::uint32_t sweep_cursor_ = 0;
};

}  // namespace hymcache
