// A node's region in another process's hands: its bounds, and what is no region at all.
#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "hymcache/csrc/error.h"
#include "transport/csrc/region_mapping.h"

namespace hymcache::testing {
namespace {

constexpr std::uint64_t kPage = 4096;

UniqueFd memory(std::uint64_t bytes) {
  UniqueFd fd(::memfd_create("region", MFD_CLOEXEC));
  REQUIRE(fd);
  REQUIRE(::ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0);
  return fd;
}

TEST_CASE("region mapping: what lies inside can be read, and written behind the line") {
  UniqueFd fd = memory(8 * kPage);
  auto* const ours = static_cast<std::byte*>(
      ::mmap(nullptr, 8 * kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0));
  REQUIRE(ours != MAP_FAILED);
  const RegionMapping mapping(
      std::move(fd), {.region_bytes = 8 * kPage, .read_write_offset = 4 * kPage, .incarnation = 5});
  CHECK(mapping.incarnation() == 5);
  ours[100] = std::byte{7};
  CHECK(*mapping.readable(100, 1) == std::byte{7});
  *mapping.writable(4 * kPage, 1) = std::byte{9};
  CHECK(ours[4 * kPage] == std::byte{9});

  CHECK(mapping.readable(0, 8 * kPage) != nullptr);
  CHECK(mapping.readable(0, 8 * kPage + 1) == nullptr);
  CHECK(mapping.readable(8 * kPage, 0) != nullptr);
  CHECK(mapping.readable(8 * kPage, 1) == nullptr);
  CHECK(mapping.readable(~0ull, 2) == nullptr);
  CHECK(mapping.readable(1, ~0ull) == nullptr);
  CHECK(mapping.writable(4 * kPage - 1, 1) == nullptr);
  CHECK(mapping.writable(4 * kPage, 4 * kPage) != nullptr);
  CHECK(mapping.writable(4 * kPage, 4 * kPage + 1) == nullptr);

  std::uint64_t* const word = reinterpret_cast<std::uint64_t*>(ours) + 3;
  *word = 42;
  CHECK(mapping.load_generation(24) == 42);
  CHECK(mapping.load_generation(25) == 0);
  CHECK(mapping.load_generation(8 * kPage) == 0);
  CHECK(mapping.load_generation(~0ull - 7) == 0);
  ::munmap(ours, 8 * kPage);
}

TEST_CASE("region mapping: what is not what it is said to be is refused") {
  const auto refused = [](UniqueFd fd, std::uint64_t bytes, std::uint64_t offset) {
    try {
      const RegionMapping mapping(
          std::move(fd), {.region_bytes = bytes, .read_write_offset = offset, .incarnation = 1});
    } catch (const Error& error) {
      return error.kind() == ErrorKind::kProtocol;
    }
    return false;
  };
  CHECK(refused(UniqueFd(), kPage, 0));
  CHECK(refused(memory(kPage), 0, 0));
  CHECK(refused(memory(kPage), 2 * kPage, 0));
  CHECK(refused(memory(kPage), kPage, kPage + 1));
  CHECK(refused(memory(4 * kPage), 4 * kPage, 100));  // no page begins there
  CHECK(refused(memory(kPage), ~0ull, 0));
  int pipe[2];
  REQUIRE(::pipe(pipe) == 0);
  ::close(pipe[1]);
  CHECK(refused(UniqueFd(pipe[0]), kPage, 0));
}

}  // namespace
}  // namespace hymcache::testing
