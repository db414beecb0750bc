#include "kv_manager/csrc/storage_node.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cstring>

#include "transport/csrc/host_id.h"

namespace hymcache {
namespace {

constexpr auto kTick = std::chrono::milliseconds(50);
constexpr std::uint64_t kTicksPerSecond = 20;
// Flushes wait for a quiet moment: no read under way, and the writers done with what they write
// now, so that the log grows in large batches. They do not wait for ever, and not at all once the
// write buffer is half full.
constexpr auto kQuiet = std::chrono::milliseconds(50);
constexpr auto kFlushPatience = std::chrono::seconds(1);

std::uint64_t nanoseconds_since_epoch() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::system_clock::now().time_since_epoch())
                                        .count());
}

}  // namespace

StorageNode::StorageNode(NodeId node, StorageNodeOptions options, std::unique_ptr<Device> device)
    : node_(node),
      incarnation_(nanoseconds_since_epoch()),
      options_(std::move(options)),
      device_(std::move(device)),
      thread_("hymcache-node"),
      loop_(thread_.loop()) {
  try {
    loop_.call([this] { start(); });
  } catch (...) {
    stop();  // the loop first: it must not run while what it looks at goes
    throw;
  }
}

StorageNode::~StorageNode() { stop(); }

void StorageNode::stop() {
  thread_.stop();
  // The loop is at rest: connections end before what they refer to.
  masters_.clear();
  server_.reset();
  sessions_.reset();
  reported_.reset();
  verbs_.reset();  // nobody reaches the device's memory when it goes
}

void StorageNode::start() {
  directory_ = std::make_unique<ObjectDirectory>(
      *device_, node_, incarnation_, options_.objects_max,
      ObjectDirectory::Listener{.stored =
                                    [this](const Entry& entry) {
                                      for (const auto& master : masters_) master->publish(entry);
                                    },
                                .gone =
                                    [this](const ObjectKey& key, Generation generation) {
                                      for (const auto& master : masters_)
                                        master->withdraw(key, generation);
                                    }});
  sessions_ = std::make_unique<SessionTable>(
      loop_, *device_, *directory_, options_.sessions,
      [this](SessionTable::Answer answer) { reply(std::move(answer)); });
  writes_ = std::make_unique<WriteAdmission>(loop_, *device_, *directory_, options_.grant_lease);
  if (options_.verbs) {
    const DeviceRegion& region = device_->region();
    verbs_ = std::make_unique<VerbsPeers>(
        options_.verbs, reinterpret_cast<std::uintptr_t>(region.base), region.bytes);
    sessions_->on_end = [this](const wire::SessionId& session) { verbs_->end(session); };
    writes_->on_end = [this](std::uint64_t grant) { verbs_->end_grant(grant); };
  }
  reported_ = std::make_unique<ReportedObjects>(*device_, *directory_, [this](const Entry&) {
    ++corrupt_dropped_;
    options_.warn("an object does not match its checksum and is dropped");
  });
  device_->on_staged = [this](RequestId request) {
    if (!reported_->on_staged(request)) sessions_->on_staged(request);
  };
  device_->on_flush_failed = [this](std::uint64_t address, int error) {
    ++flush_failures_;
    options_.warn("the device could not write an object: " + std::string(std::strerror(error)));
    directory_->forget_lost(address);
  };
  Identity identity{.role = wire::Role::kNode,
                    .name = options_.name,
                    .node = node_,
                    .incarnation = incarnation_,
                    .features = verbs_ ? wire::kFeatureVerbs : 0,
                    .mac = options_.mac,
                    .version_max = options_.protocol_version_max};
  FrameServerOptions server;
  server.connections_max = options_.connections_max;
  server.listen.push_back(options_.listen);
  if (!options_.unix_path.empty()) {
    server.listen.push_back({.host = options_.unix_path, .port = 0, .is_unix = true});
  }
  server_ = std::make_unique<FrameServer>(loop_, identity, server,
                                          static_cast<FrameServer::Handler&>(*this));
  loop_.watch(device_->event_fd(), EPOLLIN, [this](std::uint32_t) { drive_device(); });
  describe();  // throws here for what could not be told to a master
  for (const Endpoint& master : options_.masters) {
    masters_.push_back(std::make_unique<MasterLink>(
        loop_, master, identity, *directory_,
        MasterLink::Hooks{.describe = [this] { return describe(); },
                          .heartbeat =
                              [this] {
                                const DeviceStats device = device_->stats();
                                return wire::HeartbeatRequest{
                                    .capacity_bytes = device.capacity_bytes,
                                    .used_bytes = device.used_bytes,
                                    .objects = directory_->objects(),
                                    .sessions = sessions_->stats().sessions};
                              },
                          .drain_changed = [this] { apply_drain(); },
                          .log = options_.log,
                          .warn = options_.warn}));
  }
  tick_ = loop_.after(kTick, [this] { on_tick(); });
}

wire::Member StorageNode::describe() const {
  const DeviceStats device = device_->stats();
  Endpoint reachable = server_->endpoints().front();
  if (!options_.advertise_host.empty()) reachable.host = options_.advertise_host;
  wire::Member member;
  member.node = node_;
  member.state = writes_->draining() ? wire::MemberState::kDraining : wire::MemberState::kAlive;
  member.incarnation = incarnation_;
  member.capacity_bytes = device.capacity_bytes;
  member.used_bytes = device.used_bytes;
  member.host = this_host();
  member.name = wire::to_text<64>(options_.name);
  member.tcp = wire::to_text<64>(reachable.text());
  member.unix_path = wire::to_text<112>(options_.unix_path);
  return member;
}

void StorageNode::on_frame(FrameServer::Peer& peer, const wire::Header& header,
                           wire::Bytes payload) {
  const char* const type = wire::type_name(header.type);
  if (header.bulk_bytes > 0 && header.type != wire::Type::kWrite) {
    throw Error(ErrorKind::kProtocol, std::string(type) + " carries no bulk bytes");
  }
  switch (header.type) {
    case wire::Type::kAttach:
      return on_attach(peer, header, payload);
    case wire::Type::kPrefetch:
      return on_prefetch(peer, header, payload);
    case wire::Type::kWait:
      return on_wait(peer, header, payload);
    case wire::Type::kRelease:
      return on_release(wire::read_all<wire::ReleaseRequest>(payload, type));
    case wire::Type::kEnd:
      return sessions_->end(wire::read_all<wire::EndRequest>(payload, type).session);
    case wire::Type::kReport:
      return on_report(payload);
    case wire::Type::kOffer:
      return on_offer(peer, header, payload);
    case wire::Type::kWrite:
      return on_write(peer, header, payload);
    case wire::Type::kCommit:
      return on_commit(peer, header, payload);
    case wire::Type::kLink:
      return on_link(peer, header, payload);
    case wire::Type::kUnlink:
      return on_unlink(peer, header, payload);
    default:
      throw wire::Unexpected(std::string("a storage node does not take ") + type + " frames");
  }
}

void StorageNode::on_attach(FrameServer::Peer& peer, const wire::Header& header,
                            wire::Bytes payload) {
  wire::PayloadReader(payload, "ATTACH").finish();
  if (!peer.is_unix()) {
    throw wire::Unexpected("ATTACH needs a connection over the UNIX socket");
  }
  const DeviceRegion& region = device_->region();
  const wire::AttachReply attach{.region_bytes = region.bytes,
                                 .read_write_offset = region.read_write_offset,
                                 .incarnation = incarnation_};
  attached_.insert(peer.id());
  peer.reply(header, wire::as_bytes(attach), {}, region.fd);
}

void StorageNode::on_link(FrameServer::Peer& peer, const wire::Header& header,
                          wire::Bytes payload) {
  const auto endpoint = wire::read_all<wire::LinkEndpoint>(payload, "LINK");
  if (!verbs_) throw wire::Unexpected("this node is without RDMA");
  attached_.erase(peer.id());
  try {
    const wire::PayloadWriter answer = verbs_->connect(peer.id(), endpoint);
    attached_.insert(peer.id());
    peer.reply(header, answer.bytes());
  } catch (const Error& error) {
    peer.socket().send_error(header.request_id, wire::ErrorCode::kBusy, error.what());
  }
}

void StorageNode::on_unlink(FrameServer::Peer& peer, const wire::Header& header,
                            wire::Bytes payload) {
  wire::PayloadReader(payload, "UNLINK").finish();
  if (!verbs_) throw wire::Unexpected("this node is without RDMA");
  verbs_->close(peer.id());
  attached_.erase(peer.id());
  peer.reply(header, {});
}

// Keys first: none may be good for memory that is another's.
void StorageNode::on_release(const wire::ReleaseRequest& request) {
  if (verbs_) verbs_->release(request.session, request.first, request.count);
  sessions_->release(request);
}

void StorageNode::on_prefetch(FrameServer::Peer& peer, const wire::Header& header,
                              wire::Bytes payload) {
  wire::PayloadReader reader(payload, "PREFETCH");
  const auto request = reader.take<wire::PrefetchRequest>();
  const wire::Bytes rows =
      reader.take_rows<wire::PrefetchRow>(request.count, wire::kPrefetchRowsMax);
  reader.finish();
  if (sessions_->prefetch(peer.id(), request, rows) == SessionTable::Result::kBusy) {
    // No answer is due; the reader will learn it from its WAIT. Said for who reads the stream.
    peer.socket().send_error(header.request_id, wire::ErrorCode::kNoSession,
                             "too many prefetch sessions or blocks on this node");
  }
}

void StorageNode::on_wait(FrameServer::Peer& peer, const wire::Header& header,
                          wire::Bytes payload) {
  const auto request = wire::read_all<wire::WaitRequest>(payload, "WAIT");
  if (sessions_->wait(peer.id(), header.request_id, request) == SessionTable::Result::kNoSession) {
    peer.socket().send_error(header.request_id, wire::ErrorCode::kNoSession,
                             "the prefetch session is not known here (any more)");
  }
}

void StorageNode::reply(SessionTable::Answer answer) {
  // While the server itself goes, what it was sending comes back, and others' waits are answered.
  FrameServer::Peer* const peer = server_ ? server_->find(answer.peer) : nullptr;
  if (peer == nullptr) {
    if (answer.sent) answer.sent();
    return;
  }
  if (!answer.session_known) {
    peer->socket().send_error(answer.request_id, wire::ErrorCode::kNoSession,
                              "the prefetch session has ended");
    return;
  }
  const wire::WaitReply head{.first = answer.first,
                             .count = static_cast<std::uint32_t>(answer.rows.size())};
  const wire::Bytes rows = std::as_bytes(std::span(answer.rows));
  if (answer.inline_bytes) {
    if (verbs_) verbs_->release(answer.session, answer.first, head.count);
    peer->socket().send_bulk(wire::Type::kWait, wire::kFlagResponse, answer.request_id,
                             wire::as_bytes(head), rows, std::move(answer.bulk),
                             std::move(answer.sent));
  } else if (verbs_ && verbs_->wants_keys(answer.peer)) {
    wire::PayloadWriter payload;
    payload.put(head);
    payload.put_bytes(rows);
    verbs_->put_read_keys(answer.peer, answer.session, answer.first, answer.rows, payload);
    peer->socket().send(wire::Type::kWait, wire::kFlagResponse, answer.request_id, payload.bytes(),
                        {});
  } else {
    peer->socket().send(wire::Type::kWait, wire::kFlagResponse, answer.request_id,
                        wire::as_bytes(head), rows);
  }
}

void StorageNode::on_report(wire::Bytes payload) {
  const auto request = wire::read_all<wire::ReportRequest>(payload, "REPORT");
  ++reports_;
  const Entry* const entry = sessions_->entry_of(request.session, request.index);
  if (entry != nullptr) reported_->report(*entry);
}

void StorageNode::on_offer(FrameServer::Peer& peer, const wire::Header& header,
                           wire::Bytes payload) {
  wire::PayloadReader reader(payload, "OFFER");
  const auto request = reader.take<wire::OfferRequest>();
  const wire::Bytes rows = reader.take_rows<wire::OfferRow>(request.count, wire::kOfferRowsMax);
  reader.finish();
  scratch_.clear();
  scratch_.put(wire::OfferReply{.count = request.count});
  bool broken = false;
  std::vector<wire::OfferReplyRow> answers;  // for their keys
  std::vector<std::uint32_t> lengths;
  const bool wants_keys = verbs_ && verbs_->wants_keys(peer.id());
  for (std::uint32_t i = 0; i < request.count; ++i) {
    const auto offered = wire::row_at<wire::OfferRow>(rows, i);
    wire::OfferReplyRow row{.state = wire::OfferState::kPrefixBroken};
    if (!broken) row = writes_->offer(peer.id(), request.name_space, offered);
    if (wants_keys) {
      answers.push_back(row);
      lengths.push_back(offered.length);
    }
    buffer_was_full_ |= row.state == wire::OfferState::kBufferFull;
    const bool kept =
        row.state == wire::OfferState::kGranted || row.state == wire::OfferState::kStored;
    if (!kept && (request.flags & wire::OfferRequest::kPrefixOrder) != 0) broken = true;
    scratch_.put(row);
  }
  if (wants_keys) verbs_->put_write_keys(peer.id(), answers, lengths, scratch_);
  peer.reply(header, scratch_.bytes());
  if (buffer_was_full_) drive_device();
}

void StorageNode::on_write(FrameServer::Peer& peer, const wire::Header& header,
                           wire::Bytes payload) {
  wire::PayloadReader reader(payload, "WRITE");
  const auto request = reader.take<wire::WriteRequest>();
  const wire::Bytes rows = reader.take_rows<wire::WriteRow>(request.count, wire::kOfferRowsMax);
  reader.finish();
  std::vector<iovec> where(request.count);
  std::vector<std::uint64_t> grants(request.count);
  std::uint64_t bytes = 0;
  bool known = true;
  for (std::uint32_t i = 0; i < request.count; ++i) {
    const auto row = wire::row_at<wire::WriteRow>(rows, i);
    bytes += row.length;
    if (known && writes_->begin_write(peer.id(), row, &where[i])) {
      grants[i] = row.grant;
    } else {
      known = false;  // a lease that ran out: the bytes are thrown away, COMMIT will say so
    }
  }
  if (bytes != header.bulk_bytes) {
    throw Error(ErrorKind::kProtocol, "WRITE: the rows name " + std::to_string(bytes) +
                                          " bytes, the frame has " +
                                          std::to_string(header.bulk_bytes));
  }
  if (!known || bytes == 0) {
    for (const std::uint64_t grant : grants) {
      if (grant != 0) writes_->cancel_write(grant);
    }
    return;
  }
  peer.socket().receive_bulk(std::move(where), [this, grants = std::move(grants)] {
    for (const std::uint64_t grant : grants) writes_->end_write(grant);
  });
}

void StorageNode::on_commit(FrameServer::Peer& peer, const wire::Header& header,
                            wire::Bytes payload) {
  wire::PayloadReader reader(payload, "COMMIT");
  const auto request = reader.take<wire::CommitRequest>();
  const wire::Bytes rows = reader.take_rows<wire::CommitRow>(request.count, wire::kOfferRowsMax);
  reader.finish();
  const bool writes_by_itself = attached_.contains(peer.id());
  scratch_.clear();
  scratch_.put(wire::CommitReply{.count = request.count});
  for (std::uint32_t i = 0; i < request.count; ++i) {
    scratch_.put(
        writes_->commit(peer.id(), wire::row_at<wire::CommitRow>(rows, i), writes_by_itself));
  }
  // The masters are told first: who hears that a block is stored will usually find it.
  for (const auto& master : masters_) master->flush();
  peer.reply(header, scratch_.bytes());
  last_commit_ = loop_.now();
  drive_device();
}

void StorageNode::on_peer_gone(FrameServer::Peer& peer) {
  attached_.erase(peer.id());
  if (verbs_) verbs_->close(peer.id());
  sessions_->on_peer_gone(peer.id());
  writes_->on_peer_gone(peer.id());
}

bool StorageNode::may_flush() {
  const DeviceStats device = device_->stats();
  const TimePoint now = loop_.now();
  const bool quiet = device.reads_in_flight == 0 && now - last_commit_ >= kQuiet;
  const bool allowed = quiet || buffer_was_full_ ||
                       device.write_buffer_used_bytes * 2 > device.write_buffer_bytes ||
                       now - last_flush_turn_ > kFlushPatience;
  if (!allowed) return false;
  last_flush_turn_ = now;
  buffer_was_full_ = false;
  return true;
}

void StorageNode::drive_device() {
  if (drive_scheduled_) return;
  drive_scheduled_ = true;
  loop_.defer([this] {
    drive_scheduled_ = false;
    device_->drive(may_flush());
    reported_->pump();  // slots may have become free
    sessions_->pump();
  });
}

void StorageNode::on_tick() {
  drive_device();
  if (++ticks_ % kTicksPerSecond == 0) {
    sessions_->expire();
    writes_->expire();
  }
  tick_ = loop_.after(kTick, [this] { on_tick(); });
}

void StorageNode::apply_drain() {
  const bool wanted =
      drain_by_admin_ || std::any_of(masters_.begin(), masters_.end(),
                                     [](const auto& master) { return master->drain_wanted(); });
  if (wanted == writes_->draining()) return;
  writes_->set_draining(wanted);
  options_.log(wanted ? "draining: no more writes are taken" : "taking writes again");
}

void StorageNode::set_draining(bool draining) {
  loop_.call([&] {
    drain_by_admin_ = draining;
    apply_drain();
  });
}

std::vector<std::string> StorageNode::endpoints() {
  std::vector<std::string> endpoints;
  loop_.call([&] {
    for (const Endpoint& endpoint : server_->endpoints()) endpoints.push_back(endpoint.text());
  });
  return endpoints;
}

std::string StorageNode::device_description() {
  std::string description;
  loop_.call([&] { description = device_->description(); });
  return description;
}

StorageNodeStats StorageNode::stats() {
  StorageNodeStats stats;
  loop_.call([&] {
    stats.node = node_;
    stats.incarnation = incarnation_;
    stats.objects = directory_->objects();
    stats.object_bytes = directory_->object_bytes();
    stats.index_bytes = directory_->index_bytes();
    stats.corrupt_dropped = corrupt_dropped_;
    stats.reports = reports_;
    stats.flush_failures = flush_failures_;
    stats.draining = writes_->draining();
    stats.device = device_->stats();
    stats.sessions = sessions_->stats();
    stats.writes = writes_->stats();
    if (verbs_) stats.verbs = verbs_->stats();
    stats.server = server_->stats();
    for (const auto& master : masters_) stats.masters.push_back(master->stats());
  });
  return stats;
}

}  // namespace hymcache
