"""The device-dax bus of a kernel, emulated: what drivers/dax/bus.c (Linux 6.12) answers to writes.

Each bound device has a real character device of its own (a terminal), so that processes can hold
it and be found. The emulation refuses what the kernel refuses, with its errno; what the kernel
does not refuse though it is fatal, unbinding a device under a holder, it writes down.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

from hymcache.dra.host_agent.holders import DeviceIdentity, find_holders
from hymcache.dra.host_agent.resources import Holder
from hymcache.errors import DeviceError

MIB = 1 << 20
GIB = 1 << 30
_BUS = "bus/dax"
_SUBSECTION = 2 * MIB


class Crashed(BaseException):
    """The process ended here: nothing after it is run."""


@dataclass
class EmulatedDevice:
    """A struct dev_dax. Ranges include their last byte, as the kernel's."""

    number: int
    ranges: list[tuple[int, int]] = field(default_factory=list)
    driver: str | None = None

    @property
    def size(self) -> int:
        return sum(end + 1 - start for start, end in self.ranges)


class EmulatedSysfs:
    """One dynamic region of hmem, `dax0.0` over all of it and bound, as after booting."""

    def __init__(
        self,
        nodes: Path,
        *,
        start: int = 4 * GIB,
        size: int = GIB,
        align: int = _SUBSECTION,
        driver: str | None = "device_dax",
        cxl: bool = False,
        find: Callable[[DeviceIdentity], tuple[Holder, ...]] = find_holders,
    ) -> None:
        self._find = find
        self.start, self.size, self.align = start, size, align
        self._nodes = nodes
        nodes.mkdir(parents=True, exist_ok=True)
        self._parent = (
            "devices/platform/ACPI0017:00/root0/decoder0.0/region0/dax_region0"
            if cxl
            else "devices/platform/hmem.0"
        )
        self._is_cxl = cxl
        self._made: dict[str, Callable[[], None]] = {}
        self._ids: dict[str, set[str]] = {"device_dax": set(), "kmem": set()}
        self._seed: str | None = None
        self._youngest: str | None = None
        self.devices: dict[str, EmulatedDevice] = {}
        self.writes: list[tuple[str, str]] = []
        self.unbound_under: list[str] = []
        self.crash_at_write: int | None = None
        self.before_write: Callable[[str, str], None] = lambda _path, _value: None
        self.reboot(driver)

    def reboot(self, driver: str | None = "device_dax") -> None:
        """Splits are gone: they live in the kernel's memory only."""
        self.close()
        self._ids = {"device_dax": set(), "kmem": set()}
        self._seed = self._youngest = None
        whole = EmulatedDevice(0, [(self.start, self.start + self.size - 1)])
        self.devices = {"dax0.0": whole}
        if driver is not None:
            self._bind("dax0.0", driver)

    def close(self) -> None:
        for name in list(self._made):
            self._remove_node(name)

    # --- Sysfs ---------------------------------------------------------------------------------

    def read(self, path: str) -> str:
        region = f"{self._parent}/dax_region"
        if path.startswith(region):
            return self._read_region(path.removeprefix(f"{region}/"))
        if self._is_cxl and path == str(Path(self._parent).parent / "resource"):
            return f"{self.start:#x}"
        match = re.fullmatch(rf"{_BUS}/devices/(dax0\.\d+)/(.+)", path)
        if match is None or match[1] not in self.devices:
            _refuse(path, errno.ENOENT)
        return self._read_device(path, self.devices[match[1]], match[2])

    def write(self, path: str, value: str) -> None:
        if self.crash_at_write is not None and len(self.writes) == self.crash_at_write:
            raise Crashed(path)
        self.before_write(path, value)
        self.writes.append((path, value))
        region = f"{self._parent}/dax_region"
        device = re.fullmatch(rf"{_BUS}/devices/(dax0\.\d+)/(size|mapping)", path)
        driver = re.fullmatch(rf"{_BUS}/drivers/(\w+)/(new_id|remove_id|bind|unbind)", path)
        if path == f"{region}/create":
            self._create(path, value)
        elif path == f"{region}/delete":
            self._delete(path, value)
        elif device is not None and device[1] in self.devices:
            change = self._resize if device[2] == "size" else self._map
            change(path, device[1], value)
        elif driver is not None and driver[1] in self._ids:
            self._write_driver(path, driver[1], driver[2], value)
        else:
            _refuse(path, errno.ENOENT)

    def names(self, path: str) -> tuple[str, ...]:
        region = f"{self._parent}/dax_region"
        folders = {
            f"{_BUS}/devices": tuple(sorted(self.devices)),
            f"{_BUS}/drivers/device_dax": ("bind", "new_id", "remove_id", "unbind"),
            region: ("align", "available_size", "create", "delete", "id", "seed", "size"),
            str(Path(self._parent).parent): ("resource", "uuid") if self._is_cxl else ("hmem.0",),
        }
        if path in folders:
            return folders[path]
        match = re.fullmatch(rf"{_BUS}/devices/(dax0\.\d+)", path)
        if match is None or match[1] not in self.devices:
            return ()
        mappings = [f"mapping{i}" for i in range(len(self.devices[match[1]].ranges))]
        return ("align", "mapping", *mappings, "resource", "size")

    def resolve(self, path: str) -> str | None:
        match = re.fullmatch(rf"{_BUS}/devices/(dax0\.\d+)(/driver)?", path)
        if match is None or match[1] not in self.devices:
            return None
        if not match[2]:
            return f"{self._parent}/{match[1]}"
        driver = self.devices[match[1]].driver
        return f"{_BUS}/drivers/{driver}" if driver else None

    # --- attributes ----------------------------------------------------------------------------

    def _read_region(self, attribute: str) -> str:
        return {
            "size": str(self.size),
            "align": str(self.align),
            "available_size": str(self._available()),
            "seed": self._seed or "",
            "create": self._youngest or "",
            "id": "0",
        }[attribute]

    def _read_device(self, path: str, device: EmulatedDevice, attribute: str) -> str:
        if attribute == "size":
            return str(device.size)
        if attribute == "resource":
            return f"{device.ranges[0][0] if device.ranges else self.start:#x}"
        mapping = re.fullmatch(r"mapping(\d+)/(start|end)", attribute)
        if mapping is None or int(mapping[1]) >= len(device.ranges):
            _refuse(path, errno.ENOENT)
        return f"{device.ranges[int(mapping[1])][mapping[2] == 'end']:#x}"

    def _available(self) -> int:
        return self.size - sum(device.size for device in self.devices.values())

    def _create(self, path: str, value: str) -> None:
        if value != "1":
            _refuse(path, errno.EINVAL)
        if self._available() == 0:
            _refuse(path, errno.ENOSPC)
        taken = {device.number for device in self.devices.values()}
        number = next(i for i in range(len(taken) + 1) if i not in taken)
        name = f"dax0.{number}"
        self.devices[name] = EmulatedDevice(number)
        # The first one that was never bound stays the seed.
        self._seed = self._seed or name
        self._youngest = name

    def _delete(self, path: str, value: str) -> None:
        device = self.devices.get(value)
        if device is None:
            _refuse(path, errno.ENXIO)
        if device.driver or device.size or device.number == 0:
            _refuse(path, errno.EBUSY)
        del self.devices[value]
        self._seed = None if self._seed == value else self._seed
        self._youngest = None if self._youngest == value else self._youngest

    def _resize(self, path: str, name: str, value: str) -> None:
        device = self.devices[name]
        if int(value, 0) % self.align:
            _refuse(path, errno.EINVAL)
        if device.driver:
            _refuse(path, errno.EBUSY)
        if value != "0":
            raise AssertionError("the agent gives devices exact ranges, never a size")
        device.ranges.clear()

    def _map(self, path: str, name: str, value: str) -> None:
        start, end = (int(part, 16) for part in value.split("-"))
        if (end + 1 - start) % self.align:
            _refuse(path, errno.ENXIO)
        outside = start < self.start or end >= self.start + self.size or end < start
        taken = (r for device in self.devices.values() for r in device.ranges)
        if outside or any(start <= last and first <= end for first, last in taken):
            _refuse(path, errno.ENOMEM)
        self.devices[name].ranges.append((start, end))

    def _write_driver(self, path: str, driver: str, attribute: str, name: str) -> None:
        if not re.fullmatch(r"dax\d+\.\d+", name):
            _refuse(path, errno.EINVAL)
        if attribute == "new_id":
            self._ids[driver].add(name)
            if name in self.devices and self.devices[name].driver is None:
                self._bind(name, driver)  # driver_attach; what it answers is not told
        elif attribute == "remove_id":
            self._ids[driver].discard(name)
        elif name not in self.devices:
            _refuse(path, errno.ENODEV)
        elif attribute == "bind":
            if self.devices[name].driver is not None:
                _refuse(path, errno.EBUSY)
            if name not in self._ids[driver] or not self._bind(name, driver):
                _refuse(path, errno.ENODEV)
        else:
            if self.devices[name].driver != driver:
                _refuse(path, errno.ENODEV)
            self._unbind(name)

    # --- drivers -------------------------------------------------------------------------------

    def _bind(self, name: str, driver: str) -> bool:
        device = self.devices[name]
        # dev_dax_probe maps with huge pages: a start that is not aligned to them does not work.
        if device.size == 0 or any(start % self.align for start, _ in device.ranges):
            return False
        device.driver = driver
        if driver == "device_dax":
            self._made[name] = self.make_node(self._nodes / name)
        self._seed = None if self._seed == name else self._seed
        return True

    def make_node(self, path: Path) -> Callable[[], None]:
        """Makes a character device that nobody has open; what it returns ends it."""
        master, slave = os.openpty()
        path.symlink_to(os.ttyname(slave))
        os.close(slave)
        return partial(os.close, master)

    def _unbind(self, name: str) -> None:
        if name in self._made:
            identity = DeviceIdentity.of_node(self._nodes / name, f"/dev/{name}")
            if self._find(identity):
                self.unbound_under.append(name)
            self._remove_node(name)
        self.devices[name].driver = None

    def _remove_node(self, name: str) -> None:
        (self._nodes / name).unlink()
        self._made.pop(name)()


def _refuse(path: str, number: int) -> NoReturn:
    raise DeviceError(f"/sys/{path}: {os.strerror(number)}", number)
