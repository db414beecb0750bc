#include "bench/csrc/index_filler.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace hymcache::bench {
namespace {

constexpr std::uint32_t kObjectBytes = 16u << 20;
constexpr std::chrono::seconds kTimeout{30};

TimePoint deadline() { return Clock::now() + kTimeout; }

// SplitMix64 (Steele, Lea, Flood 2014): keys must look uniform, as real ones do.
std::uint64_t mix(std::uint64_t z) {
  z += 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

ObjectKey make_key(NodeId node, std::uint64_t index) {
  const std::uint64_t halves[2] = {mix(index * 2 + node), mix(~(index * 2 + node))};
  ObjectKey key;
  static_assert(sizeof halves == sizeof key);
  std::memcpy(key.data(), halves, sizeof key);
  return key;
}

}  // namespace

IndexFiller::IndexFiller(const std::string& master, const std::string& name, NodeId node)
    : node_(node) {
  Identity identity;
  identity.role = wire::Role::kNode;
  identity.name = name;
  identity.node = node;
  identity.incarnation = mix(node);
  channel_ = Channel::connect(Endpoint::parse(master), identity, wire::Role::kMaster, deadline());
  wire::Member member;
  member.node = node;
  member.incarnation = identity.incarnation;
  member.capacity_bytes = 1ull << 44;
  std::copy_n(name.data(), std::min(name.size(), member.name.size() - 1), member.name.data());
  const std::string nowhere = "127.0.0.1:1";
  std::ranges::copy(nowhere, member.tcp.data());
  channel_->call(wire::Type::kRegister, wire::as_bytes(member), {}, deadline());
}

Entry IndexFiller::next_entry() {
  Entry entry;
  entry.key = make_key(node_, published_);
  entry.address = published_ * kObjectBytes;
  entry.generation = ++published_;
  entry.name_space = 1;
  entry.length = kObjectBytes;
  entry.node = node_;
  entry.flags = Entry::kValid;
  return entry;
}

std::uint64_t IndexFiller::publish(std::uint64_t count) {
  std::uint64_t accepted = 0;
  std::vector<Entry> rows;
  while (count > 0) {
    rows.resize(std::min<std::uint64_t>(count, wire::kPublishRowsMax));
    std::ranges::generate(rows, [&] { return next_entry(); });
    wire::PublishRequest request;
    request.count = static_cast<std::uint32_t>(rows.size());
    const Channel::Frame frame =
        channel_->call(wire::Type::kPublish, wire::as_bytes(request),
                       std::as_bytes(std::span<const Entry>(rows)), deadline());
    accepted +=
        wire::PayloadReader(frame.payload, "PUBLISH reply").take<wire::PublishReply>().accepted;
    count -= rows.size();
  }
  return accepted;
}

void IndexFiller::heartbeat() {
  wire::HeartbeatRequest request;
  request.capacity_bytes = 1ull << 44;
  request.used_bytes = published_ * kObjectBytes;
  request.objects = published_;
  channel_->call(wire::Type::kHeartbeat, wire::as_bytes(request), {}, deadline());
}

std::vector<ObjectKey> IndexFiller::last_keys(std::size_t count) const {
  std::vector<ObjectKey> keys;
  const std::uint64_t first = published_ - std::min<std::uint64_t>(published_, count);
  for (std::uint64_t i = first; i < published_; ++i) keys.push_back(make_key(node_, i));
  return keys;
}

}  // namespace hymcache::bench
