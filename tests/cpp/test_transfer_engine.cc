// Jobs that move an engine's blocks: they end, say what became of each block, and then leave the
// engine's memory alone.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "connector/csrc/transfer_engine.h"
#include "tests/cpp/service_fixture.h"

namespace hymcache::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Status = BlockStatus;

constexpr std::int64_t kBlocks = 64;

// An engine's memory in a layout of several pieces, with room between them that is nobody's.
class EngineMemory {
 public:
  EngineMemory(std::size_t pieces, std::uint32_t piece_bytes)
      : pieces_(pieces),
        piece_bytes_(piece_bytes),
        stride_(piece_bytes + 48),
        memory_(pieces * static_cast<std::size_t>(kBlocks) * stride_, 0xEE) {}

  BlockLayout layout() {
    std::vector<BlockLayout::Piece> pieces;
    for (std::size_t i = 0; i < pieces_; ++i) {
      pieces.push_back({.base = reinterpret_cast<std::byte*>(&memory_[i * kBlocks * stride_]),
                        .stride = static_cast<std::int64_t>(stride_),
                        .bytes = piece_bytes_});
    }
    return {std::move(pieces), kBlocks};
  }
  std::uint32_t block_bytes() const { return static_cast<std::uint32_t>(pieces_ * piece_bytes_); }
  void fill_block(std::int64_t block, std::uint64_t number) {
    for_each(block,
             [&](std::uint8_t& byte, std::uint64_t place) { byte = content_byte(number, place); });
  }
  bool holds_block(std::int64_t block, std::uint64_t number) {
    bool same = true;
    for_each(block, [&](std::uint8_t& byte, std::uint64_t place) {
      same &= byte == content_byte(number, place);
    });
    return same;
  }
  const std::vector<std::uint8_t>& bytes() const { return memory_; }

 private:
  template <class F>
  void for_each(std::int64_t block, F each) {
    std::uint64_t place = 0;
    for (std::size_t i = 0; i < pieces_; ++i) {
      for (std::uint32_t at = 0; at < piece_bytes_; ++at) {
        each(memory_[(i * kBlocks + static_cast<std::size_t>(block)) * stride_ + at], place++);
      }
    }
  }

  const std::size_t pieces_;
  const std::uint32_t piece_bytes_;
  const std::size_t stride_;
  std::vector<std::uint8_t> memory_;
};

std::vector<std::int64_t> block_ids(std::int64_t first, std::int64_t count_of) {
  std::vector<std::int64_t> ids(static_cast<std::size_t>(count_of));
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

TransferResult result_of(TransferEngine& engine, std::int64_t job) {
  REQUIRE(engine.wait({job}, kPatience));
  for (TransferResult& result : engine.poll()) {
    if (result.job == job) return std::move(result);
  }
  FAIL("the job has no result");
  return {};
}

std::string plan_for(StoreClient& client, std::uint64_t first, std::uint64_t count_of) {
  return client.match(numbered_keys(first, count_of), client.deadline()).serialize();
}

TEST_CASE("transfers: blocks are saved and loaded, in layouts of one piece and of many") {
  Service service;
  std::uint64_t number = 0;
  for (const TransportChoice transport : kTransports) {
    for (const std::size_t pieces : {1u, 2u, 80u}) {
      CAPTURE(name_of(transport));
      CAPTURE(pieces);
      const auto client = service.client(transport);
      EngineMemory memory(pieces, 300);
      TransferEngine engine(client, {memory.layout()}, 1, 1);
      const std::uint64_t first = number += 1000;
      for (int i = 0; i < 10; ++i) memory.fill_block(i, first + static_cast<std::uint64_t>(i));
      engine.submit_save(1, 0, numbered_keys(first, 10), 5, block_ids(0, 10), kPatience);
      const TransferResult saved = result_of(engine, 1);
      CHECK_FALSE(saved.is_load);
      CHECK(saved.statuses == std::vector<Status>(10, Status::kOk));
      CHECK(saved.bytes_moved == 10 * memory.block_bytes());
      CHECK(saved.transport == name_of(transport));
      wait_found(*client, numbered_keys(first, 10));

      // From the fourth on, backwards into other blocks.
      std::vector<std::int64_t> into = block_ids(20, 7);
      std::reverse(into.begin(), into.end());
      engine.submit_load(2, 0, plan_for(*client, first, 10), 3, into, kPatience);
      const TransferResult loaded = result_of(engine, 2);
      CHECK(loaded.is_load);
      CHECK(loaded.statuses == std::vector<Status>(7, Status::kOk));
      CHECK(loaded.seconds > 0);
      for (std::uint64_t i = 0; i < 7; ++i) {
        CHECK(memory.holds_block(into[i], first + 3 + i));
      }
      service.node().wait_idle();
    }
  }
}

TEST_CASE("transfers: several layouts, each with its own size of block") {
  Service service;
  const auto client = service.client();
  EngineMemory small(1, 64), large(3, 5000);
  TransferEngine engine(client, {small.layout(), large.layout()}, 2, 2);
  small.fill_block(0, 1);
  large.fill_block(0, 2);
  engine.submit_save(1, 0, numbered_keys(1, 1), 0, {0}, kPatience);
  engine.submit_save(2, 1, numbered_keys(2, 1), 0, {0}, kPatience);
  REQUIRE(engine.wait({1, 2}, kPatience));
  wait_found(*client, numbered_keys(1, 2));
  engine.submit_load(3, 0, plan_for(*client, 1, 1), 0, {9}, kPatience);
  engine.submit_load(4, 1, plan_for(*client, 2, 1), 0, {9}, kPatience);
  // A block of the other layout's size: a miss, not a piece of it.
  engine.submit_load(5, 0, plan_for(*client, 2, 1), 0, {10}, kPatience);
  REQUIRE(engine.wait({3, 4, 5}, kPatience));
  CHECK(small.holds_block(9, 1));
  CHECK(large.holds_block(9, 2));
  std::map<std::int64_t, Status> statuses;
  for (const TransferResult& result : engine.poll()) statuses[result.job] = result.statuses[0];
  CHECK(statuses == std::map<std::int64_t, Status>{{1, Status::kOk},
                                                   {2, Status::kOk},
                                                   {3, Status::kOk},
                                                   {4, Status::kOk},
                                                   {5, Status::kMiss}});
}

TEST_CASE("transfers: what makes no sense is refused when it is submitted") {
  Service service;
  const auto client = service.client();
  EngineMemory memory(1, 64);
  TransferEngine engine(client, {memory.layout()}, 1, 1);
  const auto refused = [&](const std::function<void()>& submit) {
    try {
      submit();
    } catch (const Error& error) {
      return error.kind() == ErrorKind::kConfig;
    }
    return false;
  };
  CHECK(refused([&] { engine.submit_load(1, 0, "", 0, {kBlocks}, kPatience); }));
  CHECK(refused([&] { engine.submit_load(1, 0, "", 0, {-1}, kPatience); }));
  CHECK(refused([&] { engine.submit_load(1, 1, "", 0, {0}, kPatience); }));
  CHECK(refused([&] { engine.submit_save(1, 0, numbered_keys(0, 2), 0, {0}, kPatience); }));
  CHECK(refused([&] { TransferEngine(client, {memory.layout()}, 0, 1); }));
  CHECK(refused([&] { TransferEngine(client, {memory.layout()}, 1, 65); }));
  CHECK(engine.wait({1}, milliseconds(0)));  // none of them became a job
  // A plan that is none: nothing can be loaded by it.
  engine.submit_load(1, 0, "nonsense", 0, {0, 1}, kPatience);
  CHECK(result_of(engine, 1).statuses == std::vector<Status>(2, Status::kMiss));
  engine.submit_load(1, 0, plan_for(*client, 0, 5), 0, {}, kPatience);
  CHECK(result_of(engine, 1).statuses.empty());
}

TEST_CASE("transfers: a number is in use until its job has ended") {
  Service service({NodeOptions{.faults = {.delay_read = 1, .delay_drives_max = 1'000'000'000}}});
  const auto client = service.client();
  EngineMemory memory(1, 20'000);
  Blocks blocks(0, 4, 20'000);
  CHECK(count(put(*client, blocks), Status::kOk) == 4);
  wait_found(*client, blocks.keys());
  service.node().wait_flushed();
  Blocks others(100, 40, 64 * kKiB);
  put(*client, others);
  TransferEngine engine(client, {memory.layout()}, 1, 1);
  engine.submit_load(1, 0, plan_for(*client, 0, 4), 0, block_ids(0, 4), seconds(2));
  CHECK_THROWS_AS(engine.submit_load(1, 0, "", 0, {0}, kPatience), Error);
  CHECK_FALSE(engine.wait({1}, milliseconds(1)));
  CHECK(engine.poll().empty());
  const TimePoint before = Clock::now();
  CHECK(result_of(engine, 1).statuses == std::vector<Status>(4, Status::kDeadline));
  CHECK(Clock::now() - before < seconds(10));
  engine.submit_load(1, 0, "", 0, {0}, kPatience);
  CHECK(result_of(engine, 1).statuses[0] == Status::kMiss);
}

TEST_CASE("transfers: a job whose time ran out in the queue does nothing") {
  Service service;
  const auto client = service.client();
  EngineMemory memory(1, 64);
  TransferEngine engine(client, {memory.layout()}, 1, 1);
  const auto before = memory.bytes();
  engine.submit_save(1, 0, numbered_keys(0, 1), 0, {0}, kPatience);
  REQUIRE(engine.wait({1}, kPatience));
  wait_found(*client, numbered_keys(0, 1));
  engine.submit_load(2, 0, plan_for(*client, 0, 1), 0, {1}, Clock::duration(0));
  engine.submit_save(3, 0, numbered_keys(7, 1), 0, {0}, Clock::duration(0));
  CHECK(engine.wait({2, 3}, kPatience));
  for (const TransferResult& result : engine.poll()) {
    if (result.job != 1) CHECK(result.statuses[0] != Status::kOk);
  }
  CHECK(memory.bytes() == before);
}

// The promise that an engine builds on: after wait() has returned, its blocks are its own again.
TEST_CASE("transfers: after cancel and wait no byte changes, at whatever moment") {
  const std::uint64_t seed = test_seed();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  for (const TransportChoice transport : kTransports) {
    CAPTURE(name_of(transport));
    Service service({NodeOptions{.staging_bytes = 8u << 20, .write_buffer_bytes = 8u << 20}});
    const auto client = service.client(transport);
    EngineMemory memory(4, 20'000);
    TransferEngine engine(client, {memory.layout()}, 2, 1);
    for (std::int64_t i = 0; i < 32; ++i) memory.fill_block(i, static_cast<std::uint64_t>(i));
    engine.submit_save(1, 0, numbered_keys(0, 32), 0, block_ids(0, 32), kPatience);
    REQUIRE(result_of(engine, 1).bytes_moved == 32 * memory.block_bytes());
    wait_found(*client, numbered_keys(0, 32));
    std::size_t cancelled = 0;
    // On a busy machine a load may be over before this thread gets to cancel it: until one is not.
    for (std::int64_t job = 10; job < 25 || (cancelled == 0 && job < 2000); ++job) {
      engine.submit_load(job, 0, plan_for(*client, 0, 32), 0, block_ids(32, 32), kPatience);
      if (job % 3 != 0) ::usleep(static_cast<useconds_t>(random() % 2000));
      engine.cancel({job});
      REQUIRE(engine.wait({job}, kPatience));
      const auto results = engine.poll();
      REQUIRE(results.size() == 1);
      for (std::int64_t i = 0; i < 32; ++i) {
        const Status status = results[0].statuses[static_cast<std::size_t>(i)];
        cancelled += status == Status::kCancelled;
        if (status == Status::kOk) {
          CHECK(memory.holds_block(32 + i, static_cast<std::uint64_t>(i)));
        } else {
          CHECK(status == Status::kCancelled);
        }
      }
      for (std::int64_t i = 32; i < 64; ++i) memory.fill_block(i, 999);  // the engine's own again
      const auto own = memory.bytes();
      ::usleep(200);
      CHECK(memory.bytes() == own);
    }
    CHECK(cancelled > 0);
    service.node().wait_idle();
  }
}

TEST_CASE("transfers: cancelled saves store whole blocks or none") {
  const std::uint64_t seed = test_seed();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  for (const TransportChoice transport : kTransports) {
    CAPTURE(name_of(transport));
    Service service({NodeOptions{.staging_bytes = 8u << 20, .write_buffer_bytes = 8u << 20}});
    const auto client = service.client(transport);
    EngineMemory memory(4, 20'000);
    TransferEngine engine(client, {memory.layout()}, 1, 1);
    for (std::int64_t job = 0; job < 10; ++job) {
      const auto first = static_cast<std::uint64_t>(job) * 100;
      for (std::int64_t i = 0; i < 8; ++i) {
        memory.fill_block(i, first + static_cast<std::uint64_t>(i));
      }
      engine.submit_save(job, 0, numbered_keys(first, 8), 0, block_ids(0, 8), kPatience);
      ::usleep(static_cast<useconds_t>(random() % 1000));
      engine.cancel({job, 12345});
      REQUIRE(engine.wait({job}, kPatience));
      for (std::int64_t i = 0; i < 8; ++i) memory.fill_block(i, 999);
      Blocks blocks(first, 8, memory.block_bytes());
      const auto statuses = result_of(engine, job).statuses;
      eventually([&] {
        const auto read = get(*client, blocks);  // checks contents
        return count(read, Status::kOk) == count(statuses, Status::kOk);
      });
    }
    service.node().wait_idle();
  }
}

TEST_CASE("transfers: many jobs at once, in several threads") {
  Service service({NodeOptions{.staging_bytes = 4u << 20, .write_buffer_bytes = 16u << 20}});
  const auto client = service.client();
  EngineMemory memory(3, 1000);
  TransferEngine engine(client, {memory.layout()}, 3, 3);
  std::vector<std::int64_t> jobs;
  for (std::int64_t i = 0; i < 60; ++i) {
    memory.fill_block(i, static_cast<std::uint64_t>(i));
    engine.submit_save(i, 0, numbered_keys(static_cast<std::uint64_t>(i), 1), 0, {i}, kPatience);
    jobs.push_back(i);
  }
  REQUIRE(engine.wait(jobs, kPatience));
  CHECK(engine.poll().size() == 60);
  wait_found(*client, numbered_keys(0, 60));
  std::vector<std::thread> threads;
  for (std::int64_t t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (std::int64_t i = 0; i < 20; ++i) {
        const std::int64_t number = t * 20 + i;
        engine.submit_load(100 + number, 0,
                           plan_for(*client, static_cast<std::uint64_t>(number), 1), 0,
                           {59 - number}, kPatience);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::int64_t& job : jobs) job += 100;
  REQUIRE(engine.wait(jobs, kPatience));
  for (std::int64_t i = 0; i < 60; ++i) {
    CHECK(memory.holds_block(59 - i, static_cast<std::uint64_t>(i)));
  }
  service.node().wait_idle();
}

TEST_CASE("transfers: closing ends everything, what waits in line included") {
  Service service;
  const auto client = service.client();
  EngineMemory memory(1, 20'000);
  TransferEngine engine(client, {memory.layout()}, 1, 1);
  std::vector<std::int64_t> jobs;
  for (std::int64_t i = 0; i < 50; ++i) {
    engine.submit_save(i, 0, numbered_keys(static_cast<std::uint64_t>(i), 1), 0, {i}, kPatience);
    jobs.push_back(i);
  }
  std::thread waiter([&] { CHECK(engine.wait(jobs, kPatience)); });
  engine.close();
  waiter.join();
  CHECK(engine.wait(jobs, milliseconds(0)));
  const auto results = engine.poll();
  CHECK(results.size() == 50);
  for (const TransferResult& result : results) REQUIRE(result.statuses.size() == 1);
  CHECK_THROWS_AS(engine.submit_save(99, 0, numbered_keys(0, 1), 0, {0}, kPatience), Error);
  engine.close();
}

}  // namespace
}  // namespace hymcache::testing
