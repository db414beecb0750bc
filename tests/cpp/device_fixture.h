// What tests of devices share: scratch files, seeds, contents, and an event loop's patience.
#pragma once

#include <doctest/doctest.h>
#include <poll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "chm_device/csrc/device.h"

namespace hymcache::testing {

// A folder that goes with its contents. `parent` is empty for the system's temporary folder.
class ScratchFolder {
 public:
  explicit ScratchFolder(const std::string& parent = "") {
    std::string name = (parent.empty() ? std::filesystem::temp_directory_path().string() : parent) +
                       "/hymcache-test-XXXXXX";
    REQUIRE(::mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  std::string file(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// A disk (where O_DIRECT works, usually) and memory (where it does not).
inline std::vector<std::string> scratch_parents() {
  std::vector<std::string> parents{""};
  if (std::filesystem::is_directory("/dev/shm")) parents.emplace_back("/dev/shm");
  return parents;
}

// HYMCACHE_TEST_SEED repeats a run; a failing test shows its seed.
inline std::uint64_t test_seed() {
  const char* fixed = std::getenv("HYMCACHE_TEST_SEED");
  return fixed != nullptr ? std::strtoull(fixed, nullptr, 0) : std::random_device()();
}

// Contents that differ in every word, by seed and by place.
inline std::uint8_t content_byte(std::uint64_t seed, std::uint64_t place) {
  std::uint64_t x = seed * 0x9e3779b97f4a7c15u + place / 8 + 1;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return static_cast<std::uint8_t>((x ^ (x >> 31)) >> (place % 8 * 8));
}

inline void fill(std::uint8_t* to, std::uint64_t seed, std::uint32_t length) {
  for (std::uint32_t i = 0; i < length; ++i) to[i] = content_byte(seed, i);
}

inline bool holds(const std::uint8_t* bytes, std::uint64_t seed, std::uint32_t length) {
  for (std::uint32_t i = 0; i < length; ++i) {
    if (bytes[i] != content_byte(seed, i)) return false;
  }
  return true;
}

// Files may not grow or be written beyond `bytes` while it lives.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(std::uint64_t bytes) {
    signal_ = std::signal(SIGXFSZ, SIG_IGN);
    REQUIRE(::getrlimit(RLIMIT_FSIZE, &before_) == 0);
    const rlimit limit{bytes, before_.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &limit) == 0);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, signal_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit before_{};
  void (*signal_)(int) = nullptr;
};

// Drives as an event loop would: only when the eventfd calls. False after ten seconds.
inline bool drive_until(Device& device, bool may_flush, const std::function<bool()>& is_done) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  device.drive(may_flush);
  while (!is_done()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    pollfd event{device.event_fd(), POLLIN, 0};
    if (::poll(&event, 1, 1000) > 0) device.drive(may_flush);
  }
  return true;
}

}  // namespace hymcache::testing
