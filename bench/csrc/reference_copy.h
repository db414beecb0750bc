// The copies that ours are measured against, as plain as they can be written: memcpy through
// shared memory, and a loop over a TCP socket that receives straight into the destination. Both
// move batches of blocks between a client and a server process; neither checks, finds or
// protects anything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "hymcache/csrc/unique_fd.h"

namespace hymcache::bench {

inline constexpr std::size_t kReferenceBlocksMax = 32;  // in one batch

// Where a block lies in the server's memory, and where the client has or wants it.
struct ReferenceBlock {
  std::uint64_t offset;
  std::span<std::byte> client;
};

// The client of one kind of copy: a request and an answer for each batch. Not thread-safe.
// Throws Error: kUnavailable when the server is gone or silent, kConfig for a bad batch.
class ReferenceCopy {
 public:
  virtual ~ReferenceCopy() = default;
  virtual void get(std::span<const ReferenceBlock> blocks) = 0;
  virtual void put(std::span<const ReferenceBlock> blocks) = 0;
};

// The server's memory is a memfd that the client maps too; a byte each way marks a batch. With
// `streaming` the blocks are moved by our copy instead of memcpy: the least that a transfer of ours
// could cost.
class SharedMemoryCopy final : public ReferenceCopy {
 public:
  SharedMemoryCopy(UniqueFd socket, UniqueFd memory, std::uint64_t memory_bytes, bool streaming);
  ~SharedMemoryCopy() override;
  SharedMemoryCopy(const SharedMemoryCopy&) = delete;
  SharedMemoryCopy& operator=(const SharedMemoryCopy&) = delete;

  void get(std::span<const ReferenceBlock> blocks) override;
  void put(std::span<const ReferenceBlock> blocks) override;

 private:
  std::byte* at(const ReferenceBlock& block) const;
  void ask();

  void (*copy_)(void* to, const void* from, std::size_t bytes);
  UniqueFd socket_;
  std::uint64_t bytes_;
  std::byte* base_;
};

// Blocking send, and recv with MSG_WAITALL into the destination.
class StreamCopy final : public ReferenceCopy {
 public:
  explicit StreamCopy(UniqueFd socket);

  void get(std::span<const ReferenceBlock> blocks) override;
  void put(std::span<const ReferenceBlock> blocks) override;

 private:
  void request(std::span<const ReferenceBlock> blocks, bool put);

  UniqueFd socket_;
};

// Connects to 127.0.0.1 with large socket buffers and without delay.
UniqueFd connect_reference(std::uint16_t port);
// Listens there; `port` gets the port.
UniqueFd listen_reference(std::uint16_t* port);

// The servers; each runs in a process of its own until its client closes the connection.
void serve_shared_memory(UniqueFd socket, UniqueFd memory, std::uint64_t memory_bytes);
void serve_stream(UniqueFd listener, std::uint64_t memory_bytes);

}  // namespace hymcache::bench
