"""Devices that are files, for simulations: hosts that share a folder share its memory.

    <memory>/<start>-<end>.mem           the bytes of a range, sparse
    <memory>/hosts/<host>/<allocation>   the device of a host: a hard link to them

So a range has the same bytes on all hosts, and is gone when the last of them lets go of it: the
next to get it finds zeros.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

from hymcache.dra.cdi import ContainerDevice
from hymcache.dra.host_agent.backend import MemoryRegion, PhysicalRange
from hymcache.dra.host_agent.holders import DeviceIdentity
from hymcache.dra.host_agent.resources import DaxConflict
from hymcache.dra.state_file import locked
from hymcache.errors import ConfigError, DeviceError
from hymcache.limits import MIB, TIB

_ALIGN_BYTES: Final = 2 * MIB
# Where CXL windows lie on hosts of today: above what a host may have of its own.
DEFAULT_RANGE: Final = PhysicalRange(1 * TIB, 16 * TIB)


class FileBackend:
    """The memory of a simulated host. See DaxBackend."""

    name = "file"

    def __init__(self, memory: Path, host: str, region: PhysicalRange = DEFAULT_RANGE) -> None:
        """`memory` is shared by hosts on the same blades; `host` names this one in it."""
        self._memory = memory.absolute()
        self._devices = self._memory / "hosts" / host
        self._region = region

    def check(self) -> None:
        """See DaxBackend."""
        try:
            self._devices.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._memory):
                pass
        except OSError as error:
            raise ConfigError(
                f"{self._devices}: cannot write there ({error.strerror}); name another --memory"
            ) from error

    def regions(self) -> tuple[MemoryRegion, ...]:
        """See DaxBackend."""
        used_bytes = sum(path.stat().st_size for path in self._devices.glob("*"))
        size_bytes = self._region.size_bytes
        return (
            MemoryRegion(
                "file", self._region, size_bytes, max(0, size_bytes - used_bytes), _ALIGN_BYTES
            ),
        )

    def create(self, allocation_id: str, wanted: PhysicalRange) -> ContainerDevice:
        """See DaxBackend."""
        if not self._region.contains(wanted):
            raise ConfigError(
                f"{allocation_id}: {wanted} is not in this host's memory {self._region}"
            )
        if wanted.start % _ALIGN_BYTES or wanted.size_bytes % _ALIGN_BYTES:
            raise ConfigError(
                f"{allocation_id}: start and size of {wanted} should be multiples of 2 MiB"
            )
        device = self._devices / allocation_id
        try:
            self._devices.mkdir(parents=True, exist_ok=True)
            with locked(self._memory / "lock"):
                memory = self._memory_file(wanted)
                if not device.exists():
                    device.hardlink_to(memory)
                elif not device.samefile(memory):
                    raise DaxConflict(f"{device}: has another range than {wanted}")
        except OSError as error:
            raise DeviceError(f"{device}: {error.strerror}", error.errno or 0) from error
        return ContainerDevice(
            allocation_id, _container_path(allocation_id), str(device), wanted.size_bytes, True
        )

    def identify(self, allocation_id: str, wanted: PhysicalRange) -> DeviceIdentity | None:
        """See DaxBackend."""
        try:
            return DeviceIdentity.of_file(
                self._devices / allocation_id, _container_path(allocation_id)
            )
        except FileNotFoundError:
            return None

    def remove(self, allocation_id: str, wanted: PhysicalRange) -> None:
        """See DaxBackend."""
        memory = self._memory / _memory_name(wanted)
        with locked(self._memory / "lock"):
            (self._devices / allocation_id).unlink(missing_ok=True)
            if memory.exists() and memory.stat().st_nlink == 1:
                memory.unlink()

    def _memory_file(self, wanted: PhysicalRange) -> Path:
        path = self._memory / _memory_name(wanted)
        if not path.exists():
            descriptor, temporary = tempfile.mkstemp(dir=self._memory, prefix=".new-")
            try:
                os.ftruncate(descriptor, wanted.size_bytes)
                # As with a device node: the claim decides which pods get it, not the user's id.
                os.fchmod(descriptor, 0o666)
            finally:
                os.close(descriptor)
            Path(temporary).replace(path)
        return path


def _memory_name(wanted: PhysicalRange) -> str:
    return f"{wanted.start:x}-{wanted.end - 1:x}.mem"


def _container_path(allocation_id: str) -> str:
    return f"/dev/cxl-{allocation_id}"
