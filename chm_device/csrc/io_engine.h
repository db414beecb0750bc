// Asynchronous reads and writes of one file: io_uring, or threads where that is not allowed.
//
// An engine is used by one thread. It has room for `depth` requests and says so when it is full;
// which request goes first is its owner's decision.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace hymcache::chm {

using LogCallback = std::function<void(std::string_view)>;

struct IoRequest {
  bool is_write = false;
  std::uint64_t offset = 0;      // in the file
  std::uint8_t* data = nullptr;  // stays where it is until completion
  std::uint64_t bytes = 0;
  std::uint64_t cookie = 0;  // the owner's; comes back with the completion
};

struct IoCompletion {
  std::uint64_t cookie = 0;
  int error = 0;  // errno, or 0: every byte was moved
};

class IoEngine {
 public:
  // Waits for what is in flight.
  virtual ~IoEngine() = default;

  // False when `depth` requests are in the engine. Nothing happens before submit().
  virtual bool queue(const IoRequest& request) = 0;
  // Starts what was queued, in one go. Throws kDevice when the engine itself broke down.
  virtual void submit() = 0;
  // Fills `completions` from its front and returns how many there were.
  virtual std::size_t reap(std::span<IoCompletion> completions) = 0;
  // An eventfd, readable after a completion. reap() empties it.
  virtual int event_fd() const = 0;
  // Makes event_fd() readable.
  virtual void wake() = 0;
  virtual std::string name() const = 0;
};

struct IoEngineOptions {
  std::string kind = "auto";  // or "io_uring", "threads"
  int fd = -1;
  bool is_direct = false;          // opened with O_DIRECT: a transfer does not pass the page cache
  std::uint32_t depth = 32;        // requests at a time
  std::span<std::uint8_t> memory;  // where all data lies, for registration
  LogCallback log;
};

// Throws kDevice when io_uring was asked for by name and cannot be had. "auto" falls back to
// threads and says why in the log.
std::unique_ptr<IoEngine> open_io_engine(const IoEngineOptions& options);

std::unique_ptr<IoEngine> open_thread_engine(const IoEngineOptions& options);
// Throws kDevice when the kernel refuses a ring.
std::unique_ptr<IoEngine> open_uring_engine(const IoEngineOptions& options);

}  // namespace hymcache::chm
