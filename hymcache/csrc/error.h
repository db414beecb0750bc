// Errors of the core. A miss, a skip or a full buffer is a value, never an error.
#pragma once

#include <stdexcept>
#include <string>

namespace hymcache {

// Each kind becomes the Python class of the same name in hymcache.errors.
enum class ErrorKind {
  kConfig,       // ConfigError: the caller asked for something that cannot be
  kDevice,       // DeviceError: the operating system refused an operation (carries errno)
  kUnavailable,  // Unavailable: the peer is not there, or did not answer in time
  kCorrupt,      // Corrupt: bytes do not match their checksum
  kProtocol,     // ProtocolError: the peer broke the wire protocol, or speaks another version
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message, int error_number = 0)
      : std::runtime_error(message), kind_(kind), error_number_(error_number) {}

  ErrorKind kind() const noexcept { return kind_; }
  int error_number() const noexcept { return error_number_; }

 private:
  ErrorKind kind_;
  int error_number_;
};

}  // namespace hymcache
