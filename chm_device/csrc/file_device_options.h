// What an emulated device is made of.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace hymcache {

// Errors name the keys of a node's configuration: device.path, device.capacity, device.staging,
// device.write_buffer, device.segment, device.io, device.io_depth.
struct FileDeviceOptions {
  std::string path;                  // a file, made when it is not there, or a block device
  std::uint64_t capacity_bytes = 0;  // rounded down to whole segments
  std::uint64_t staging_bytes = 0;   // rounded down to 4 KiB, as the next
  std::uint64_t write_buffer_bytes = 0;
  std::uint64_t segment_bytes = 0;  // of the log; 0: from the capacity, 1 GiB at most
  std::string io = "auto";          // "io_uring", "threads"; auto: io_uring where allowed
  std::uint32_t io_depth = 32;      // transfers at a time, 1 to 1024; a write always has its place
  bool preallocate = true;          // reserve the file's room at start
  std::function<void(std::string_view)> log;  // one line a call; may be empty
};

namespace chm {

// With sizes rounded, defaults worked out and a log that can be called. Throws kConfig for what
// cannot be, naming the key.
FileDeviceOptions checked(FileDeviceOptions options);

}  // namespace chm
}  // namespace hymcache
