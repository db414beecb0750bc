#include "chm_device/csrc/file_device_options.h"

#include "chm_device/csrc/byte_size.h"
#include "chm_device/csrc/log_space.h"
#include "hymcache/csrc/error.h"

namespace hymcache::chm {
namespace {

constexpr std::uint64_t kBytesMin = std::uint64_t{64} << 10;
constexpr std::uint64_t kBytesMax = std::uint64_t{1} << 50;

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorKind::kConfig, message); }

}  // namespace

FileDeviceOptions checked(FileDeviceOptions options) {
  const auto round = [](const char* key, std::uint64_t& bytes) {
    if (bytes < kBytesMin || bytes > kBytesMax) {
      refuse(std::string(key) + ": " + format_bytes(bytes) + " are not between " +
             format_bytes(kBytesMin) + " and " + format_bytes(kBytesMax));
    }
    bytes = align_down(bytes, kGranuleBytes);
  };
  round("device.capacity", options.capacity_bytes);
  round("device.staging", options.staging_bytes);
  round("device.write_buffer", options.write_buffer_bytes);
  if (options.segment_bytes == 0) {
    options.segment_bytes = LogSpace::default_segment_bytes(options.capacity_bytes);
  }
  round("device.segment", options.segment_bytes);
  if (options.segment_bytes > options.capacity_bytes) {
    refuse("device.segment: " + format_bytes(options.segment_bytes) +
           " are more than device.capacity, " + format_bytes(options.capacity_bytes));
  }
  options.capacity_bytes = align_down(options.capacity_bytes, options.segment_bytes);
  if (options.io_depth < 1 || options.io_depth > 1024) {
    refuse("device.io_depth: " + std::to_string(options.io_depth) + " is not from 1 to 1024");
  }
  if (options.io != "auto" && options.io != "io_uring" && options.io != "threads") {
    refuse("device.io: \"" + options.io + "\" is none of \"auto\", \"io_uring\", \"threads\"");
  }
  if (!options.log) options.log = [](std::string_view) {};
  return options;
}

}  // namespace hymcache::chm
