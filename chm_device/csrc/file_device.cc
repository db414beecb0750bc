#include "chm_device/csrc/file_device.h"

#include <algorithm>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "chm_device/csrc/arena.h"
#include "chm_device/csrc/backing_file.h"
#include "chm_device/csrc/byte_size.h"
#include "chm_device/csrc/handle_table.h"
#include "chm_device/csrc/io_engine.h"
#include "chm_device/csrc/log_space.h"
#include "chm_device/csrc/slot_table.h"

namespace hymcache {
namespace chm {
namespace {

constexpr std::uint64_t kObjectBytesMax = std::uint64_t{256} << 20;
constexpr std::uint32_t kRequestsMax = 1u << 18;

struct Request {
  SlotIndex slot = kNoSlot;
  bool is_due = false;     // on_staged has to be called
  RequestId previous = 0;  // in the chain of those that wait for the slot's read
  RequestId next = 0;
};

struct LostObject {
  std::uint64_t address = 0;
  int error = 0;
};

class FileDevice final : public Device {
 public:
  explicit FileDevice(const FileDeviceOptions& options);

  const DeviceRegion& region() const override { return arena_.region(); }
  DeviceStats stats() const override;
  std::string description() const override;

  RequestId prefetch_object(std::uint64_t address, std::uint32_t length) override;
  PrefetchState prefetch_poll(RequestId request, StagedObject* staged) const override;
  void prefetch_release(RequestId request) override;

  Reservation reserve(std::uint32_t length) override;
  void commit(WriteId write) override;
  void abort(WriteId write) override;
  void free(std::uint64_t address, std::uint32_t length) override;

  int event_fd() const override { return engine_->event_fd(); }
  std::uint32_t drive(bool may_flush) override;

 private:
  SlotIndex start_waiting(std::uint64_t address, std::uint32_t length);
  void chain(RequestId id, SlotIndex index);
  void unchain(const Request& request);
  void settle(SlotIndex index);
  void release_slot(SlotIndex index);
  SlotIndex end_grant(WriteId write);
  void finish(const IoCompletion& completion);
  void finish_read(SlotIndex index, int error);
  void finish_flush(SlotIndex index, int error);
  void call_back();
  void start_reads();
  void start_flushes();
  void start(SlotIndex index, SlotState state);
  void wake();

  const FileDeviceOptions options_;
  Arena arena_;  // before the file: a size of memory that cannot be leaves no file behind
  BackingFile file_;
  LogSpace log_;
  SlotTable slots_;
  SlotList waiting_;  // reads, first come first served
  SlotList dirty_;    // by address
  HandleTable<Request> requests_;
  HandleTable<SlotIndex> writes_;
  std::vector<RequestId> staged_;  // to be called back
  std::vector<LostObject> lost_;   // to be called back
  const std::uint32_t object_bytes_max_;
  // The depth is shared so that flushes never keep reads from starting, nor starve.
  const std::uint32_t flushes_max_;
  const std::uint32_t reads_max_;
  std::vector<IoCompletion> completions_;
  std::uint32_t reads_started_ = 0;
  std::uint64_t grants_ = 0;
  bool is_woken_ = false;             // drive() runs, or is bound to
  DeviceStats counts_;                // what only grows, or is counted as it happens
  std::unique_ptr<IoEngine> engine_;  // the first to go: it waits for what is in flight
};

FileDevice::FileDevice(const FileDeviceOptions& options)
    : options_(options),
      arena_(options.staging_bytes, options.write_buffer_bytes,
             SlotTable::slots_for(options.staging_bytes) +
                 SlotTable::slots_for(options.write_buffer_bytes)),
      file_({options.path, options.capacity_bytes, options.preallocate, options.log}),
      log_(options.capacity_bytes, options.segment_bytes),
      slots_(arena_, options.staging_bytes, options.write_buffer_bytes),
      waiting_(slots_.make_list()),
      dirty_(slots_.make_list()),
      requests_(kRequestsMax),
      writes_(SlotTable::slots_for(options.write_buffer_bytes)),
      object_bytes_max_(static_cast<std::uint32_t>(
          std::min({kObjectBytesMax, options.segment_bytes, options.staging_bytes,
                    options.write_buffer_bytes}))),
      flushes_max_(std::max(1u, options.io_depth / 4)),
      reads_max_(std::max(1u, options.io_depth - flushes_max_)),
      completions_(reads_max_ + flushes_max_) {
  counts_.capacity_bytes = log_.capacity_bytes();
  counts_.staging_bytes = options.staging_bytes;
  counts_.write_buffer_bytes = options.write_buffer_bytes;
  engine_ = open_io_engine({.kind = options.io,
                            .fd = file_.fd(),
                            .is_direct = file_.is_direct(),
                            .depth = reads_max_ + flushes_max_,
                            .memory = std::span(arena_.region().base, arena_.region().bytes),
                            .log = options.log});
}

DeviceStats FileDevice::stats() const {
  DeviceStats stats = counts_;
  stats.used_bytes = log_.used_bytes();
  stats.live_bytes = log_.live_bytes();
  stats.staging_used_bytes = slots_.busy_bytes(Window::kStaging);
  return stats;
}

std::string FileDevice::description() const {
  return std::string(file_.is_block_device() ? "block device " : "file ") + options_.path + ", " +
         format_bytes(log_.capacity_bytes()) + " in segments of " +
         format_bytes(log_.segment_bytes()) + ", " + engine_->name() + ", " +
         (file_.is_direct() ? "O_DIRECT" : "buffered") + ", depth " +
         std::to_string(options_.io_depth);
}

bool is_pending(const Slot& slot) {
  return slot.state == SlotState::kWaiting || slot.state == SlotState::kReading;
}

RequestId FileDevice::prefetch_object(std::uint64_t address, std::uint32_t length) {
  if (!log_.contains(address, length)) {
    throw std::logic_error("prefetch_object: no object can be there");
  }
  if (requests_.full()) return 0;
  SlotIndex index = slots_.find(address);
  if (index == kNoSlot) index = start_waiting(address, length);
  if (index == kNoSlot) return 0;
  Slot& slot = slots_.at(index);
  if (slot.length != length || slot.state == SlotState::kGranted) {
    throw std::logic_error("prefetch_object: another object is there");
  }
  if (slot.state == SlotState::kClean && slot.pins == 0) slots_.remove_idle(index);
  ++slot.pins;
  const RequestId request = requests_.insert({index});
  if (is_pending(slot)) {
    chain(request, index);
  } else {
    ++counts_.resident_hits;
  }
  return request;
}

SlotIndex FileDevice::start_waiting(std::uint64_t address, std::uint32_t length) {
  const SlotIndex index = slots_.allocate(Window::kStaging, length);
  if (index == kNoSlot) return kNoSlot;
  Slot& slot = slots_.at(index);
  slot.state = SlotState::kWaiting;
  slot.address = address;
  slots_.publish(index);
  waiting_.push_back(index);
  ++counts_.reads_in_flight;
  wake();
  return index;
}

void FileDevice::chain(RequestId id, SlotIndex index) {
  RequestId& first = slots_.at(index).waiter;
  requests_.find(id)->next = first;
  if (first != 0) requests_.find(first)->previous = id;
  first = id;
}

void FileDevice::unchain(const Request& request) {
  if (request.next != 0) requests_.find(request.next)->previous = request.previous;
  if (request.previous != 0) {
    requests_.find(request.previous)->next = request.next;
  } else {
    slots_.at(request.slot).waiter = request.next;
  }
}

PrefetchState FileDevice::prefetch_poll(RequestId request, StagedObject* staged) const {
  const Request* found = requests_.find(request);
  if (found == nullptr) throw std::logic_error("prefetch_poll: unknown request");
  const Slot& slot = slots_.at(found->slot);
  if (is_pending(slot)) return PrefetchState::kPending;
  if (slot.state == SlotState::kFailed) return PrefetchState::kFailed;
  *staged = slots_.staged(found->slot);
  return PrefetchState::kReady;
}

void FileDevice::prefetch_release(RequestId request) {
  const Request* found = requests_.find(request);
  if (found == nullptr) throw std::logic_error("prefetch_release: unknown request");
  const SlotIndex index = found->slot;
  if (is_pending(slots_.at(index))) unchain(*found);
  requests_.erase(request);
  --slots_.at(index).pins;
  settle(index);
}

// After a slot lost its last pin or ended its I/O: is it still of use?
void FileDevice::settle(SlotIndex index) {
  const Slot& slot = slots_.at(index);
  if (slot.pins > 0) return;
  switch (slot.state) {
    case SlotState::kWaiting:
      waiting_.remove(index);
      --counts_.reads_in_flight;
      return release_slot(index);
    case SlotState::kFailed:
      return release_slot(index);
    case SlotState::kClean:
      return slot.is_dead ? release_slot(index) : slots_.add_idle(index);
    case SlotState::kFree:
    case SlotState::kGranted:
    case SlotState::kDirty:
    case SlotState::kFlushing:
    case SlotState::kReading:
      return;
  }
}

void FileDevice::release_slot(SlotIndex index) {
  const Slot& slot = slots_.at(index);
  if (slot.is_dead) log_.release(slot.address, slot.length);
  slots_.retire(index);
}

Reservation FileDevice::reserve(std::uint32_t length) {
  if (length == 0 || length > object_bytes_max_) return {ReserveStatus::kTooLarge};
  // Asked before the buffer gives way for it.
  if (!log_.fits(length)) return {ReserveStatus::kDeviceFull};
  const SlotIndex index = slots_.allocate(Window::kWriteBuffer, length);
  if (index == kNoSlot) return {ReserveStatus::kBufferFull};
  Slot& slot = slots_.at(index);
  slot.state = SlotState::kGranted;
  slot.address = log_.allocate(length).value();
  slot.sequence = ++grants_;
  slots_.publish(index);
  counts_.write_buffer_used_bytes += padded(length);
  // Never 0: there are as many handles as slots.
  return {ReserveStatus::kGranted, writes_.insert(index), slot.address, slot.region_offset};
}

SlotIndex FileDevice::end_grant(WriteId write) {
  const SlotIndex* found = writes_.find(write);
  if (found == nullptr) throw std::logic_error("commit, abort: unknown write");
  const SlotIndex index = *found;
  writes_.erase(write);
  return index;
}

void FileDevice::commit(WriteId write) {
  const SlotIndex index = end_grant(write);
  slots_.at(index).state = SlotState::kDirty;
  dirty_.insert_by_sequence(index);
  wake();
}

void FileDevice::abort(WriteId write) {
  const SlotIndex index = end_grant(write);
  Slot& slot = slots_.at(index);
  counts_.write_buffer_used_bytes -= padded(slot.length);
  slot.is_dead = true;
  release_slot(index);
}

void FileDevice::free(std::uint64_t address, std::uint32_t length) {
  const SlotIndex index = slots_.find(address);
  if (index == kNoSlot) return log_.release(address, length);
  Slot& slot = slots_.at(index);
  if (slot.length != length || slot.state == SlotState::kGranted) {
    throw std::logic_error("free: another object is there");
  }
  slots_.withdraw(index);
  slot.is_dead = true;
  if (slot.state == SlotState::kDirty) {
    dirty_.remove(index);
    counts_.write_buffer_used_bytes -= padded(length);
    slot.state = SlotState::kClean;
  } else if (slot.state == SlotState::kClean && slot.pins == 0) {
    slots_.remove_idle(index);
  }
  settle(index);
}

std::uint32_t FileDevice::drive(bool may_flush) {
  is_woken_ = true;
  const std::size_t reaped = engine_->reap(completions_);
  for (std::size_t i = 0; i < reaped; ++i) finish(completions_[i]);
  call_back();
  start_reads();
  if (may_flush) start_flushes();
  is_woken_ = false;
  engine_->submit();
  return static_cast<std::uint32_t>(reaped);
}

void FileDevice::finish(const IoCompletion& completion) {
  const auto index = static_cast<SlotIndex>(completion.cookie);
  if (slots_.at(index).state == SlotState::kReading) {
    finish_read(index, completion.error);
  } else {
    finish_flush(index, completion.error);
  }
  settle(index);
}

void FileDevice::finish_read(SlotIndex index, int error) {
  Slot& slot = slots_.at(index);
  --reads_started_;
  --counts_.reads_in_flight;
  if (error == 0) {
    slot.state = SlotState::kClean;
    ++counts_.reads;
    counts_.read_bytes += slot.length;
  } else {
    slot.state = SlotState::kFailed;
    ++counts_.read_errors;
    // The next request tries again.
    if (!slot.is_dead) slots_.withdraw(index);
  }
  for (RequestId id = std::exchange(slot.waiter, 0); id != 0;) {
    Request& request = *requests_.find(id);
    request.is_due = true;
    staged_.push_back(id);
    id = request.next;
  }
}

void FileDevice::finish_flush(SlotIndex index, int error) {
  Slot& slot = slots_.at(index);
  --counts_.writes_in_flight;
  counts_.write_buffer_used_bytes -= padded(slot.length);
  slot.state = SlotState::kClean;
  if (error == 0) {
    ++counts_.writes;
    counts_.written_bytes += slot.length;
    return;
  }
  ++counts_.write_errors;
  if (slot.is_dead) return;
  lost_.push_back({slot.address, error});
  slots_.withdraw(index);
  slot.is_dead = true;
}

// Callbacks may use the device, so they come when it is between two states.
void FileDevice::call_back() {
  for (const LostObject& object : lost_) {
    if (on_flush_failed) on_flush_failed(object.address, object.error);
  }
  lost_.clear();
  for (const RequestId id : staged_) {
    // An earlier callback may have released it, and its number may be another's by now.
    Request* request = requests_.find(id);
    if (request == nullptr || !std::exchange(request->is_due, false)) continue;
    if (on_staged) on_staged(id);
  }
  staged_.clear();
}

void FileDevice::start_reads() {
  while (reads_started_ < reads_max_ && !waiting_.empty()) {
    const SlotIndex index = waiting_.front();
    waiting_.remove(index);
    ++reads_started_;
    start(index, SlotState::kReading);
  }
}

void FileDevice::start_flushes() {
  while (counts_.writes_in_flight < flushes_max_ && !dirty_.empty()) {
    const SlotIndex index = dirty_.front();
    dirty_.remove(index);
    ++counts_.writes_in_flight;
    start(index, SlotState::kFlushing);
  }
}

void FileDevice::start(SlotIndex index, SlotState state) {
  Slot& slot = slots_.at(index);
  slot.state = state;
  const bool is_queued =
      engine_->queue({state == SlotState::kFlushing, BackingFile::kDataOffset + slot.address,
                      slots_.data(slot), padded(slot.length), index});
  if (!is_queued) throw std::logic_error("FileDevice: more transfers than its depth");
}

// Makes sure that the owner comes back to drive().
void FileDevice::wake() {
  if (!std::exchange(is_woken_, true)) engine_->wake();
}

}  // namespace
}  // namespace chm

std::unique_ptr<Device> open_file_device(const FileDeviceOptions& options) {
  return std::make_unique<chm::FileDevice>(chm::checked(options));
}

}  // namespace hymcache
