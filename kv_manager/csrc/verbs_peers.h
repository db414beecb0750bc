// The peers that reach the node's memory by RDMA, and the keys that they hold.
//
// A key is good for one block. It is made when the block is handed out or granted, and is worth
// nothing any more before the block's memory can be given to another: at RELEASE, END, COMMIT, the
// end of a lease, or with the connection. Where the device cannot do that (no memory windows) no
// keys are made here: peers have been given those of the whole memory.
#pragma once

#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "transport/csrc/verbs.h"

namespace hymcache {

struct VerbsPeerStats {
  std::uint32_t peers = 0;
  std::uint64_t connects = 0;
  std::uint64_t refused = 0;
  std::uint64_t keys_made = 0;
  std::uint64_t keys_missing = 0;  // blocks that had to go another way
  std::uint64_t keys_stuck = 0;    // would not end, so that a connection had to
  std::uint32_t keys_held = 0;
};

class VerbsPeers {
 public:
  // `address` is where the node's region of so many bytes lies.
  VerbsPeers(std::shared_ptr<VerbsAcceptor> acceptor, std::uint64_t address,
             std::uint64_t region_bytes);
  ~VerbsPeers() { acceptor_->close(); }

  // The payload that answers LINK. Throws Unavailable.
  wire::PayloadWriter connect(std::uint64_t peer, const wire::LinkEndpoint& endpoint);
  void close(std::uint64_t peer);  // UNLINK, or the peer is gone
  // Whether answers to this peer carry a key for each block.
  bool wants_keys(std::uint64_t peer) const { return keyed_.contains(peer); }

  // Appends a key for each row of an answer to WAIT; what the peer held of these blocks ends.
  void put_read_keys(std::uint64_t peer, const wire::SessionId& session, std::uint32_t first,
                     std::span<const wire::WaitRow> rows, wire::PayloadWriter& payload);
  // The same for an answer to OFFER; lengths[i] is what row i asked for.
  void put_write_keys(std::uint64_t peer, std::span<const wire::OfferReplyRow> rows,
                      std::span<const std::uint32_t> lengths, wire::PayloadWriter& payload);
  // Nobody reaches blocks [first, first + count) of the session any more.
  void release(const wire::SessionId& session, std::uint32_t first, std::uint32_t count);
  void end(const wire::SessionId& session);
  void end_grant(std::uint64_t grant);

  VerbsPeerStats stats() const;

 private:
  struct Held {
    std::uint64_t peer = 0;
    wire::VerbsKey key = 0;
    std::uint32_t index = 0;  // of the block in its session
  };
  struct IdHash {
    std::size_t operator()(const wire::SessionId& id) const noexcept {
      std::size_t hash;
      std::memcpy(&hash, id.data(), sizeof hash);
      return hash;
    }
  };

  std::vector<wire::VerbsKey> make_keys(std::uint64_t peer,
                                        std::span<const VerbsAcceptor::Range> ranges,
                                        bool writable);
  void unbind(std::span<const Held> held);

  const std::shared_ptr<VerbsAcceptor> acceptor_;
  const std::uint64_t address_;
  const std::uint64_t region_bytes_;
  std::unordered_set<std::uint64_t> peers_;
  std::unordered_set<std::uint64_t> keyed_;
  std::unordered_map<wire::SessionId, std::vector<Held>, IdHash> read_keys_;
  std::unordered_map<std::uint64_t, Held> write_keys_;  // by grant
  VerbsPeerStats stats_;
};

}  // namespace hymcache
