// Fills a master's index as a storage node would, with objects that nobody holds: how much memory
// and time the index takes at a size for which no device is at hand.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "hymcache/csrc/entry.h"
#include "transport/csrc/channel.h"

namespace hymcache::bench {

class IndexFiller {
 public:
  // Registers with the master as the node `name`. Throws Unavailable, ProtocolError, ConfigError.
  IndexFiller(const std::string& master, const std::string& name, NodeId node);

  // Publishes `count` objects with keys of their own; returns how many the master took.
  std::uint64_t publish(std::uint64_t count);
  // Keeps the node listed; due within the lease that the master gives.
  void heartbeat();
  // Keys of the last objects published, in order; at most `count`.
  std::vector<ObjectKey> last_keys(std::size_t count) const;

 private:
  Entry next_entry();

  std::unique_ptr<Channel> channel_;
  NodeId node_;
  std::uint64_t published_ = 0;
};

}  // namespace hymcache::bench
