"""What a host agent does to its host: a back end makes devices of physical ranges.

sysfs   device-dax of the kernel, split by sysfs (sysfs_backend.py)
dcd     CXL 3 dynamic capacity (dcd_backend.py)
file    files in a folder that simulated hosts share (file_backend.py)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hymcache.dra.cdi import ContainerDevice
from hymcache.dra.host_agent.holders import DeviceIdentity


@dataclass(frozen=True, slots=True, order=True)
class PhysicalRange:
    """Bytes of the host's physical address space: from `start` up to, but not, `end`."""

    start: int
    size_bytes: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.size_bytes <= 0 or self.end > 1 << 64:
            raise ValueError(f"not a range: start {self.start}, {self.size_bytes} bytes")

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.start + self.size_bytes

    def overlaps(self, other: PhysicalRange) -> bool:
        """Whether they share a byte."""
        return self.start < other.end and other.start < self.end

    def contains(self, other: PhysicalRange) -> bool:
        """Whether all bytes of the other are its own."""
        return self.start <= other.start and other.end <= self.end

    def __str__(self) -> str:
        # As /proc/iomem and the kernel's `mapping` write it: the last byte included.
        return f"{self.start:#x}-{self.end - 1:#x}"


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """Memory of the host that devices are made of.

    `range` is None while the kernel does not tell where it begins.
    """

    name: str
    range: PhysicalRange | None
    size_bytes: int
    available_bytes: int
    align_bytes: int


class DaxBackend(Protocol):
    """Makes and removes devices. All calls block; one at a time makes or removes.

    They raise ConfigError for what this host cannot do, DaxConflict where a range is taken, and
    DeviceError where the kernel refuses.
    """

    @property
    def name(self) -> str:
        """What `--backend` calls it."""

    def check(self) -> None:
        """Raises ConfigError where this host or this process is not fit for it."""

    def regions(self) -> tuple[MemoryRegion, ...]:
        """The memory that there is."""

    def create(self, allocation_id: str, wanted: PhysicalRange) -> ContainerDevice:
        """The device of exactly this range, made if it is not there."""

    def identify(self, allocation_id: str, wanted: PhysicalRange) -> DeviceIdentity | None:
        """How a process's hold on the device is recognised; None where there is no device."""

    def remove(self, allocation_id: str, wanted: PhysicalRange) -> None:
        """Takes the device away, if it is there. Nobody may hold it: the kernel would not stop it.

        `identify` and the search for holders come right before.
        """
