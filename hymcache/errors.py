"""The errors that HyMCache raises.

A miss, a skip, a full buffer and a retry are results, never errors. The C++ core raises the same
classes: each `hymcache::ErrorKind` (hymcache/csrc/error.h) maps to one of them.
"""

from __future__ import annotations


class HymcacheError(Exception):
    """What all errors of this package have in common. Its text is one line, fit for a user."""


class ConfigError(HymcacheError):
    """The caller asked for something that cannot be; the text names the key and the fix."""


class DeviceError(HymcacheError):
    """The operating system refused an operation on a device.

    `errno` is the system's error number (see the module `errno`), 0 when it gave none.
    """

    def __init__(self, message: str, errno: int = 0) -> None:
        super().__init__(message)
        self.errno = errno

    def __reduce__(self) -> tuple[type[DeviceError], tuple[str, int]]:
        # Exception's own would lose errno on the way through pickle (multiprocessing does that).
        return type(self), (str(self), self.errno)


class Unavailable(HymcacheError):
    """The peer is not there, or did not answer before the deadline."""


class Corrupt(HymcacheError):
    """Bytes do not match their checksum."""


class ProtocolError(HymcacheError):
    """The peer broke the wire protocol, or speaks another version of it."""
