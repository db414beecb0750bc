// Prefixes matched in the background, and tickets dropped at every moment.
#include <doctest/doctest.h>

#include <random>
#include <string>
#include <thread>
#include <vector>

#include "lookup/csrc/prefix_matcher.h"
#include "tests/cpp/service_fixture.h"

namespace hymcache::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Status = BlockStatus;

std::optional<Match> answer_of(PrefixMatcher& matcher, PrefixMatcher::Ticket ticket) {
  Match match;
  bool known = false;
  if (!matcher.wait(ticket, kPatience, &match, &known)) return std::nullopt;
  CHECK(known);
  return match;
}

void put_prefix(Service& service, std::uint64_t first, std::size_t count_of) {
  const auto client = service.client();
  Blocks blocks(first, count_of, 2000);
  CHECK(count(put(*client, blocks, true), Status::kOk) == count_of);
  wait_found(*client, blocks.keys());
}

TEST_CASE("matcher: a ticket gets the longest prefix, and its plan can be read") {
  Service service;
  put_prefix(service, 0, 40);
  const auto client = service.client();
  PrefixMatcher matcher(client);
  const auto ticket = matcher.start(numbered_keys(0, 64));
  const auto match = answer_of(matcher, ticket);
  REQUIRE(match);
  CHECK(match->hits == 40);
  CHECK(match->reason.empty());
  CHECK(match->seconds > 0);
  // It stays until it is taken.
  Match again;
  bool known = false;
  CHECK(matcher.poll(ticket, &again, &known));
  CHECK(again.plan == match->plan);
  matcher.take(ticket);
  CHECK_FALSE(matcher.poll(ticket, &again, &known));
  CHECK_FALSE(known);
  CHECK(service.node()->stats().sessions.sessions == 1);  // goes on for whoever has the plan

  Blocks blocks(0, 40, 2000);
  std::vector<Status> statuses(40);
  client->read(ReadPlan::parse(match->plan), 0, blocks.places(), {}, client->deadline(), statuses);
  CHECK(count(statuses, Status::kOk) == 40);
  service.node().wait_idle();
}

TEST_CASE("matcher: nothing found and nothing asked are answers, too") {
  Service service;
  PrefixMatcher matcher(service.client());
  for (const auto& keys : {numbered_keys(7, 33), std::vector<ObjectKey>{}}) {
    const auto match = answer_of(matcher, matcher.start(keys));
    REQUIRE(match);
    CHECK(match->hits == 0);
    CHECK(match->plan.empty());
    CHECK(match->reason.empty());
  }
}

TEST_CASE("matcher: without a master the reason is given, not a hit") {
  Service service;
  const auto client = service.client();
  service.stop_master();
  PrefixMatcher matcher(client);
  const auto match = answer_of(matcher, matcher.start(numbered_keys(0, 3)));
  REQUIRE(match);
  CHECK(match->hits == 0);
  CHECK_FALSE(match->reason.empty());
}

TEST_CASE("matcher: a wait for an unknown ticket ends at once, one for a slow answer in time") {
  Service service;
  std::uint16_t port = 0;
  UniqueFd silent = listen_socket(Endpoint::parse("127.0.0.1:0"), &port);
  ClientOptions options;
  options.masters = {Endpoint::parse("127.0.0.1:" + std::to_string(port))};
  options.connect_timeout = seconds(30);
  PrefixMatcher matcher(std::make_shared<StoreClient>(options));
  Match match;
  bool known = true;
  const TimePoint before = Clock::now();
  CHECK_FALSE(matcher.wait(77, seconds(30), &match, &known));
  CHECK_FALSE(known);
  const auto ticket = matcher.start(numbered_keys(0, 1));
  CHECK_FALSE(matcher.wait(ticket, milliseconds(20), &match, &known));
  CHECK(known);
  CHECK(Clock::now() - before < seconds(10));
  matcher.cancel(ticket);
  CHECK_FALSE(matcher.poll(ticket, &match, &known));
  CHECK_FALSE(known);
  silent = UniqueFd();  // whoever connects need not wait for a greeting
}

TEST_CASE("matcher: more lookups than can wait are answered at once") {
  std::uint16_t port = 0;
  const UniqueFd silent = listen_socket(Endpoint::parse("127.0.0.1:0"), &port);
  ClientOptions options;
  options.masters = {Endpoint::parse("127.0.0.1:" + std::to_string(port))};
  PrefixMatcher matcher(std::make_shared<StoreClient>(options));
  Match match;
  bool known = false;
  PrefixMatcher::Ticket last = 0;
  // The first occupies the thread for a second.
  for (int i = 0; i < 20'000; ++i) last = matcher.start(numbered_keys(0, 1));
  REQUIRE(matcher.poll(last, &match, &known));
  CHECK(match.hits == 0);
  CHECK(match.reason == "too many lookups wait already");
}

TEST_CASE("matcher: what is cancelled, at whatever moment, leaves nothing staged") {
  const std::uint64_t seed = test_seed();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  Service service;
  put_prefix(service, 0, 96);
  const auto client = service.client();
  PrefixMatcher matcher(client);
  std::vector<PrefixMatcher::Ticket> tickets;
  for (int i = 0; i < 300; ++i) {
    tickets.push_back(matcher.start(numbered_keys(random() % 64, 96)));
    if (random() % 4 == 0) ::usleep(static_cast<useconds_t>(random() % 500));
    while (!tickets.empty() && random() % 3 != 0) {
      const auto at = tickets.begin() + static_cast<std::ptrdiff_t>(random() % tickets.size());
      matcher.cancel(*at);
      if (random() % 8 == 0) matcher.cancel(*at);  // twice is no harm
      tickets.erase(at);
    }
  }
  for (const auto ticket : tickets) {
    CHECK(answer_of(matcher, ticket));
    matcher.cancel(ticket);
  }
  service.node().wait_idle();
}

TEST_CASE("matcher: it may end at any moment, and so does what it has staged") {
  Service service;
  put_prefix(service, 0, 96);
  for (int i = 0; i < 30; ++i) {
    const auto client = service.client();
    {
      PrefixMatcher matcher(client);
      for (int t = 0; t < 5; ++t) matcher.start(numbered_keys(0, 96));
      ::usleep(static_cast<useconds_t>(i * 50));
    }
    client->close();  // its connections take their sessions along
  }
  service.node().wait_idle();
}

TEST_CASE("matcher: many threads ask one") {
  Service service;
  put_prefix(service, 0, 40);
  PrefixMatcher matcher(service.client());
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) {
        const auto ticket = matcher.start(numbered_keys(0, 50));
        const auto match = answer_of(matcher, ticket);
        right += match && match->hits == 40;
        matcher.cancel(ticket);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(right == 120);
  service.node().wait_idle();
}

}  // namespace
}  // namespace hymcache::testing
