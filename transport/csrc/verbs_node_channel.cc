#include "transport/csrc/verbs_node_channel.h"

#include <algorithm>
#include <cstring>

#include "transport/csrc/crc32c.h"
#include "transport/csrc/verbs_batch.h"

namespace hymcache {
namespace {

// The node's device has failed it, say: a new link will tell.
constexpr const char* kNoKey = "the node gave no key for a block";
constexpr const char* kNotOffered = "the node offers no RDMA";
constexpr std::size_t kWordsBytes = wire::kWaitRowsMax * sizeof(std::uint64_t);

// Half of what is left: the other half is for the way that remains when this one fails.
TimePoint batch_deadline(TimePoint deadline) {
  const TimePoint now = Clock::now();
  return now + std::max(Clock::duration::zero(), deadline - now) / 2;
}

std::uint32_t crc_of(std::span<const Segment> place) {
  std::uint32_t crc = 0;
  for (const Segment& segment : place) crc = crc32c(crc, segment.data, segment.bytes);
  return crc;
}

}  // namespace

// ---- the link ----------------------------------------------------------------------------------

bool VerbsNodeChannel::ensure_link(TimePoint deadline) {
  if (link_) return true;
  if (!offered_) return false;
  if (!target_->may_try(Clock::now())) return false;
  try {
    connect_link(deadline);
    target_->record().linked();
    return true;
  } catch (const Error& error) {
    drop_link(error.what(), deadline);
    return false;
  }
}

void VerbsNodeChannel::connect_link(TimePoint deadline) {
  link_ = target_->initiator().open();
  const wire::LinkEndpoint mine = link_->endpoint();
  const Channel::Frame frame =
      channel_->call(wire::Type::kLink, wire::as_bytes(mine), {}, deadline);
  wire::PayloadReader reader(frame.payload, "LINK reply");
  const auto head = reader.take<wire::LinkReply>();
  const wire::Bytes rows = reader.take_rows<wire::LinkRegion>(head.count, wire::kLinkRegionsMax);
  reader.finish();
  take_regions(head, rows);
  link_->connect(head.endpoint);
  block_keys_ = (head.flags & wire::LinkReply::kBlockKeys) != 0;
  if (!block_keys_) words_ = link_->allocate(kWordsBytes);
}

void VerbsNodeChannel::take_regions(const wire::LinkReply& head, wire::Bytes rows) {
  address_ = head.address;
  region_bytes_ = head.region_bytes;
  regions_.clear();
  for (std::uint32_t i = 0; i < head.count; ++i) {
    const auto region = wire::row_at<wire::LinkRegion>(rows, i);
    if (region.region_offset > region_bytes_ ||
        region.bytes > region_bytes_ - region.region_offset) {
      fail_protocol("a part of the node's region lies outside of it");
    }
    regions_.push_back(region);
  }
}

void VerbsNodeChannel::drop_link(const std::string& reason, TimePoint deadline) {
  target_->failed(reason);
  link_.reset();  // from here on nothing is read into our memory
  bounce_ = {};
  words_ = {};
  regions_.clear();
  block_keys_ = false;
  // And when this is answered, or the connection is closed, nothing is written into the node's.
  if (channel_->open()) channel_->call(wire::Type::kUnlink, {}, {}, deadline);
}

void VerbsNodeChannel::fall_back(const std::string& reason) {
  fell_back_ = true;
  const std::uint64_t untold = target_->record().fell_back(Clock::now());
  if (untold > 0) target_->initiator().tell_fallbacks(untold, offered_ ? reason : kNotOffered);
}

std::uint32_t VerbsNodeChannel::remote_key(std::uint64_t offset, std::uint64_t bytes,
                                           std::uint32_t access,
                                           wire::VerbsKey block_key) const noexcept {
  if (offset > region_bytes_ || bytes > region_bytes_ - offset) return 0;
  if (block_keys_) return block_key;
  for (const wire::LinkRegion& region : regions_) {
    if ((region.access & access) != access || offset < region.region_offset) continue;
    if (offset + bytes <= region.region_offset + region.bytes) return region.key;
  }
  return 0;
}

LocalMemory& VerbsNodeChannel::bounce() {
  if (bounce_.bytes == 0) bounce_ = link_->allocate(target_->initiator().bounce_bytes());
  return bounce_;
}

// ---- reads -------------------------------------------------------------------------------------

// How many rows from the front can be read by RDMA, or need not be read.
std::uint32_t VerbsNodeChannel::reachable(const Settled& settled) const noexcept {
  for (std::uint32_t i = 0; i < settled.rows.size(); ++i) {
    const wire::WaitRow& row = settled.rows[i];
    if (row.state != wire::BlockState::kReady) continue;
    const bool guarded = block_keys_ || remote_key(row.generation_word, sizeof(std::uint64_t),
                                                   wire::LinkRegion::kRead, 0) != 0;
    const wire::VerbsKey key = block_keys_ ? settled.keys[i] : 0;
    if (!guarded || remote_key(row.region_offset, row.length, wire::LinkRegion::kRead, key) == 0) {
      return i;
    }
  }
  return static_cast<std::uint32_t>(settled.rows.size());
}

std::uint32_t VerbsNodeChannel::read(const wire::SessionId& session, std::uint32_t first,
                                     std::span<const std::uint32_t> lengths,
                                     const BlockPlaces& places, const TransferOptions& options,
                                     TimePoint deadline, std::span<BlockStatus> statuses) {
  if (!ensure_link(deadline)) {
    fall_back(target_->record().last_failure());
    return TcpNodeChannel::read(session, first, lengths, places, options, deadline, statuses);
  }
  const Settled settled = wait(session, first, lengths, 0, deadline);
  if (!settled.session_known) return 0;
  const std::uint32_t count = reachable(settled);
  if (count == 0) {
    drop_link(kNoKey, deadline);
    fall_back(kNoKey);
    return TcpNodeChannel::read(session, first, lengths, places, options, deadline, statuses);
  }
  try {
    read_rows(settled, count, places, options, batch_deadline(deadline), statuses);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kUnavailable) throw;
    drop_link(error.what(), deadline);
    fall_back(error.what());
    // Nothing was released: the node gives the same answer once more.
    return TcpNodeChannel::read(session, first, lengths, places, options, deadline, statuses);
  }
  target_->succeeded();
  fell_back_ = false;
  for (std::uint32_t i = 0; i < count; ++i) {
    if (statuses[i] == BlockStatus::kCorrupt) report(session, first + i);
  }
  const bool cancelled = options.is_cancelled();
  release(session, first, cancelled ? static_cast<std::uint32_t>(settled.rows.size()) : count);
  if (!cancelled) return count;
  std::fill(statuses.begin() + count, statuses.end(), BlockStatus::kCancelled);
  return static_cast<std::uint32_t>(statuses.size());
}

// The blocks of one call, read in as few batches as the bounce memory allows.
class VerbsNodeChannel::Batch {
 public:
  Batch(VerbsNodeChannel& channel, const Settled& settled, const BlockPlaces& places,
        const TransferOptions& options, TimePoint deadline, std::span<BlockStatus> statuses)
      : channel_(channel),
        settled_(settled),
        places_(places),
        options_(options),
        deadline_(deadline),
        statuses_(statuses),
        moves_(*channel.link_) {}

  void add(std::uint32_t i) {
    const wire::WaitRow& row = settled_.rows[i];
    const std::uint64_t remote = channel_.address_ + row.region_offset;
    const wire::VerbsKey block_key = channel_.block_keys_ ? settled_.keys[i] : 0;
    const std::uint32_t key =
        channel_.remote_key(row.region_offset, row.length, wire::LinkRegion::kRead, block_key);
    if (moves_.add_direct(places_(i), remote, key)) {
      done_.push_back({.row = i, .bounced = false});
      return;
    }
    for (std::uint64_t at = 0; at < row.length;) {
      at += moves_.add_bounced(channel_.bounce(), i, at, row.length, remote, key);
      if (at == row.length) break;
      run();
    }
    done_.push_back({.row = i, .bounced = true});
  }

  // Reads what was added, and gives the blocks that are complete their status.
  void run() {
    if (!channel_.block_keys_) add_words();
    moves_.run(VerbsOpcode::kRead, deadline_);
    std::size_t next = 0;
    for (const VerbsBatch::Slice& slice : moves_.slices()) {
      if (slice.offset == 0) crc_ = 0;
      const auto part = slice_segments(places_(slice.block), slice.offset, slice.bytes);
      copy_scatter(part, channel_.bounce_.data + slice.bounce_offset,
                   checksum(slice.block) ? &crc_ : nullptr);
      if (slice.offset + slice.bytes == settled_.rows[slice.block].length) {
        while (done_[next].row != slice.block) ++next;
        done_[next].crc = crc_;
      }
    }
    for (std::size_t i = 0; i < done_.size(); ++i) finish(done_[i], i);
    done_.clear();
    moves_.clear();
  }

 private:
  struct Done {  // read completely once the batch is
    std::uint32_t row = 0;
    bool bounced = false;
    std::uint32_t crc = 0;
  };

  bool checksum(std::uint32_t i) const {
    return options_.checksums && (settled_.rows[i].flags & Entry::kHasCrc) != 0;
  }

  // Whoever reads a generation word after the bytes that it guards knows whether they were taken
  // back meanwhile: the first waits for all READs before it.
  void add_words() {
    for (std::size_t i = 0; i < done_.size(); ++i) {
      const std::uint64_t offset = settled_.rows[done_[i].row].generation_word;
      moves_.add_piece({.local_address = reinterpret_cast<std::uintptr_t>(channel_.words_.data) +
                                         i * sizeof(std::uint64_t),
                        .local_key = channel_.words_.key,
                        .remote_address = channel_.address_ + offset,
                        .remote_key = channel_.remote_key(offset, sizeof(std::uint64_t),
                                                          wire::LinkRegion::kRead, 0),
                        .bytes = sizeof(std::uint64_t),
                        .fenced = i == 0});
    }
  }

  void finish(const Done& done, std::size_t place_of_word) {
    const wire::WaitRow& row = settled_.rows[done.row];
    if (!channel_.block_keys_) {
      std::uint64_t word;
      std::memcpy(&word, channel_.words_.data + place_of_word * sizeof word, sizeof word);
      if (word != row.generation_value) {
        statuses_[done.row] = BlockStatus::kMiss;
        return;
      }
    }
    const std::uint32_t crc = !checksum(done.row) ? row.crc32c
                              : done.bounced      ? done.crc
                                                  : crc_of(places_(done.row));
    statuses_[done.row] = crc == row.crc32c ? BlockStatus::kOk : BlockStatus::kCorrupt;
  }

  VerbsNodeChannel& channel_;
  const Settled& settled_;
  const BlockPlaces& places_;
  const TransferOptions& options_;
  const TimePoint deadline_;
  const std::span<BlockStatus> statuses_;
  VerbsBatch moves_;
  std::vector<Done> done_;
  std::uint32_t crc_ = 0;  // of the block that is in the bounce memory, as far as it was copied
};

void VerbsNodeChannel::read_rows(const Settled& settled, std::uint32_t count,
                                 const BlockPlaces& places, const TransferOptions& options,
                                 TimePoint deadline, std::span<BlockStatus> statuses) {
  Batch batch(*this, settled, places, options, deadline, statuses);
  for (std::uint32_t i = 0; i < count; ++i) {
    const wire::WaitRow& row = settled.rows[i];
    if (row.state != wire::BlockState::kReady) {
      statuses[i] =
          row.state == wire::BlockState::kMiss ? BlockStatus::kMiss : BlockStatus::kDeviceError;
    } else if (options.is_cancelled()) {
      statuses[i] = BlockStatus::kCancelled;
    } else {
      batch.add(i);
    }
  }
  batch.run();
}

// ---- writes ------------------------------------------------------------------------------------

// Before the offers are made: a node that knows of the link answers them with keys.
void VerbsNodeChannel::prepare_write(TimePoint deadline) { ensure_link(deadline); }

void VerbsNodeChannel::write_granted(std::span<Granted> granted, const BlockPlaces& places,
                                     const TransferOptions& options, TimePoint deadline) {
  if (!link_) {
    fall_back(target_->record().last_failure());
    return TcpNodeChannel::write_granted(granted, places, options, deadline);
  }
  fell_back_ = false;
  const TimePoint limit = batch_deadline(deadline);
  VerbsBatch batch(*link_);
  std::size_t sent = 0;   // blocks that are written
  std::size_t added = 0;  // and those that will be when the batch has run
  const auto run = [&] {
    batch.run(VerbsOpcode::kWrite, limit);
    batch.clear();
    for (; sent < added; ++sent) granted[sent].written = true;
  };
  try {
    for (; added < granted.size() && !options.is_cancelled(); ++added) {
      Granted& one = granted[added];
      const std::uint32_t key =
          remote_key(one.region_offset, one.length, wire::LinkRegion::kWrite, one.key);
      if (key == 0) throw Error(ErrorKind::kUnavailable, kNoKey);
      const std::uint64_t remote = address_ + one.region_offset;
      one.crc32c = 0;
      if (batch.add_direct(places(one.block), remote, key)) {
        if (options.checksums) one.crc32c = crc_of(places(one.block));
        continue;
      }
      for (std::uint64_t at = 0; at < one.length;) {
        const std::size_t bytes =
            batch.add_bounced(bounce(), one.block, at, one.length, remote, key);
        const auto part = slice_segments(places(one.block), at, bytes);
        if (bytes > 0) {
          copy_gather(bounce_.data + batch.slices().back().bounce_offset, part,
                      options.checksums ? &one.crc32c : nullptr);
        }
        at += bytes;
        if (at < one.length) run();
      }
    }
    run();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kUnavailable) throw;
    drop_link(error.what(), deadline);
    // Once unlinked, the node takes only what came in the stream for written.
    for (Granted& one : granted) one.written = false;
    fall_back(error.what());
    return TcpNodeChannel::write_granted(granted, places, options, deadline);
  }
  if (sent == granted.size()) target_->succeeded();
}

}  // namespace hymcache
