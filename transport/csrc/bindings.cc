// Bindings of the transport; typed in hymcache/_core.pyi, section "transport".
#include <pybind11/pybind11.h>

#include "hymcache/csrc/error.h"
#include "transport/csrc/copy.h"
#include "transport/csrc/crc32c.h"

namespace py = pybind11;

namespace hymcache {
namespace {

// Below this, giving the GIL away costs more than the checksum.
constexpr std::size_t kReleaseGilMin = 64u << 10;

std::uint32_t crc32c_of_buffer(const py::buffer& data, std::uint32_t crc) {
  const py::buffer_info info = data.request();
  if (PyBuffer_IsContiguous(info.view(), 'C') == 0) {
    throw Error(ErrorKind::kConfig, "the buffer is not contiguous");
  }
  const auto bytes = static_cast<std::size_t>(info.size * info.itemsize);
  if (bytes < kReleaseGilMin) return crc32c(crc, info.ptr, bytes);
  const py::gil_scoped_release released;
  return crc32c(crc, info.ptr, bytes);
}

}  // namespace

void bind_transport(py::module_& m) {
  m.def("crc32c", &crc32c_of_buffer, py::arg("data"), py::arg("crc") = 0);
  m.def("copy_implementation", &copy_implementation);
}

}  // namespace hymcache
