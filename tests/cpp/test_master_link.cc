// A node's link to a real master: everything it holds is known there, whatever happens to either.
#include <doctest/doctest.h>

#include <atomic>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kv_manager/csrc/master_link.h"
#include "master/csrc/master_server.h"
#include "tests/cpp/starvation.h"
#include "tests/cpp/store_fixture.h"
#include "transport/csrc/host_id.h"

namespace hymcache::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr NodeId kNode = 7;  // the store's

// A directory, and a link that tells a master of it. Objects are rows only: nothing is written.
class Linked {
 public:
  explicit Linked(milliseconds lease = seconds(10)) {
    options_.listen = {Endpoint::parse("127.0.0.1:0")};
    options_.lease = lease;
    options_.rows_max = 1u << 17;
    start_master();
  }
  ~Linked() {
    store_.call([&] { link_.reset(); });
    store_.stop();
  }

  void start_master() {
    master_ = std::make_unique<MasterServer>(options_);
    master_->start();
    options_.listen = {master_->endpoints().front()};
  }
  void stop_master() { master_.reset(); }
  MasterServer& master() { return *master_; }

  void link(const std::string& name = "n1") {
    store_.call([&] {
      MasterLink::Hooks hooks;
      hooks.describe = [this, name] {
        wire::Member member;
        member.node = kNode;
        member.incarnation = 1000;
        member.name = wire::to_text<64>(name);
        member.tcp = wire::to_text<64>("127.0.0.1:1");
        return member;
      };
      hooks.heartbeat = [this] {
        ++beats;
        return wire::HeartbeatRequest{.capacity_bytes = 5, .used_bytes = 4, .objects = 3};
      };
      hooks.drain_changed = [this] { ++drain_changes; };
      hooks.log = hooks.warn = [](std::string_view) {};
      Identity identity;
      identity.role = wire::Role::kNode;
      identity.name = name;
      identity.node = kNode;
      link_ = std::make_unique<MasterLink>(store_.loop(), options_.listen.front(), identity,
                                           store_.directory(), std::move(hooks));
    });
  }
  void unlink() {
    store_.call([&] { link_.reset(); });
  }
  MasterLinkStats stats() {
    return store_.ask<MasterLinkStats>([&] { return link_->stats(); });
  }
  void wait_live() {
    eventually([&] { return stats().state == "live"; });
  }
  void call(const std::function<void()>& task) { store_.call(task); }

  // In the loop.
  void add(std::uint64_t number) {
    REQUIRE(store_.directory().add_pending(numbered_key(number), 1, 4096 * number, 100));
    store_.directory().make_valid(numbered_key(number), 0, 0);
    if (link_) link_->publish(*store_.directory().find_valid(numbered_key(number)));
  }
  void remove(std::uint64_t number) {
    const ObjectKey key = numbered_key(number);
    const Generation generation = store_.directory().find_valid(key)->generation;
    // As a device without bytes: the directory is all there is.
    store_.directory().forget_pending(key);
    if (link_) link_->withdraw(key, generation);
  }

  // The master shows exactly these objects of 0 to `numbers`, by their latest generation.
  bool master_knows(const std::map<std::uint64_t, Generation>& expected, std::uint64_t numbers) {
    for (std::uint64_t first = 0; first < numbers; first += 32) {
      std::vector<ObjectKey> keys;
      for (std::uint64_t i = first; i < std::min(numbers, first + 32); ++i) {
        keys.push_back(numbered_key(i));
      }
      const auto found = master_->lookup(keys);
      for (std::size_t i = 0; i < keys.size(); ++i) {
        const auto at = expected.find(first + i);
        const bool shown = !found[i].empty() && found[i][0].shown;
        if (shown != (at != expected.end())) return false;
        if (shown && found[i][0].entry.generation != at->second) return false;
      }
    }
    return true;
  }
  Generation generation(std::uint64_t number) {
    return store_.directory().find_valid(numbered_key(number))->generation;
  }

  std::atomic<int> beats{0};
  std::atomic<int> drain_changes{0};

 private:
  Store store_;
  MasterOptions options_;
  std::unique_ptr<MasterServer> master_;
  std::unique_ptr<MasterLink> link_;
};

TEST_CASE("master link: many objects are told in batches, and again to a master that restarts") {
  constexpr std::uint64_t kObjects = 20'000;  // more than eight frames' worth
  Linked linked;
  std::map<std::uint64_t, Generation> expected;
  linked.call([&] {
    for (std::uint64_t i = 0; i < kObjects; ++i) {
      linked.add(i);
      expected[i] = linked.generation(i);
    }
  });
  linked.link();
  linked.wait_live();
  CHECK(linked.stats().published == kObjects);
  CHECK(linked.master_knows(expected, kObjects + 100));

  linked.stop_master();
  eventually([&] { return linked.stats().state == "apart"; });
  linked.call([&] {
    for (std::uint64_t i = 0; i < 100; ++i) {
      linked.remove(i);
      expected.erase(i);
    }
  });
  linked.start_master();
  linked.wait_live();
  CHECK(linked.stats().connects == 2);
  CHECK(linked.master_knows(expected, kObjects + 100));
}

TEST_CASE("master link: what changes at any moment is known in the end") {
  const std::uint64_t seed = test_seed();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  constexpr std::uint64_t kNumbers = 12'000;
  Linked linked;
  std::map<std::uint64_t, Generation> expected;
  const auto change = [&](int count) {
    linked.call([&] {
      for (int i = 0; i < count; ++i) {
        const std::uint64_t number = random() % kNumbers;
        if (expected.contains(number)) {
          linked.remove(number);
          expected.erase(number);
        } else {
          linked.add(number);
          expected[number] = linked.generation(number);
        }
      }
    });
  };
  change(10'000);
  linked.link();
  for (int round = 0; round < 4; ++round) {
    // While it registers and tells, and while nobody listens.
    for (int i = 0; i < 30; ++i) change(200);
    linked.wait_live();
    eventually([&] { return linked.master_knows(expected, kNumbers); });
    linked.stop_master();
    change(500);
    linked.start_master();
  }
  linked.wait_live();
  eventually([&] { return linked.master_knows(expected, kNumbers); });
}

TEST_CASE("master link: it beats at the pace of the lease, from the start") {
  check_unless_stalled(milliseconds(50), []() -> std::string {
    Linked linked(milliseconds(200));
    linked.link();
    linked.wait_live();
    const TimePoint end = Clock::now() + milliseconds(900);
    while (Clock::now() < end) {
      const auto members = linked.master().members();
      REQUIRE(members.size() == 1);
      if (!members[0].record.alive()) return "its lease has lapsed";
      ::usleep(10'000);
    }
    if (linked.stats().connects != 1) return "it was linked anew";
    return linked.beats >= 5 ? "" : "only " + std::to_string(linked.beats) + " beats";
  });
}

TEST_CASE("master link: a drain that an administrator asks for arrives, and its end") {
  Linked linked(milliseconds(200));
  linked.link();
  linked.wait_live();
  CHECK(linked.master().drain(kNode, true));
  eventually([&] { return linked.drain_changes == 1; });
  CHECK(linked.master().drain(kNode, false));
  eventually([&] { return linked.drain_changes == 2; });
}

TEST_CASE("master link: a name that is taken is said, and asked for again and again") {
  Linked first;
  first.link("same");
  first.wait_live();
  // Another process under this name, and so with the same id.
  Store store;
  std::unique_ptr<MasterLink> second;
  store.call([&] {
    MasterLink::Hooks hooks;
    hooks.describe = [] {
      wire::Member member;
      member.node = kNode;
      member.incarnation = 1;
      member.name = wire::to_text<64>("same");
      member.tcp = wire::to_text<64>("127.0.0.1:2");
      return member;
    };
    hooks.heartbeat = [] { return wire::HeartbeatRequest{}; };
    hooks.drain_changed = [] {};
    hooks.log = hooks.warn = [](std::string_view) {};
    second =
        std::make_unique<MasterLink>(store.loop(), first.master().endpoints().front(),
                                     Identity{.role = wire::Role::kNode, .name = "test", .mac = {}},
                                     store.directory(), std::move(hooks));
  });
  const auto stats = [&] { return store.ask<MasterLinkStats>([&] { return second->stats(); }); };
  eventually([&] { return stats().last_error.find("node.name") != std::string::npos; });
  first.unlink();
  eventually([&] { return stats().state == "live"; });
  store.call([&] { second.reset(); });
}

TEST_CASE("master link: it ends quickly, whether its master is there, silent or gone") {
  std::uint16_t port = 0;
  const UniqueFd silent = listen_socket(Endpoint::parse("127.0.0.1:0"), &port);
  const auto link_to = [](const Endpoint& master) {
    Store store;
    std::unique_ptr<MasterLink> link;
    store.call([&] {
      MasterLink::Hooks hooks;
      hooks.describe = [] { return wire::Member{}; };
      hooks.heartbeat = [] { return wire::HeartbeatRequest{}; };
      hooks.drain_changed = [] {};
      hooks.log = hooks.warn = [](std::string_view) {};
      link = std::make_unique<MasterLink>(
          store.loop(), master, Identity{.role = wire::Role::kNode, .name = "test", .mac = {}},
          store.directory(), std::move(hooks));
    });
    ::usleep(50'000);
    const TimePoint before = Clock::now();
    store.call([&] { link.reset(); });
    return Clock::now() - before;
  };
  CHECK(link_to(Endpoint::parse("127.0.0.1:" + std::to_string(port))) < milliseconds(2500));
  CHECK(link_to(Endpoint::parse("127.0.0.1:1")) < milliseconds(1000));
  Linked there;
  CHECK(link_to(there.master().endpoints().front()) < milliseconds(1000));
}

}  // namespace
}  // namespace hymcache::testing
