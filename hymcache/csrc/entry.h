// The 64-byte entry: where an object lies. It is the row of the master's index and of a node's
// directory, and travels on the wire in this very layout (docs/wire-protocol.md, "Entry").
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <type_traits>

namespace hymcache {

static_assert(std::endian::native == std::endian::little,
              "the wire format is little-endian and is used in place");

// First 16 bytes of SHA-256(namespace fingerprint || engine block hash): already uniform, so any
// of its bytes serve as a hash.
using ObjectKey = std::array<std::uint8_t, 16>;

using NodeId = std::uint32_t;      // never 0
using Generation = std::uint64_t;  // unique for each stored object of a node; never 0

struct Entry {
  static constexpr std::uint32_t kValid = 1u << 0;   // the row names an object
  static constexpr std::uint32_t kHasCrc = 1u << 1;  // crc32c was computed by the writer

  ObjectKey key{};
  std::uint64_t address = 0;     // in the node's unified device address space
  Generation generation = 0;     // changes when the address is given to another object
  std::uint64_t name_space = 0;  // fingerprint of the namespace the key was made in
  std::uint32_t length = 0;      // bytes of the object
  NodeId node = 0;
  std::uint32_t crc32c = 0;  // of the object's bytes
  std::uint32_t flags = 0;
  std::uint32_t epoch = 0;  // the master's: in which session of its node it was published
  std::uint32_t reserved = 0;

  bool valid() const noexcept { return (flags & kValid) != 0; }
};
static_assert(sizeof(Entry) == 64 && std::is_trivially_copyable_v<Entry>);

}  // namespace hymcache
