// The emulated device: DRAM staging in front of a file or a block device.
#pragma once

#include <memory>

#include "chm_device/csrc/device.h"
#include "chm_device/csrc/file_device_options.h"

namespace hymcache {

// Objects are 1 byte to 256 MiB long, and no longer than a segment, the staging window and the
// write buffer are. What a file held before is gone.
// Throws kConfig for what cannot be, naming the key; kDevice for what the system refuses.
std::unique_ptr<Device> open_file_device(const FileDeviceOptions& options);

}  // namespace hymcache
