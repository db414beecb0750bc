"""The device-dax bus as sysfs shows it: regions, their devices, and the steps that change them.

    region     <parent of its devices>/dax_region: create, delete, seed, available_size, align
    device     bus/dax/devices/daxR.N: size, resource, mapping, mapping0/{start,end}, driver
    driver     bus/dax/drivers/device_dax: new_id, bind, unbind, remove_id

Each step is one write; what the kernel does with it is told by drivers/dax/bus.c.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from hymcache.dra.host_agent.backend import MemoryRegion, PhysicalRange
from hymcache.dra.host_agent.sysfs import Sysfs
from hymcache.errors import DeviceError

DEVICES: Final = "bus/dax/devices"
DRIVER: Final = "bus/dax/drivers/device_dax"
_DEVICE_NAME: Final = re.compile(r"dax([0-9]+)\.([0-9]+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class BusDevice:
    """A device of the bus: its ranges in the order in which it shows them; `driver` if bound."""

    name: str
    region: str
    ranges: tuple[PhysicalRange, ...]
    size_bytes: int
    driver: str | None

    @property
    def is_first(self) -> bool:
        """daxR.0, which the kernel never deletes."""
        return self.name.endswith(".0")

    @property
    def is_idle(self) -> bool:
        """Without memory, unbound, and to be deleted or used as one likes."""
        return self.size_bytes == 0 and self.driver is None and not self.is_first


class DaxBus:
    """Reads and changes the bus. Not for several processes at once: the kernel tells no owners."""

    def __init__(self, sysfs: Sysfs) -> None:
        self._sysfs = sysfs

    @property
    def has_driver(self) -> bool:
        """Whether the kernel's module device_dax is there."""
        return bool(self._sysfs.names(DRIVER))

    def devices(self) -> tuple[BusDevice, ...]:
        """All devices of all regions that can be split."""
        names = (name for name in self._sysfs.names(DEVICES) if _DEVICE_NAME.fullmatch(name))
        found = (self._device(name) for name in names)
        return tuple(device for device in found if device is not None)

    def regions(self) -> tuple[MemoryRegion, ...]:
        """All regions that can be split."""
        devices = self.devices()
        paths = dict.fromkeys(device.region for device in devices)
        return tuple(
            self._region(path, [device for device in devices if device.region == path])
            for path in paths
        )

    def create_device(self, region: str) -> str:
        """A new device without memory; its name."""
        self._sysfs.write(f"{region}/create", "1")
        # `create` shows the youngest device. `seed` would show the oldest that was never bound:
        # after a crash that is not the one just made.
        name = self._sysfs.read(f"{region}/create") or self._sysfs.read(f"{region}/seed")
        if not _DEVICE_NAME.fullmatch(name):
            raise DeviceError(f"{region}: the kernel made a device, but does not tell which")
        return name

    def map_range(self, name: str, wanted: PhysicalRange) -> None:
        """Gives a device these bytes, exactly."""
        value = f"{wanted.start:x}-{wanted.end - 1:x}"
        self._sysfs.write(f"{DEVICES}/{name}/mapping", value)

    def drop_memory(self, name: str) -> None:
        """Takes all bytes from an unbound device."""
        self._sysfs.write(f"{DEVICES}/{name}/size", "0")

    def bind(self, name: str) -> None:
        """Makes /dev/<name>. A device is bound by name: another driver may be the default."""
        refusals: list[DeviceError] = []
        for attribute in ("new_id", "bind"):
            try:
                self._sysfs.write(f"{DRIVER}/{attribute}", name)
            except DeviceError as error:
                # new_id tries other devices too, and tells their errors: what counts is below.
                refusals.append(error)
            if self.driver_of(name) == PurePosixPath(DRIVER).name:
                return
        driver = self.driver_of(name)
        if driver is not None:
            raise DeviceError(f"{name}: the driver {driver} has it", errno.EBUSY)
        raise refusals[-1] if refusals else DeviceError(f"{name}: it does not bind", errno.EIO)

    def unbind(self, name: str) -> None:
        """Removes /dev/<name>, under whoever holds it."""
        self._sysfs.write(f"{DRIVER}/unbind", name)

    def delete_device(self, device: BusDevice) -> None:
        """Removes an unbound device without memory, and what binds its name; daxR.0 stays."""
        if not device.is_first:
            self._sysfs.write(f"{device.region}/delete", device.name)
        self._sysfs.write(f"{DRIVER}/remove_id", device.name)

    def driver_of(self, name: str) -> str | None:
        """The driver that a device is bound to."""
        target = self._sysfs.resolve(f"{DEVICES}/{name}/driver")
        return PurePosixPath(target).name if target else None

    def _device(self, name: str) -> BusDevice | None:
        target = self._sysfs.resolve(f"{DEVICES}/{name}")
        if target is None:
            return None
        region = str(PurePosixPath(target).parent / "dax_region")
        if "create" not in self._sysfs.names(region):
            return None  # a static region (pmem): its devices are made by other means
        return BusDevice(
            name=name,
            region=region,
            ranges=self._ranges(name),
            size_bytes=int(self._sysfs.read(f"{DEVICES}/{name}/size")),
            driver=self.driver_of(name),
        )

    def _ranges(self, name: str) -> tuple[PhysicalRange, ...]:
        ranges = []
        folder = f"{DEVICES}/{name}"
        for entry in self._sysfs.names(folder):
            if re.fullmatch(r"mapping[0-9]+", entry):
                start = int(self._sysfs.read(f"{folder}/{entry}/start"), 16)
                end = int(self._sysfs.read(f"{folder}/{entry}/end"), 16)
                ranges.append(PhysicalRange(start, end + 1 - start))
        return tuple(ranges)

    def _region(self, path: str, devices: list[BusDevice]) -> MemoryRegion:
        size_bytes = int(self._sysfs.read(f"{path}/size"))
        start = self._region_start(path, devices, size_bytes)
        return MemoryRegion(
            name=path,
            range=None if start is None else PhysicalRange(start, size_bytes),
            size_bytes=size_bytes,
            available_bytes=int(self._sysfs.read(f"{path}/available_size")),
            align_bytes=int(self._sysfs.read(f"{path}/align")),
        )

    def _region_start(self, path: str, devices: list[BusDevice], size_bytes: int) -> int | None:
        """A device without memory shows where its region begins; others, where they do."""
        for device in devices:
            if device.size_bytes in {0, size_bytes}:
                return int(self._sysfs.read(f"{DEVICES}/{device.name}/resource"), 16)
        # CXL: .../regionN/dax_regionN/dax_region.
        cxl_region = PurePosixPath(path).parent.parent
        if "resource" in self._sysfs.names(str(cxl_region)):
            return int(self._sysfs.read(f"{cxl_region}/resource"), 16)
        return None
