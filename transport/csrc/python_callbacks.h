// Python functions as the core calls them, from threads that do not hold the GIL. For bindings
// only.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "transport/csrc/handshake.h"

namespace hymcache {

// Keeps a Python object alive from C++; let go of with the GIL held.
inline std::shared_ptr<pybind11::object> keep_python(pybind11::object object) {
  return {new pybind11::object(std::move(object)), [](pybind11::object* kept) {
            const pybind11::gil_scoped_acquire gil;
            delete kept;
          }};
}

// HMAC-SHA256 under the secret, by Python's hmac module; none for an empty secret.
inline MacFunction mac_function(const pybind11::bytes& secret) {
  if (std::string_view(secret).empty()) return nullptr;
  auto digest = keep_python(pybind11::module_::import("hmac").attr("digest"));
  auto key = keep_python(secret);
  return [digest, key](std::string_view message) {
    const pybind11::gil_scoped_acquire gil;
    const pybind11::bytes proof =
        (*digest)(*key, pybind11::bytes(message.data(), message.size()), "sha256");
    wire::Mac mac{};
    const std::string_view bytes(proof);
    std::copy_n(bytes.begin(), std::min(bytes.size(), mac.size()), mac.begin());
    return mac;
  };
}

// Calls log(line). An exception in it is reported and does not reach the core.
inline std::function<void(std::string_view)> log_function(pybind11::object log) {
  auto kept = keep_python(std::move(log));
  return [kept](std::string_view line) {
    const pybind11::gil_scoped_acquire gil;
    try {
      (*kept)(pybind11::str(line.data(), line.size()));
    } catch (pybind11::error_already_set& error) {
      error.discard_as_unraisable(__func__);
    }
  };
}

}  // namespace hymcache
