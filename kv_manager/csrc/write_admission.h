// Opportunistic writes: an offer is granted a slot in the device's write buffer, or refused at
// once. Nothing here ever waits.
//
//   offer --granted--> open --(shm: the client writes; tcp: WRITE)--> commit --> readable
//                        \--> abort | lease over | connection gone --> the slot is free again
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "chm_device/csrc/device.h"
#include "kv_manager/csrc/object_directory.h"
#include "transport/csrc/event_loop.h"
#include "transport/csrc/wire.h"

namespace hymcache {

// A writer that takes longer is taken for dead. Bytes that it writes later into a slot that has
// changed hands fail the checksum of whoever reads them.
inline constexpr Clock::duration kGrantLease = std::chrono::seconds(30);

struct WriteStats {
  std::uint64_t offered = 0;
  std::uint64_t granted = 0;
  std::uint64_t committed = 0;
  std::uint64_t committed_bytes = 0;
  std::uint64_t aborted = 0;      // by the client, by its end, or by the lease
  std::uint64_t refused[7] = {};  // by wire::OfferState
  std::uint32_t open = 0;
};

class WriteAdmission {
 public:
  WriteAdmission(EventLoop& loop, Device& device, ObjectDirectory& directory,
                 Clock::duration grant_lease = kGrantLease);

  // Called before a grant ends, whatever its end is. May be empty.
  std::function<void(std::uint64_t grant)> on_end;

  wire::OfferReplyRow offer(std::uint64_t peer, std::uint64_t name_space,
                            const wire::OfferRow& row);
  // Where the bytes of a WRITE go; false: no such grant of this peer, or another length.
  bool begin_write(std::uint64_t peer, const wire::WriteRow& row, iovec* where);
  void end_write(std::uint64_t grant);     // all bytes are there
  void cancel_write(std::uint64_t grant);  // none will come
  // `writes_by_itself`: the peer has mapped the region, so no WRITE is needed before.
  wire::CommitState commit(std::uint64_t peer, const wire::CommitRow& row, bool writes_by_itself);

  void on_peer_gone(std::uint64_t peer);
  void expire();  // grants held too long; call it about once a second

  void set_draining(bool draining) noexcept { draining_ = draining; }
  bool draining() const noexcept { return draining_; }
  WriteStats stats() const noexcept;

 private:
  struct Grant {
    std::uint64_t id = 0;  // 0: this place is free
    std::uint64_t peer = 0;
    ObjectKey key{};
    std::uint64_t region_offset = 0;
    std::uint32_t length = 0;
    WriteId write = 0;
    bool receiving = false;  // the socket writes into the slot: it must not change hands
    bool written = false;
    TimePoint granted_at{};
  };

  Grant* find(std::uint64_t id);
  Grant* find(std::uint64_t id, std::uint64_t peer);
  Grant& open_grant();
  void abort(Grant& grant);

  EventLoop& loop_;
  Device& device_;
  ObjectDirectory& directory_;
  const Clock::duration grant_lease_;
  bool draining_ = false;
  std::vector<Grant> grants_;  // a grant's place is in the low half of its id
  std::vector<std::uint32_t> free_;
  std::uint64_t serial_ = 0;
  WriteStats stats_;
};

}  // namespace hymcache
