// The extension module hymcache._core. Each room adds what it has in its bindings.cc.
#include <pybind11/gil_safe_call_once.h>
#include <pybind11/pybind11.h>

#include "hymcache/csrc/error.h"

namespace py = pybind11;

namespace hymcache {

void bind_bench(py::module_& m);
void bind_chm_device(py::module_& m);
void bind_master(py::module_& m);
void bind_connector(py::module_& m);
void bind_kv_manager(py::module_& m);
void bind_lookup(py::module_& m);
void bind_region_directory(py::module_& m);
void bind_transport(py::module_& m);

namespace {

const char* python_name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kConfig:
      return "ConfigError";
    case ErrorKind::kDevice:
      return "DeviceError";
    case ErrorKind::kUnavailable:
      return "Unavailable";
    case ErrorKind::kCorrupt:
      return "Corrupt";
    case ErrorKind::kProtocol:
      return "ProtocolError";
  }
  return "HymcacheError";
}

void raise_in_python(const Error& error) {
  // Held for the life of the process: at its end the interpreter may be gone before statics are.
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::module_> errors;
  const py::module_& module =
      errors.call_once_and_store_result([] { return py::module_::import("hymcache.errors"); })
          .get_stored();
  const py::object type = module.attr(python_name(error.kind()));
  const py::object value = error.kind() == ErrorKind::kDevice
                               ? type(error.what(), error.error_number())
                               : type(error.what());
  PyErr_SetObject(type.ptr(), value.ptr());
}

}  // namespace

void bind_bench(py::module_& m);
void bind_connector(py::module_& m);
void bind_kv_manager(py::module_& m);
void bind_lookup(py::module_& m);

}  // namespace hymcache

PYBIND11_MODULE(_core, m) {
  m.doc() = "The C++ core of HyMCache; typed in _core.pyi.";
  py::register_local_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const hymcache::Error& error) {
      hymcache::raise_in_python(error);
    }
  });
  hymcache::bind_transport(m);
  hymcache::bind_kv_manager(m);
  hymcache::bind_lookup(m);
  hymcache::bind_chm_device(m);
  hymcache::bind_region_directory(m);
  hymcache::bind_connector(m);
  hymcache::bind_bench(m);
  hymcache::bind_master(m);
}
