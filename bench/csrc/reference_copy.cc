#include "bench/csrc/reference_copy.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "hymcache/csrc/error.h"
#include "transport/csrc/copy.h"

namespace hymcache::bench {
namespace {

constexpr int kSocketBufferBytes = 4 << 20;
constexpr timeval kSilenceMax{.tv_sec = 30, .tv_usec = 0};

struct StreamRequest {
  std::uint32_t count = 0;
  std::uint32_t put = 0;
  std::uint64_t block_bytes = 0;
  std::array<std::uint64_t, kReferenceBlocksMax> offsets{};
};

[[noreturn]] void fail(const char* what) {
  throw Error(ErrorKind::kUnavailable, std::string("reference: ") + what + ": " +
                                           (errno != 0 ? std::strerror(errno) : "closed"));
}

void send_all(int fd, const void* data, std::size_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::send(fd, next, bytes, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("send");
    next += n;
    bytes -= static_cast<std::size_t>(n);
  }
}

// False when the peer closed the connection before the first byte.
bool receive_all(int fd, void* data, std::size_t bytes) {
  char* next = static_cast<char*>(data);
  bool any = false;
  while (bytes > 0) {
    errno = 0;
    const ssize_t n = ::recv(fd, next, bytes, MSG_WAITALL);
    if (n < 0 && errno == EINTR) continue;
    if (n == 0 && !any) return false;
    if (n <= 0) fail("recv");
    any = true;
    next += n;
    bytes -= static_cast<std::size_t>(n);
  }
  return true;
}

void expect_all(int fd, void* data, std::size_t bytes) {
  if (!receive_all(fd, data, bytes)) fail("recv");
}

void set_option(int fd, int level, int option, const void* value, socklen_t bytes) {
  if (::setsockopt(fd, level, option, value, bytes) != 0) fail("setsockopt");
}

UniqueFd tcp_socket() {
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) fail("socket");
  const int one = 1;
  set_option(fd.get(), SOL_SOCKET, SO_RCVBUF, &kSocketBufferBytes, sizeof kSocketBufferBytes);
  set_option(fd.get(), SOL_SOCKET, SO_SNDBUF, &kSocketBufferBytes, sizeof kSocketBufferBytes);
  set_option(fd.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  return fd;
}

sockaddr_in loopback(std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

std::byte* map(int memory, std::uint64_t bytes) {
  const int flags = memory >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void* const base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, memory, 0);
  if (base == MAP_FAILED) fail("mmap");
  ::madvise(base, bytes, MADV_HUGEPAGE);  // has its effect where the kernel allows it
  return static_cast<std::byte*>(base);
}

void plain_copy(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
void stream_copy(void* to, const void* from, std::size_t bytes) { copy_bytes(to, from, bytes); }

void check_batch(std::span<const ReferenceBlock> blocks) {
  const bool equal = std::ranges::all_of(blocks, [&](const ReferenceBlock& block) {
    return block.client.size() == blocks.front().client.size();
  });
  if (blocks.empty() || blocks.size() > kReferenceBlocksMax || !equal) {
    throw Error(ErrorKind::kConfig, "reference: a batch is 1 to 32 blocks of one size");
  }
}

bool within(std::uint64_t offset, std::uint64_t bytes, std::uint64_t limit) {
  return bytes <= limit && offset <= limit - bytes;
}

}  // namespace

SharedMemoryCopy::SharedMemoryCopy(UniqueFd socket, UniqueFd memory, std::uint64_t memory_bytes,
                                   bool streaming)
    : copy_(streaming ? stream_copy : plain_copy),
      socket_(std::move(socket)),
      bytes_(memory_bytes),
      base_(map(memory.get(), memory_bytes)) {
  set_option(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &kSilenceMax, sizeof kSilenceMax);
}

SharedMemoryCopy::~SharedMemoryCopy() { ::munmap(base_, bytes_); }

std::byte* SharedMemoryCopy::at(const ReferenceBlock& block) const {
  if (!within(block.offset, block.client.size(), bytes_)) {
    throw Error(ErrorKind::kConfig, "reference: a block lies outside of the memory");
  }
  return base_ + block.offset;
}

void SharedMemoryCopy::ask() {
  char byte = 1;
  send_all(socket_.get(), &byte, 1);
  expect_all(socket_.get(), &byte, 1);
}

void SharedMemoryCopy::get(std::span<const ReferenceBlock> blocks) {
  check_batch(blocks);
  ask();
  for (const ReferenceBlock& block : blocks) {
    copy_(block.client.data(), at(block), block.client.size());
  }
}

void SharedMemoryCopy::put(std::span<const ReferenceBlock> blocks) {
  check_batch(blocks);
  ask();
  for (const ReferenceBlock& block : blocks) {
    copy_(at(block), block.client.data(), block.client.size());
  }
}

StreamCopy::StreamCopy(UniqueFd socket) : socket_(std::move(socket)) {
  set_option(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &kSilenceMax, sizeof kSilenceMax);
  set_option(socket_.get(), SOL_SOCKET, SO_SNDTIMEO, &kSilenceMax, sizeof kSilenceMax);
}

void StreamCopy::request(std::span<const ReferenceBlock> blocks, bool put) {
  check_batch(blocks);
  StreamRequest request;
  request.count = static_cast<std::uint32_t>(blocks.size());
  request.put = put ? 1 : 0;
  request.block_bytes = blocks.front().client.size();
  std::ranges::transform(blocks, request.offsets.begin(), &ReferenceBlock::offset);
  send_all(socket_.get(), &request, sizeof request);
}

void StreamCopy::get(std::span<const ReferenceBlock> blocks) {
  request(blocks, false);
  for (const ReferenceBlock& block : blocks) {
    expect_all(socket_.get(), block.client.data(), block.client.size());
  }
}

void StreamCopy::put(std::span<const ReferenceBlock> blocks) {
  request(blocks, true);
  for (const ReferenceBlock& block : blocks) {
    send_all(socket_.get(), block.client.data(), block.client.size());
  }
  char done = 0;
  expect_all(socket_.get(), &done, 1);
}

UniqueFd connect_reference(std::uint16_t port) {
  UniqueFd fd = tcp_socket();
  const sockaddr_in address = loopback(port);
  errno = 0;
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    fail("connect");
  }
  return fd;
}

UniqueFd listen_reference(std::uint16_t* port) {
  UniqueFd fd = tcp_socket();
  sockaddr_in address = loopback(0);
  socklen_t bytes = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  if (::bind(fd.get(), generic, bytes) != 0 || ::listen(fd.get(), 64) != 0 ||
      ::getsockname(fd.get(), generic, &bytes) != 0) {
    fail("listen");
  }
  *port = ntohs(address.sin_port);
  return fd;
}

void serve_shared_memory(UniqueFd socket, UniqueFd memory, std::uint64_t memory_bytes) {
  std::byte* const base = map(memory.get(), memory_bytes);
  std::memset(base, 7, memory_bytes);
  char byte = 0;
  while (receive_all(socket.get(), &byte, 1)) send_all(socket.get(), &byte, 1);
  ::munmap(base, memory_bytes);
}

void serve_stream(UniqueFd listener, std::uint64_t memory_bytes) {
  std::byte* const base = map(-1, memory_bytes);
  std::memset(base, 7, memory_bytes);
  const UniqueFd client(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!client) fail("accept");
  const int one = 1;
  set_option(client.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  StreamRequest request;
  while (receive_all(client.get(), &request, sizeof request)) {
    if (request.count > kReferenceBlocksMax) {
      throw Error(ErrorKind::kConfig, "reference: too many blocks in a batch");
    }
    for (std::uint32_t i = 0; i < request.count; ++i) {
      if (!within(request.offsets[i], request.block_bytes, memory_bytes)) {
        throw Error(ErrorKind::kConfig, "reference: a block lies outside of the memory");
      }
      std::byte* const block = base + request.offsets[i];
      if (request.put != 0) {
        expect_all(client.get(), block, request.block_bytes);
      } else {
        send_all(client.get(), block, request.block_bytes);
      }
    }
    const char done = 1;
    if (request.put != 0) send_all(client.get(), &done, 1);
  }
  ::munmap(base, memory_bytes);
}

}  // namespace hymcache::bench
