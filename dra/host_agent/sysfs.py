"""The kernel's /sys as the sysfs back end uses it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from hymcache.errors import DeviceError


class Sysfs(Protocol):
    """Attributes by their path below /sys. All raise DeviceError with the kernel's errno."""

    def read(self, path: str) -> str:
        """An attribute's value, without the line end."""

    def write(self, path: str, value: str) -> None:
        """Sets an attribute, by one write()."""

    def names(self, path: str) -> tuple[str, ...]:
        """What is in a folder, sorted; nothing where there is no such folder."""

    def resolve(self, path: str) -> str | None:
        """The path below /sys that a link leads to; None where there is nothing."""


class KernelSysfs:
    """The Sysfs of this host, or of a guest's that is mounted elsewhere."""

    def __init__(self, root: Path = Path("/sys")) -> None:
        self._root = root

    def read(self, path: str) -> str:
        """See Sysfs."""
        try:
            return (self._root / path).read_text().rstrip("\n")
        except OSError as error:
            raise _refused(self._root / path, "read", error) from error

    def write(self, path: str, value: str) -> None:
        """See Sysfs."""
        target = self._root / path
        try:
            # Not buffered: sysfs takes a value whole, and tells errors at the write.
            descriptor = os.open(target, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(descriptor, value.encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _refused(target, f"write {value!r} to", error) from error

    def names(self, path: str) -> tuple[str, ...]:
        """See Sysfs."""
        try:
            return tuple(sorted(entry.name for entry in (self._root / path).iterdir()))
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise _refused(self._root / path, "list", error) from error

    def resolve(self, path: str) -> str | None:
        """See Sysfs."""
        try:
            real = (self._root / path).resolve(strict=True)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _refused(self._root / path, "follow", error) from error
        return str(real.relative_to(self._root.resolve()))


def _refused(path: Path, verb: str, error: OSError) -> DeviceError:
    return DeviceError(f"{path}: cannot {verb} it: {error.strerror}", error.errno or 0)
