#include "lookup/csrc/read_plan.h"

#include <cstring>

#include "transport/csrc/crc32c.h"

namespace hymcache {
namespace {

struct PlanHeader {
  std::uint32_t magic = 0x50594D48;  // "HYMP" in memory
  std::uint32_t crc32c = 0;          // of everything behind the header
  std::uint32_t rows = 0;
  std::uint32_t sessions = 0;
};
static_assert(sizeof(PlanHeader) == 16);

struct PlanSession {
  NodeId node = 0;
  std::uint32_t reserved = 0;
  wire::SessionId id{};
};
static_assert(sizeof(PlanSession) == 24);

}  // namespace

const ReadPlan::Session* ReadPlan::session_of(NodeId node) const noexcept {
  for (const Session& session : sessions) {
    if (session.node == node) return &session;
  }
  return nullptr;
}

std::string ReadPlan::serialize() const {
  std::string body;
  body.reserve(sessions.size() * sizeof(PlanSession) + rows.size() * sizeof(Entry));
  for (const Session& session : sessions) {
    const PlanSession row{.node = session.node, .reserved = 0, .id = session.id};
    body.append(reinterpret_cast<const char*>(&row), sizeof row);
  }
  body.append(reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(Entry));
  const PlanHeader header{.crc32c = crc32c(0, body.data(), body.size()),
                          .rows = static_cast<std::uint32_t>(rows.size()),
                          .sessions = static_cast<std::uint32_t>(sessions.size())};
  return std::string(reinterpret_cast<const char*>(&header), sizeof header) + body;
}

ReadPlan ReadPlan::parse(std::string_view bytes) {
  const auto bad = [] { return Error(ErrorKind::kProtocol, "this is not a read plan"); };
  PlanHeader header;
  if (bytes.size() < sizeof header) throw bad();
  std::memcpy(&header, bytes.data(), sizeof header);
  const std::string_view body = bytes.substr(sizeof header);
  const std::uint64_t sessions_bytes = std::uint64_t{header.sessions} * sizeof(PlanSession);
  const std::uint64_t rows_bytes = std::uint64_t{header.rows} * sizeof(Entry);
  if (header.magic != PlanHeader{}.magic || body.size() != sessions_bytes + rows_bytes ||
      header.crc32c != crc32c(0, body.data(), body.size())) {
    throw bad();
  }
  ReadPlan plan;
  plan.sessions.reserve(header.sessions);
  for (std::uint32_t i = 0; i < header.sessions; ++i) {
    PlanSession row;
    std::memcpy(&row, body.data() + i * sizeof row, sizeof row);
    plan.sessions.push_back({.node = row.node, .id = row.id});
  }
  plan.rows.resize(header.rows);
  if (rows_bytes == 0) return plan;  // then there is no memory to copy to
  std::memcpy(static_cast<void*>(plan.rows.data()), body.data() + sessions_bytes, rows_bytes);
  return plan;
}

}  // namespace hymcache
