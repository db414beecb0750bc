#include "chm_device/csrc/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <future>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "chm_device/csrc/byte_size.h"
#include "hymcache/csrc/error.h"

#ifndef MFD_NOEXEC_SEAL  // Linux 6.3
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef MADV_POPULATE_WRITE  // Linux 5.14
#define MADV_POPULATE_WRITE 23
#endif

namespace hymcache::chm {
namespace {

constexpr std::uint64_t kHugePageBytes = std::uint64_t{2} << 20;

[[noreturn]] void fail(const char* what) {
  const int error = errno;
  throw Error(ErrorKind::kDevice,
              std::string("device memory: ") + what + ": " + std::generic_category().message(error),
              error);
}

UniqueFd make_memory_file() {
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  // Hosts with vm.memfd_noexec=2 insist on the flag; kernels before 6.3 do not know it.
  UniqueFd fd(::memfd_create("hymcache-arena", kFlags | MFD_NOEXEC_SEAL));
  if (!fd && errno == EINVAL) fd = UniqueFd(::memfd_create("hymcache-arena", kFlags));
  if (!fd) fail("memfd_create");
  return fd;
}

void check_fits_in_memory(std::uint64_t bytes) {
  const std::uint64_t memory_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
                                     static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  if (bytes < memory_bytes) return;
  throw Error(ErrorKind::kConfig, "device.staging, device.write_buffer: they take " +
                                      format_bytes(bytes) + " of memory, this machine has " +
                                      format_bytes(memory_bytes));
}

// Gives the region its pages now, in several threads: a kernel takes up to two seconds for a GiB,
// and later it would take them from clients' first writes. Returns an errno.
int populate(std::uint8_t* base, std::uint64_t bytes) {
  constexpr std::uint64_t kThreadsMax = 8;
  constexpr std::uint64_t kPartBytesMin = std::uint64_t{64} << 20;
  const std::uint64_t threads = std::clamp<std::uint64_t>(
      bytes / kPartBytesMin, 1,
      std::min<std::uint64_t>(kThreadsMax, std::max(1u, std::thread::hardware_concurrency())));
  const std::uint64_t part_bytes = align_up(bytes / threads + 1, kHugePageBytes);
  const auto populate_part = [&](std::uint64_t offset) {
    const std::uint64_t part = std::min(part_bytes, bytes - offset);
    int error = 0;
    do {
      error = ::madvise(base + offset, part, MADV_POPULATE_WRITE) == 0 ? 0 : errno;
    } while (error == EINTR);
    return error;
  };
  std::vector<std::future<int>> others;
  for (std::uint64_t offset = part_bytes; offset < bytes; offset += part_bytes) {
    others.push_back(std::async(std::launch::async, populate_part, offset));
  }
  int error = populate_part(0);
  for (std::future<int>& other : others) error = std::max(error, other.get());
  return error == EINVAL ? 0 : error;  // before Linux 5.14: pages come when they are touched
}

}  // namespace

void Unmap::operator()(std::uint8_t* base) const noexcept { ::munmap(base, bytes); }

Arena::Arena(std::uint64_t staging_bytes, std::uint64_t write_buffer_bytes, std::uint32_t words) {
  staging_offset_ = align_up(word_offset(words), kGranuleBytes);
  region_.read_write_offset = align_up(staging_offset_ + staging_bytes, kHugePageBytes);
  region_.bytes = region_.read_write_offset + write_buffer_bytes;
  check_fits_in_memory(region_.bytes);

  fd_ = make_memory_file();
  region_.fd = fd_.get();
  if (::ftruncate(fd_.get(), static_cast<off_t>(region_.bytes)) != 0) fail("ftruncate");
  // A client that could shrink the file could kill the node by SIGBUS.
  if (::fcntl(fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    fail("sealing");
  }
  void* base = ::mmap(nullptr, region_.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (base == MAP_FAILED) fail("mmap");
  region_.base = static_cast<std::uint8_t*>(base);
  mapping_ = {region_.base, Unmap{region_.bytes}};
  // Hints: a kernel without them, or with huge pages switched off for shared memory, runs as well.
  ::madvise(base, region_.bytes, MADV_HUGEPAGE);
  ::madvise(base, region_.bytes, MADV_DONTDUMP);
  if (const int error = populate(region_.base, region_.bytes); error != 0) {
    errno = error;
    fail("no pages to be had");
  }
}

std::uint64_t Arena::word_offset(std::uint32_t word) noexcept {
  return word * sizeof(std::uint64_t);
}

std::uint64_t Arena::generation(std::uint32_t word) const noexcept {
  auto* value = reinterpret_cast<std::uint64_t*>(region_.base + word_offset(word));
  // Only the device's own thread changes it.
  return std::atomic_ref<std::uint64_t>(*value).load(std::memory_order_relaxed);
}

void Arena::advance_generation(std::uint32_t word) noexcept {
  auto* value = reinterpret_cast<std::uint64_t*>(region_.base + word_offset(word));
  // Partner: a client's acquire load of the word before its copy, and its acquire fence and second
  // load after. If the copy saw one byte of what comes next, the second load sees this store.
  std::atomic_ref<std::uint64_t>(*value).fetch_add(1, std::memory_order_seq_cst);
  // A release store orders what came before it; it is what comes after that must not overtake it:
  // the next bytes, which the kernel may copy in this very thread.
  __sync_synchronize();
}

}  // namespace hymcache::chm
