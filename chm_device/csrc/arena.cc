#include "chm_device/csrc/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <system_error>

#include "chm_device/csrc/byte_size.h"
#include "hymcache/csrc/error.h"

#ifndef MFD_NOEXEC_SEAL  // Linux 6.3
#define MFD_NOEXEC_SEAL 0x0008U
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

}  // namespace

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
  // Hints: a kernel without them, or with huge pages switched off for shared memory, runs as well.
  ::madvise(base, region_.bytes, MADV_HUGEPAGE);
  ::madvise(base, region_.bytes, MADV_DONTDUMP);
}

Arena::~Arena() { ::munmap(region_.base, region_.bytes); }

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
