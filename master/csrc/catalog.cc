#include "master/csrc/catalog.h"

#include <algorithm>
#include <array>

namespace hymcache {
namespace {

// Calls `visit(i)` for each of `count` rows, with the index's memory for the next ones under way.
template <class Row, class Visit>
void visit_prefetched(const ObjectIndex& index, wire::Bytes rows, Visit visit) {
  const std::size_t count = rows.size() / sizeof(Row);
  std::array<ObjectKey, ObjectIndex::kBatchMax> keys;
  for (std::size_t begin = 0; begin < count; begin += keys.size()) {
    const std::size_t end = std::min(count, begin + keys.size());
    for (std::size_t i = begin; i < end; ++i) keys[i - begin] = wire::row_at<Row>(rows, i).key;
    index.prefetch(std::span(keys).first(end - begin));
    for (std::size_t i = begin; i < end; ++i) visit(wire::row_at<Row>(rows, i));
  }
}

}  // namespace

std::uint32_t Catalog::lookup(std::span<const ObjectKey> keys, Entry* rows_out) const noexcept {
  std::uint32_t hits = 0;
  const auto is_shown = [this](const Entry& row) {
    const NodeRecord* const node = members_.find(row.node);
    return node != nullptr && node->shows(row);
  };
  index_.find_each(keys, is_shown, [&](std::size_t i, const Entry* row) {
    rows_out[i] = row != nullptr ? *row : Entry{};
    hits += row != nullptr ? 1 : 0;
  });
  return hits;
}

std::vector<Entry> Catalog::rows_of(const ObjectKey& key, std::size_t rows_max) const {
  std::vector<Entry> rows;
  index_.find_if(key, [&](const Entry& row) {
    if (rows.size() < rows_max) rows.push_back(row);
    return false;
  });
  return rows;
}

std::uint32_t Catalog::publish(NodeRecord& node, wire::Bytes rows) {
  std::uint32_t accepted = 0;
  visit_prefetched<Entry>(index_, rows, [&](const Entry& row) { put(node, row, accepted); });
  return accepted;
}

void Catalog::put(NodeRecord& node, Entry row, std::uint32_t& accepted) {
  row.epoch = node.epoch;
  if (Entry* const old = index_.find(row.key, node.member.node); old != nullptr) {
    if (old->epoch < node.epoch_shown_min) ++node.rows_shown;
    if (old->epoch != node.epoch) ++node.rows_current;
    if (old->name_space != row.name_space) {
      forget_namespace_row(old->name_space);
      ++namespaces_[row.name_space];
    }
    *old = row;
  } else if (index_.upsert(row) != nullptr) {
    ++node.rows;
    ++node.rows_shown;
    ++node.rows_current;
    ++namespaces_[row.name_space];
  } else {
    return;
  }
  ++accepted;
}

std::uint32_t Catalog::withdraw(NodeRecord& node, wire::Bytes rows) {
  std::uint32_t removed = 0;
  visit_prefetched<wire::WithdrawRow>(index_, rows, [&](const wire::WithdrawRow& gone) {
    const Entry* const row = index_.find(gone.key, node.member.node);
    if (row == nullptr || row->generation != gone.generation) return;
    const Entry copy = *row;
    index_.erase(gone.key, node.member.node);
    forget_row(node, copy);
    ++removed;
  });
  return removed;
}

void Catalog::forget_row(NodeRecord& node, const Entry& row) {
  forget_namespace_row(row.name_space);
  members_.row_left(node, row);
}

void Catalog::forget_namespace_row(std::uint64_t name_space) {
  const auto found = namespaces_.find(name_space);
  if (--found->second == 0) namespaces_.erase(found);
}

std::uint32_t Catalog::sweep(std::uint32_t rows_max) {
  std::uint32_t erased = 0;
  index_.sweep(sweep_cursor_, rows_max, [&](const Entry& row) {
    NodeRecord& node = *members_.find(row.node);  // is kept while it has rows here
    if (node.shows(row)) return false;
    forget_row(node, row);
    ++erased;
    return true;
  });
  return erased;
}

std::uint64_t Catalog::hidden_rows() const noexcept {
  std::uint64_t shown = 0;
  for (const auto& [id, node] : members_.nodes()) shown += node.alive() ? node.rows_shown : 0;
  return index_.size() - shown;
}

std::vector<std::pair<std::uint64_t, std::uint64_t>> Catalog::largest_namespaces(
    std::size_t count) const {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> largest(std::min(count, namespaces_.size()));
  std::partial_sort_copy(namespaces_.begin(), namespaces_.end(), largest.begin(), largest.end(),
                         [](const auto& a, const auto& b) {
                           return std::pair(a.second, a.first) > std::pair(b.second, b.first);
                         });
  return largest;
}

}  // namespace hymcache
