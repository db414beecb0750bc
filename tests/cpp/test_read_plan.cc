// Read plans as they travel.
#include <doctest/doctest.h>

#include <random>
#include <string>

#include "hymcache/csrc/error.h"
#include "lookup/csrc/read_plan.h"
#include "tests/cpp/device_fixture.h"

namespace hymcache::testing {
namespace {

ReadPlan random_plan(std::mt19937_64& random) {
  ReadPlan plan;
  plan.rows.resize(random() % 20);
  for (Entry& row : plan.rows) {
    row.address = random();
    row.generation = random();
    row.length = static_cast<std::uint32_t>(random());
    row.node = static_cast<NodeId>(random() % 4 + 1);
    row.flags = Entry::kValid;
  }
  plan.sessions.resize(random() % 5);
  for (ReadPlan::Session& session : plan.sessions) {
    session.node = static_cast<NodeId>(random() % 4 + 1);
    session.id[0] = static_cast<std::uint8_t>(random());
  }
  return plan;
}

bool is_refused(std::string_view bytes) {
  try {
    ReadPlan::parse(bytes);
  } catch (const Error& error) {
    return error.kind() == ErrorKind::kProtocol;
  }
  return false;
}

TEST_CASE("read plan: what is serialized is parsed to the same") {
  const std::uint64_t seed = test_seed();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  for (int i = 0; i < 200; ++i) {
    const ReadPlan plan = random_plan(random);
    const ReadPlan parsed = ReadPlan::parse(plan.serialize());
    REQUIRE(parsed.rows.size() == plan.rows.size());
    REQUIRE(parsed.sessions.size() == plan.sessions.size());
    for (std::size_t row = 0; row < plan.rows.size(); ++row) {
      CHECK(parsed.rows[row].address == plan.rows[row].address);
      CHECK(parsed.rows[row].length == plan.rows[row].length);
    }
    for (std::size_t s = 0; s < plan.sessions.size(); ++s) {
      CHECK(parsed.sessions[s].node == plan.sessions[s].node);
      CHECK(parsed.sessions[s].id == plan.sessions[s].id);
    }
  }
}

TEST_CASE("read plan: anything else is refused") {
  const std::uint64_t seed = test_seed();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  CHECK(is_refused(""));
  CHECK(is_refused("not a plan"));
  CHECK(is_refused(std::string(1000, '\0')));
  for (int i = 0; i < 200; ++i) {
    std::string bytes = random_plan(random).serialize();
    CHECK(is_refused(std::string_view(bytes).substr(0, random() % bytes.size())));
    CHECK(is_refused(bytes + "x"));
    bytes[random() % bytes.size()] ^= static_cast<char>(1u << random() % 8);
    CHECK(is_refused(bytes));
  }
}

TEST_CASE("read plan: a node's session is found by the node") {
  ReadPlan plan;
  plan.sessions = {{.node = 3, .id = {1}}, {.node = 5, .id = {2}}};
  REQUIRE(plan.session_of(5) != nullptr);
  CHECK(plan.session_of(5)->id[0] == 2);
  CHECK(plan.session_of(4) == nullptr);
}

}  // namespace
}  // namespace hymcache::testing
