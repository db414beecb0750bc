// What to read and from where: the answer of a lookup, as it travels from the scheduler of an
// engine to its workers.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hymcache/csrc/entry.h"
#include "transport/csrc/wire.h"

namespace hymcache {

struct ReadPlan {
  // A prefetch session that was opened for the rows of one node, in their order.
  struct Session {
    NodeId node = 0;
    wire::SessionId id{};
  };
  std::vector<Entry> rows;  // one for each block, in the order of the prefix
  std::vector<Session> sessions;

  const Session* session_of(NodeId node) const noexcept;

  // Within one release of hymcache only: not a format to store.
  std::string serialize() const;
  // Throws ProtocolError for anything that serialize() did not make.
  static ReadPlan parse(std::string_view bytes);
};

}  // namespace hymcache
