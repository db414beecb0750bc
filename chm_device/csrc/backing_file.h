// The file or block device under an emulated device: opened, locked, sized and marked as ours.
//
//   0                    kDataOffset
//   | header, then zeros | the device's address space ... |
//
// The header is a magic and a version. A file or disk that holds anything else is refused: a wrong
// path in a configuration must not cost somebody a file system.
#pragma once

#include <cstdint>
#include <string>

#include "chm_device/csrc/io_engine.h"
#include "hymcache/csrc/unique_fd.h"

namespace hymcache::chm {

struct BackingFileOptions {
  std::string path;
  std::uint64_t capacity_bytes = 0;  // of the address space
  bool preallocate = true;
  LogCallback log;
};

class BackingFile {
 public:
  // Where the address space starts. File systems and volume managers leave their marks before it.
  static constexpr std::uint64_t kDataOffset = std::uint64_t{1} << 20;

  // Throws kConfig when the path or the size cannot be, kDevice when the system refuses. A file
  // that was made here and could not be used is removed.
  explicit BackingFile(const BackingFileOptions& options);
  ~BackingFile();
  BackingFile(const BackingFile&) = delete;
  BackingFile& operator=(const BackingFile&) = delete;

  int fd() const noexcept { return fd_.get(); }
  // Transfers do not pass the page cache.
  bool is_direct() const noexcept { return is_direct_; }
  bool is_block_device() const noexcept { return is_block_device_; }

 private:
  void open_path(const BackingFileOptions& options);
  void lock(const std::string& path);
  void set_up(const BackingFileOptions& options);
  void choose_direct(const BackingFileOptions& options);
  void check_header(const std::string& path) const;
  void write_header(const std::string& path) const;
  void check_block_device(const BackingFileOptions& options) const;
  void size_file(const BackingFileOptions& options) const;

  UniqueFd fd_;
  bool is_direct_ = false;
  bool is_block_device_ = false;
  bool is_new_ = false;
};

}  // namespace hymcache::chm
