// Networks that flip bits, cut connections and go silent, between a client and all that it speaks
// to: never a wrong byte with a good status, and no call beyond its deadline.
#include <doctest/doctest.h>

#include <random>
#include <string>
#include <vector>

#include "tests/cpp/service_fixture.h"
#include "tests/cpp/starvation.h"
#include "tests/cpp/tampering_proxy.h"

namespace hymcache::testing {
namespace {

using std::chrono::milliseconds;
using Status = BlockStatus;
using Kind = Tampering::Kind;

constexpr auto kDeadline = milliseconds(400);
constexpr std::size_t kCount = 4;
constexpr std::uint32_t kLength = 5000;

std::string describe(const Tampering& tampering) {
  const char* const kinds[] = {"none", "flip", "cut", "stall"};
  return std::string(kinds[static_cast<int>(tampering.kind)]) + " at byte " +
         std::to_string(tampering.at) + (tampering.to_client ? " to" : " from") + " the client";
}

// A client whose way to the master and to the node leads through proxies.
class Wire {
 public:
  Wire()
      : service_({NodeOptions{.advertise_host = "127.0.0.2"}}),
        to_master_(Endpoint::parse("127.0.0.1:0"), service_.master_endpoint()),
        to_node_(Endpoint::parse("127.0.0.2:" + std::to_string(service_.node().tcp().port)),
                 service_.node().tcp()) {}

  std::unique_ptr<StoreClient> client(Clock::duration deadline = kPatience) {
    ClientOptions options;
    options.masters = {Endpoint::parse("127.0.0.1:" + std::to_string(to_master_.port()))};
    options.transport = TransportChoice::kTcp;
    options.deadline = deadline;
    options.connect_timeout = deadline;
    return std::make_unique<StoreClient>(std::move(options));
  }
  TamperingProxy& proxy(bool of_master) { return of_master ? to_master_ : to_node_; }
  Service& service() { return service_; }

 private:
  Service service_;
  TamperingProxy to_master_;
  TamperingProxy to_node_;
};

// Puts and gets under this tampering, then without: what one round has left behind must not harm
// the next. Returns whether the place was reached at all.
void run(Wire& wire, std::uint64_t number, bool of_master, const Tampering& tampering) {
  CAPTURE(number);
  CAPTURE(of_master);
  const std::string what = describe(tampering);
  CAPTURE(what);
  Blocks blocks(number * 100, kCount, kLength);
  check_unless_stalled(milliseconds(50), [&]() -> std::string {
    wire.proxy(of_master).set(tampering);
    const auto client = wire.client(kDeadline);
    const TimePoint before = Clock::now();
    put(*client, blocks);
    const TimePoint between = Clock::now();
    try {
      get(*client, blocks);  // checks what is kOk
    } catch (const Error& error) {
      if (!of_master) return std::string("it is no lookup that raises: ") + error.what();
    }
    const auto longest = std::max(between - before, Clock::now() - between);
    return longest < kDeadline + milliseconds(1500) ? "" : "it outlasts its deadline";
  });
  wire.proxy(of_master).set({});
  const auto client = wire.client();
  std::vector<Status> statuses(kCount);
  client->write(1, false, blocks.keys(), blocks.fill_all().places(), {}, Clock::now() + kPatience,
                statuses);
  eventually([&] {
    const auto rows = client->lookup(blocks.keys(), Clock::now() + kPatience);
    client->read({.rows = rows, .sessions = {}}, 0, blocks.wipe().places(), {},
                 Clock::now() + kPatience, statuses);
    for (std::size_t i = 0; i < kCount; ++i) {
      if (statuses[i] == Status::kOk) CHECK(blocks.holds(i));
    }
    if (count(statuses, Status::kOk) == kCount) return true;
    // What was damaged on its way to the node is dropped by now, and can be stored anew.
    client->write(1, false, blocks.keys(), blocks.fill_all().places(), {}, Clock::now() + kPatience,
                  statuses);
    return false;
  });
}

// How many bytes such a round takes, each way.
std::uint64_t measure(Wire& wire, bool of_master, bool to_client) {
  Blocks blocks(99'999'900, kCount, kLength);
  const auto client = wire.client();
  put(*client, blocks);
  wait_found(*wire.service().client(), blocks.keys());
  CHECK(count(get(*client, blocks), Status::kOk) == kCount);
  return wire.proxy(of_master).bytes(to_client);
}

void run_many(Kind kind, int rounds) {
  const std::uint64_t seed = test_seed();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  Wire wire;
  std::uint64_t number = 0;
  for (const bool of_master : {false, true}) {
    for (const bool to_client : {false, true}) {
      const std::uint64_t bytes = measure(wire, of_master, to_client);
      REQUIRE(bytes > 100);
      for (int i = 0; i < rounds; ++i) {
        run(wire, ++number, of_master,
            {.kind = kind,
             .to_client = to_client,
             .at = random() % bytes,
             .mask = static_cast<std::uint8_t>(1u << random() % 8)});
      }
    }
  }
  CHECK(wire.proxy(false).has_tampered());
  CHECK(wire.proxy(true).has_tampered());
  wire.service().node().wait_idle();
}

TEST_CASE("tampered wire: flipped bits") { run_many(Kind::kFlip, 8); }

TEST_CASE("tampered wire: cut connections") { run_many(Kind::kCut, 8); }

TEST_CASE("tampered wire: silence") { run_many(Kind::kStall, 1); }

}  // namespace
}  // namespace hymcache::testing
