"""Devices of exact physical ranges by splitting device-dax regions (CXL 1.1 and 2.0).

    idle ──mapping──▶ mapped ──new_id, bind──▶ bound ──unbind──▶ mapped ──size 0──▶ idle ──delete─▶
    ▲ create

Each step leaves a state that the next call recognises by the range, which is unique: a crash in
the middle is taken up from where it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from hymcache.dra.cdi import ContainerDevice
from hymcache.dra.host_agent.backend import MemoryRegion, PhysicalRange
from hymcache.dra.host_agent.dax_bus import BusDevice, DaxBus
from hymcache.dra.host_agent.holders import DeviceIdentity, find_holders, sees_all_processes
from hymcache.dra.host_agent.resources import DaxConflict, Holder
from hymcache.dra.host_agent.sysfs import Sysfs
from hymcache.errors import ConfigError, DeviceError
from hymcache.limits import MIB

# What the kernel maps at least: a subsection, and a huge page of x86-64.
_ALIGN_BYTES_MIN: Final = 2 * MIB
_DRIVER: Final = "device_dax"


class SysfsBackend:
    """The device-dax memory of this host. See DaxBackend."""

    name = "sysfs"

    def __init__(
        self,
        sysfs: Sysfs,
        device_folder: Path = Path("/dev"),
        find: Callable[[DeviceIdentity], tuple[Holder, ...]] = find_holders,
        *,
        is_root: bool | None = None,
    ) -> None:
        self._bus = DaxBus(sysfs)
        self._device_folder = device_folder
        self._find = find
        self._is_root = os.geteuid() == 0 if is_root is None else is_root

    def check(self) -> None:
        """See DaxBackend."""
        if not self._is_root:
            raise ConfigError("--backend sysfs: needs root to split devices and to see holders")
        if not sees_all_processes():
            raise ConfigError(
                "--backend sysfs: this process does not see the host's processes, so not who "
                "holds a device; run it with hostPID: true"
            )
        if not self._bus.has_driver:
            raise ConfigError(
                "--backend sysfs: the kernel has no driver device_dax; run: modprobe device_dax"
            )
        if not self._bus.regions():
            raise ConfigError(
                "--backend sysfs: no device-dax region that can be split under "
                "/sys/bus/dax/devices; load dax_cxl or dax_hmem, or create the CXL region"
            )

    def regions(self) -> tuple[MemoryRegion, ...]:
        """See DaxBackend."""
        return self._bus.regions()

    def create(self, allocation_id: str, wanted: PhysicalRange) -> ContainerDevice:
        """See DaxBackend."""
        device = self._find_device(wanted)
        if device is None:
            device = self._split(self._region_of(allocation_id, wanted), wanted)
        if device.driver is None:
            self._bus.bind(device.name)
        elif device.driver != _DRIVER:
            raise DaxConflict(f"{wanted}: {device.name} is used by the driver {device.driver}")
        path = self._device_folder / device.name
        if not path.is_char_device():
            raise DeviceError(f"{path}: the kernel bound the device, but made no node")
        return ContainerDevice(allocation_id, f"/dev/{device.name}", str(path), wanted.size_bytes)

    def identify(self, allocation_id: str, wanted: PhysicalRange) -> DeviceIdentity | None:
        """See DaxBackend."""
        device = self._find_device(wanted)
        if device is None or device.driver is None:
            return None
        return self._identity(device)

    def remove(self, allocation_id: str, wanted: PhysicalRange) -> None:
        """See DaxBackend."""
        device = self._find_device(wanted)
        if device is not None:
            self._dissolve(device)

    def _find_device(self, wanted: PhysicalRange) -> BusDevice | None:
        """The device of exactly this range."""
        for device in self._bus.devices():
            if device.ranges == (wanted,):
                return device
        return None

    def _region_of(self, allocation_id: str, wanted: PhysicalRange) -> MemoryRegion:
        regions = self._bus.regions()
        unknown = [region for region in regions if region.range is None]
        for region in regions:
            if region.range is not None and region.range.contains(wanted):
                break
        else:
            if len(unknown) != 1:
                raise ConfigError(
                    f"{allocation_id}: no device-dax region of this host has the range {wanted}; "
                    f"there are {_list(regions)}"
                )
            region = unknown[0]
        align_bytes = max(region.align_bytes, _ALIGN_BYTES_MIN)
        if wanted.start % align_bytes or wanted.size_bytes % align_bytes:
            raise ConfigError(
                f"{allocation_id}: start and size of {wanted} should be multiples of "
                f"{align_bytes // MIB} MiB"
            )
        return region

    def _split(self, region: MemoryRegion, wanted: PhysicalRange) -> BusDevice:
        self._give_back_whole(region)
        mine = [device for device in self._bus.devices() if device.region == region.name]
        for device in mine:
            if any(taken.overlaps(wanted) for taken in device.ranges):
                raise DaxConflict(f"{wanted}: {device.name} has {device.ranges[0]}")
        # One that a crash left behind does as well as a new one.
        idle = next((device.name for device in mine if device.is_idle), None)
        name = idle or self._bus.create_device(region.name)
        made = BusDevice(name, region.name, (wanted,), wanted.size_bytes, None)
        try:
            self._bus.map_range(name, wanted)
            self._bus.bind(name)
        except DeviceError:
            # The first error is the one to tell.
            with suppress(DeviceError, DaxConflict):
                self._dissolve(made)
            raise
        return BusDevice(name, region.name, (wanted,), wanted.size_bytes, _DRIVER)

    def _give_back_whole(self, region: MemoryRegion) -> None:
        """Before the first split the kernel's own daxR.0 has all of the region.

        As an allocation it may have it too: that this is not so, the agent's records say.
        """
        for device in self._bus.devices():
            is_whole = device.size_bytes == region.size_bytes and device.is_first
            if device.region != region.name or not is_whole:
                continue
            if device.driver == _DRIVER:
                self._refuse_if_held(device)
                self._bus.unbind(device.name)
            elif device.driver is not None:
                raise DaxConflict(
                    f"{device.name}: the driver {device.driver} has the whole region, as system "
                    f"memory; run: daxctl reconfigure-device --mode=devdax {device.name}"
                )
            self._bus.drop_memory(device.name)

    def _refuse_if_held(self, device: BusDevice) -> None:
        holders = self._find(self._identity(device))
        if holders:
            told = ", ".join(str(holder) for holder in holders[:3])
            raise DaxConflict(f"{device.name} has the whole region and is held by {told}")

    def _dissolve(self, device: BusDevice) -> None:
        driver = self._bus.driver_of(device.name)
        if driver == _DRIVER:
            self._bus.unbind(device.name)
        elif driver is not None:
            raise DaxConflict(f"{device.name}: is used by the driver {driver}")
        self._bus.drop_memory(device.name)
        self._bus.delete_device(device)

    def _identity(self, device: BusDevice) -> DeviceIdentity:
        try:
            return DeviceIdentity.of_node(self._device_folder / device.name, f"/dev/{device.name}")
        except FileNotFoundError as error:
            raise DeviceError(f"{device.name}: bound, but without a node in /dev") from error


def _list(regions: tuple[MemoryRegion, ...]) -> str:
    return ", ".join(str(region.range or region.name) for region in regions) or "none"
