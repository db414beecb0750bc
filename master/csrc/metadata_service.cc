#include "master/csrc/metadata_service.h"

#include <algorithm>
#include <array>

namespace hymcache {
namespace {

// A piece of the sweep takes some tens of microseconds, so that no lookup waits long behind it;
// half a million rows a second are looked at.
constexpr std::uint32_t kSweepRows = 512;
constexpr auto kSweepPause = std::chrono::milliseconds(1);

[[noreturn]] void malformed(const std::string& message) {
  throw Error(ErrorKind::kProtocol, message);
}

Identity make_identity(const MasterOptions& options, std::uint64_t incarnation) {
  Identity identity;
  identity.role = wire::Role::kMaster;
  identity.name = options.name;
  identity.incarnation = incarnation;
  identity.mac = options.mac;
  return identity;
}

FrameServerOptions server_options(const MasterOptions& options) {
  FrameServerOptions server;
  server.listen = options.listen;
  server.connections_max = options.connections_max;
  return server;
}

std::uint32_t lease_ms(const MemberTable& members) {
  return static_cast<std::uint32_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(members.lease()).count());
}

// A name is shown to people and becomes a label of metrics.
void check_member(const wire::Member& member) {
  const auto ends = [](const auto& text) { return text.back() == '\0'; };
  if (!ends(member.name) || !ends(member.tcp) || !ends(member.unix_path)) {
    malformed("REGISTER: a text does not end within its field");
  }
  const std::string name = wire::from_text(member.name);
  const auto end = std::find(member.name.begin(), member.name.end(), '\0');
  const bool plain =
      std::all_of(member.name.begin(), end, [](char c) { return c > 32 && c < 127; });
  if (name.empty() || !plain) malformed("REGISTER: the node has no name in plain ASCII");
  if (member.node == 0) malformed("REGISTER: a node's id cannot be 0");
  if (member.tcp.front() == '\0' && member.unix_path.front() == '\0') {
    malformed("REGISTER: " + name + " names no endpoint that clients could connect to");
  }
}

std::string refusal_text(const Enrolled& enrolled, const wire::Member& member) {
  const std::string name = wire::from_text(member.name);
  switch (enrolled.state) {
    case EnrollState::kNameTaken:
      return "another live node has the name " + name + " (at " +
             wire::from_text(enrolled.node->member.tcp) + "): give each node its own node.name";
    case EnrollState::kIdTaken:
      return "the live node " + wire::from_text(enrolled.node->member.name) +
             " has the id that the name " + name + " makes: give this node another node.name";
    case EnrollState::kFull:
    case EnrollState::kEnrolled:
      break;
  }
  return "the master has " + std::to_string(wire::kNodesMax) + " live nodes and takes no more";
}

void check_role(const FrameServer::Peer& peer, const wire::Header& header) {
  if (peer.role() == wire::Role::kNode) return;
  throw wire::Unexpected(std::string(wire::type_name(header.type)) +
                         " is for storage nodes, and this peer is none");
}

void refuse(FrameServer::Peer& peer, const wire::Header& header, wire::ErrorCode code,
            const std::string& message) {
  peer.socket().send_error(header.request_id, code, message);
  if (!wire::is_recoverable(code)) peer.socket().close(message, /*flush=*/true);
}

}  // namespace

MetadataService::MetadataService(EventLoop& loop, const MasterOptions& options,
                                 std::uint64_t incarnation, MembersChanged members_changed)
    : loop_(loop),
      members_changed_(std::move(members_changed)),
      members_(options.lease, incarnation),
      catalog_(members_, options.rows_max),
      server_(loop, make_identity(options, incarnation), server_options(options), *this) {
  announce_members();
}

MetadataService::~MetadataService() {
  if (expiry_scheduled_) loop_.cancel(expiry_timer_);
  if (sweep_scheduled_) loop_.cancel(sweep_timer_);
}

void MetadataService::on_frame(Peer& peer, const wire::Header& header, wire::Bytes payload) {
  if (header.bulk_bytes > 0) {
    malformed(std::string("a master takes no bulk bytes: ") + wire::type_name(header.type));
  }
  switch (header.type) {
    case wire::Type::kLookup:
      on_lookup(peer, header, payload);
      return;
    case wire::Type::kMembers:
      on_members(peer, header, payload);
      return;
    case wire::Type::kRegister:
      on_register(peer, header, payload);
      return;
    case wire::Type::kPublish:
    case wire::Type::kWithdraw:
    case wire::Type::kSynced:
    case wire::Type::kHeartbeat:
      on_node_frame(peer, header, payload);
      return;
    default:
      throw wire::Unexpected(std::string("a master does not answer to ") +
                             wire::type_name(header.type));
  }
}

void MetadataService::on_lookup(Peer& peer, const wire::Header& header, wire::Bytes payload) {
  wire::PayloadReader reader(payload, "LOOKUP");
  const auto request = reader.take<wire::LookupRequest>();
  const wire::Bytes raw = reader.take_rows<ObjectKey>(request.count, wire::kLookupKeysMax);
  reader.finish();
  std::array<ObjectKey, wire::kLookupKeysMax> keys;
  std::memcpy(keys.data(), raw.data(), raw.size());

  std::array<Entry, wire::kLookupKeysMax> rows;
  const auto asked = std::span<const ObjectKey>(keys).first(request.count);
  counters_.lookups += 1;
  counters_.lookup_keys += request.count;
  counters_.lookup_hits += catalog_.lookup(asked, rows.data());
  const wire::LookupReply reply{
      .count = request.count, .reserved = 0, .members_version = members_.version()};
  peer.reply(header, wire::as_bytes(reply), std::as_bytes(std::span(rows).first(request.count)));
}

void MetadataService::on_members(Peer& peer, const wire::Header& header, wire::Bytes payload) {
  wire::PayloadReader(payload, "MEMBERS").finish();
  const wire::MembersReply reply{.version = members_.version(),
                                 .count = static_cast<std::uint32_t>(members_.alive_count()),
                                 .reserved = 0};
  wire::PayloadWriter rows(members_.alive_count() * sizeof(wire::Member));
  for (const auto& [id, node] : members_.nodes()) {
    if (node.alive()) rows.put(node.member);
  }
  peer.reply(header, wire::as_bytes(reply), rows.bytes());
}

void MetadataService::on_register(Peer& peer, const wire::Header& header, wire::Bytes payload) {
  wire::PayloadReader reader(payload, "REGISTER");
  const auto member = reader.take<wire::Member>();
  reader.finish();
  check_role(peer, header);
  check_member(member);
  const NodeRecord* const before = members_.renew(peer.id(), loop_.now());
  if (before != nullptr && before->member.node != member.node) {
    throw wire::Unexpected("REGISTER: this connection is that of another node");
  }

  const Enrolled enrolled = members_.enroll(member, peer.id(), loop_.now());
  if (enrolled.state != EnrollState::kEnrolled) {
    ++counters_.registrations_refused;
    const bool full = enrolled.state == EnrollState::kFull;
    refuse(peer, header, full ? wire::ErrorCode::kBusy : wire::ErrorCode::kConflict,
           refusal_text(enrolled, member));
    return;
  }
  ++counters_.registrations;
  if (Peer* const replaced = server_.find(enrolled.replaced); replaced != nullptr) {
    replaced->socket().close("the node has connected anew");
  }
  schedule_expiry();
  schedule_sweep();
  announce_members();
  const wire::RegisterReply reply{.members_version = members_.version(),
                                  .lease_ms = lease_ms(members_),
                                  .epoch = enrolled.node->epoch};
  peer.reply(header, wire::as_bytes(reply));
}

void MetadataService::on_node_frame(Peer& peer, const wire::Header& header, wire::Bytes payload) {
  // Any word of a node renews its lease: one that is busy publishing is alive.
  NodeRecord* const node = members_.renew(peer.id(), loop_.now());
  if (node == nullptr) {
    check_role(peer, header);
    refuse(peer, header, wire::ErrorCode::kUnregistered,
           "the node is not registered here, or its lease has lapsed");
    return;
  }
  switch (header.type) {
    case wire::Type::kPublish:
      return on_publish(peer, *node, header, payload);
    case wire::Type::kWithdraw:
      return on_withdraw(peer, *node, header, payload);
    case wire::Type::kSynced:
      return on_synced(peer, *node, header, payload);
    default:
      return on_heartbeat(peer, *node, header, payload);
  }
}

void MetadataService::on_publish(Peer& peer, NodeRecord& node, const wire::Header& header,
                                 wire::Bytes payload) {
  wire::PayloadReader reader(payload, "PUBLISH");
  const auto request = reader.take<wire::PublishRequest>();
  const wire::Bytes rows = reader.take_rows<Entry>(request.count, wire::kPublishRowsMax);
  reader.finish();
  for (std::uint32_t i = 0; i < request.count; ++i) {
    const auto row = wire::row_at<Entry>(rows, i);
    if (row.node != node.member.node) malformed("PUBLISH: a row is of another node");
    if (!row.valid() || row.generation == 0) malformed("PUBLISH: a row names no object");
  }
  wire::PublishReply reply;
  reply.accepted = catalog_.publish(node, rows);
  reply.refused = request.count - reply.accepted;
  counters_.rows_published += reply.accepted;
  counters_.rows_refused += reply.refused;
  node.refused += reply.refused;
  if ((request.flags & wire::PublishRequest::kNoAnswer) == 0) {
    peer.reply(header, wire::as_bytes(reply));
  }
}

void MetadataService::on_withdraw(Peer& peer, NodeRecord& node, const wire::Header& header,
                                  wire::Bytes payload) {
  wire::PayloadReader reader(payload, "WITHDRAW");
  const auto request = reader.take<wire::WithdrawRequest>();
  const wire::Bytes rows =
      reader.take_rows<wire::WithdrawRow>(request.count, wire::kPublishRowsMax);
  reader.finish();
  wire::WithdrawReply reply;
  reply.removed = catalog_.withdraw(node, rows);
  counters_.rows_withdrawn += reply.removed;
  peer.reply(header, wire::as_bytes(reply));
}

void MetadataService::on_synced(Peer& peer, NodeRecord& node, const wire::Header& header,
                                wire::Bytes payload) {
  wire::PayloadReader(payload, "SYNCED").finish();
  members_.end_sync(node);
  schedule_sweep();
  peer.reply(header, {});
}

void MetadataService::on_heartbeat(Peer& peer, NodeRecord& node, const wire::Header& header,
                                   wire::Bytes payload) {
  wire::PayloadReader reader(payload, "HEARTBEAT");
  const auto request = reader.take<wire::HeartbeatRequest>();
  reader.finish();
  node.member.capacity_bytes = request.capacity_bytes;
  node.member.used_bytes = request.used_bytes;
  node.objects = request.objects;
  node.sessions = request.sessions;
  const wire::HeartbeatReply reply{.members_version = members_.version(),
                                   .lease_ms = lease_ms(members_),
                                   .flags = node.draining ? wire::HeartbeatReply::kDrain : 0,
                                   .refused = node.refused};
  peer.reply(header, wire::as_bytes(reply));
}

void MetadataService::on_peer_gone(Peer& peer) { members_.detach(peer.id()); }

bool MetadataService::drain(NodeId id, bool draining) {
  NodeRecord* const node = members_.find(id);
  if (node == nullptr || node->state == NodeState::kForgotten) return false;
  members_.set_draining(*node, draining);
  announce_members();
  return true;
}

bool MetadataService::forget(NodeId id) {
  NodeRecord* const node = members_.find(id);
  if (node == nullptr || node->state == NodeState::kForgotten) return false;
  if (node->alive()) {
    throw Error(ErrorKind::kConfig, "the node " + wire::from_text(node->member.name) +
                                        " is alive: stop it before it can be forgotten");
  }
  members_.forget(*node, loop_.now());
  announce_members();
  return true;
}

void MetadataService::schedule_expiry() {
  const auto due = members_.next_expiry();
  if (!due || (expiry_scheduled_ && expiry_timer_.when <= *due)) return;
  if (expiry_scheduled_) loop_.cancel(expiry_timer_);
  expiry_scheduled_ = true;
  // Renewing a lease leaves the timer alone: it fires about once a lease, and looks again.
  expiry_timer_ = loop_.after(std::max(*due - Clock::now(), Clock::duration::zero()),
                              [this] { expire_leases(); });
}

void MetadataService::expire_leases() {
  expiry_scheduled_ = false;
  const std::size_t lapsed = members_.expire(loop_.now());
  counters_.leases_lapsed += lapsed;
  if (lapsed > 0) schedule_sweep();
  announce_members();
  schedule_expiry();
}

void MetadataService::schedule_sweep() {
  if (sweep_scheduled_ || catalog_.hidden_rows() == 0) return;
  sweep_scheduled_ = true;
  sweep_timer_ = loop_.after(kSweepPause, [this] {
    sweep_scheduled_ = false;
    counters_.rows_swept += catalog_.sweep(kSweepRows);
    schedule_sweep();
  });
}

void MetadataService::announce_members() {
  if (announced_version_ == members_.version()) return;
  announced_version_ = members_.version();
  members_changed_(announced_version_);
}

}  // namespace hymcache
