#include "chm_device/csrc/io_engine.h"

#include "hymcache/csrc/error.h"

namespace hymcache::chm {

std::unique_ptr<IoEngine> open_io_engine(const IoEngineOptions& options) {
  if (options.kind == "threads") return open_thread_engine(options);
  if (options.kind == "io_uring") return open_uring_engine(options);
  try {
    return open_uring_engine(options);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kDevice) throw;
    options.log(std::string(error.what()) + "; using pread/pwrite threads");
  }
  return open_thread_engine(options);
}

}  // namespace hymcache::chm
