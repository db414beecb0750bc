// A CXL-hybrid memory device: a little DRAM in front of a large, slow, byte-addressed region.
//
// Reads are issue-wait-release (the paper's chm_prefetch_object / _wait / _release): an object is
// staged in the device's DRAM, read from there by clients (one-sided), and released. Writes go to
// a write buffer that is apart from the staging window and are flushed when the caller allows it;
// a full buffer is an answer, not a wait.
//
// One thread drives a device: every call below comes from the thread that calls drive(). I/O
// completions raise event_fd(), so the device lives in its owner's event loop. A handle that is not
// in use, or an address where no such object is, is a mistake of the caller: std::logic_error.
//
//   reserve -> kGranted: client writes at region_offset -> commit -> readable -> flushed -> clean
//                                                        \-> abort
//   prefetch_object -> kPending ... -> kReady | kFailed -> prefetch_release
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace hymcache {

// Handles are small numbers, used again soon after they end; 0 is "none".
using RequestId = std::uint32_t;  // of one prefetch
using WriteId = std::uint32_t;    // of one reserved write

enum class ReserveStatus : std::uint8_t {
  kGranted,
  kBufferFull,  // no room in the write buffer now
  kDeviceFull,  // no free address
  kTooLarge,    // could never fit, or has no bytes
};

struct Reservation {
  ReserveStatus status = ReserveStatus::kBufferFull;
  WriteId write = 0;
  std::uint64_t address = 0;        // final, fixed at admission
  std::uint64_t region_offset = 0;  // where the client writes the bytes
};

enum class PrefetchState : std::uint8_t { kPending, kReady, kFailed };

// Where a staged object can be read. `generation_word` is the offset in the region of a u64 that
// the device changes before it lets go of the bytes: a client that copies without asking reads it
// before and after, as with a sequence lock.
struct StagedObject {
  std::uint64_t region_offset = 0;
  std::uint64_t generation_word = 0;
  std::uint64_t generation_value = 0;
};

// The memory that clients of the same host map: [0, read_write_offset) is for reading only,
// [read_write_offset, bytes) holds the write buffer.
struct DeviceRegion {
  int fd = -1;
  std::uint8_t* base = nullptr;
  std::uint64_t bytes = 0;
  std::uint64_t read_write_offset = 0;
};

struct DeviceStats {
  std::uint64_t capacity_bytes = 0;
  std::uint64_t used_bytes = 0;  // addresses given out, dead bytes not yet reclaimed included
  std::uint64_t live_bytes = 0;
  std::uint64_t staging_bytes = 0;
  std::uint64_t staging_used_bytes = 0;  // pinned by requests
  std::uint64_t write_buffer_bytes = 0;
  std::uint64_t write_buffer_used_bytes = 0;  // granted or not yet flushed
  std::uint64_t reads = 0, read_bytes = 0, read_errors = 0;
  std::uint64_t writes = 0, written_bytes = 0, write_errors = 0;
  std::uint64_t resident_hits = 0;  // prefetches answered from bytes still in DRAM
  std::uint32_t reads_in_flight = 0, writes_in_flight = 0;
};

class Device {
 public:
  virtual ~Device() = default;

  // Called from drive(), and free to use the device, drive() excepted. Set before the first
  // request. A request that was kReady at once is not called back; one released is not either.
  std::function<void(RequestId)> on_staged;                               // now kReady or kFailed
  std::function<void(std::uint64_t address, int error)> on_flush_failed;  // object is lost

  virtual const DeviceRegion& region() const = 0;
  virtual DeviceStats stats() const = 0;
  virtual std::string description() const = 0;  // one line: kind, path, I/O engine

  // Issue: stages the object of `length` bytes at `address`. 0 when no staging slot is free now.
  // Two requests for one address share the slot. An object still in DRAM is kReady at once. After
  // a failed read the next request reads again.
  virtual RequestId prefetch_object(std::uint64_t address, std::uint32_t length) = 0;
  // Wait, without blocking: fills `staged` when kReady.
  virtual PrefetchState prefetch_poll(RequestId request, StagedObject* staged) const = 0;
  // Release: the slot may be reused. Legal in every state.
  virtual void prefetch_release(RequestId request) = 0;

  virtual Reservation reserve(std::uint32_t length) = 0;
  virtual void commit(WriteId write) = 0;
  virtual void abort(WriteId write) = 0;
  // Gives a committed object's address back; its bytes are dead. Bytes pinned by a request stay
  // readable to it, and the address is not given out again before they are released.
  virtual void free(std::uint64_t address, std::uint32_t length) = 0;

  // Becomes readable when I/O completed, and when a call above left something for drive() to start.
  // Only drive() reads it.
  virtual int event_fd() const = 0;
  // Reaps completions, calls back, and starts flushing what was committed if `may_flush`.
  // Returns how many completions it reaped.
  virtual std::uint32_t drive(bool may_flush) = 0;
};

}  // namespace hymcache
