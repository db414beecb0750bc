// The shared secret's HMAC as a Python callable: `Callable[[bytes], bytes]`, or None for no secret.
// For bindings only.
#pragma once

#include <pybind11/pybind11.h>

#include <cstring>
#include <memory>
#include <string_view>
#include <utility>

#include "transport/csrc/handshake.h"

namespace hymcache {

// The result may be called from any thread, and destroyed with or without the GIL.
inline MacFunction mac_from_python(pybind11::object callable) {
  namespace py = pybind11;
  if (callable.is_none()) return {};
  const std::shared_ptr<py::object> held(new py::object(std::move(callable)),
                                         [](py::object* object) {
                                           const py::gil_scoped_acquire gil;
                                           delete object;
                                         });
  return [held](std::string_view message) {
    const py::gil_scoped_acquire gil;
    try {
      const py::bytes digest((*held)(py::bytes(message.data(), message.size())));
      const std::string_view raw = digest;
      wire::Mac mac;
      if (raw.size() != mac.size()) {
        throw Error(ErrorKind::kConfig, "the MAC of a secret has " + std::to_string(mac.size()) +
                                            " bytes, not " + std::to_string(raw.size()));
      }
      std::memcpy(mac.data(), raw.data(), mac.size());
      return mac;
    } catch (py::error_already_set& error) {
      // It may be raised in a thread that Python knows nothing of: told on stderr, and the
      // handshake fails.
      error.discard_as_unraisable("the MAC of a shared secret");
      throw Error(ErrorKind::kUnavailable, "the MAC of the shared secret could not be computed");
    }
  };
}

}  // namespace hymcache
