"""Devices by dynamic capacity (DCD, CXL 3): the appliance adds the extents, nothing is split.

No released kernel accepts extents: the patches are under review, and what they show in sysfs has
changed from one version to the next. So this back end says what is missing, and which to use.
"""

from __future__ import annotations

import platform
import re
from typing import Final, NoReturn

from hymcache.dra.cdi import ContainerDevice
from hymcache.dra.host_agent.backend import MemoryRegion, PhysicalRange
from hymcache.dra.host_agent.holders import DeviceIdentity
from hymcache.dra.host_agent.sysfs import Sysfs
from hymcache.errors import ConfigError

_CXL_DEVICES: Final = "bus/cxl/devices"
# A root decoder of a kernel with the patches makes regions of dynamic capacity.
_CREATE_REGION: Final = re.compile(r"create_(?:dc|dynamic_ram_[a-z])_region", re.ASCII)


class DcdBackend:
    """Dynamic capacity of this host: not supported by its kernel. See DaxBackend."""

    name = "dcd"

    def __init__(self, sysfs: Sysfs) -> None:
        self._sysfs = sysfs

    def check(self) -> None:
        """See DaxBackend."""
        self._refuse()

    def regions(self) -> tuple[MemoryRegion, ...]:
        """See DaxBackend."""
        return ()

    def create(self, allocation_id: str, wanted: PhysicalRange) -> ContainerDevice:
        """See DaxBackend."""
        self._refuse()

    def identify(self, allocation_id: str, wanted: PhysicalRange) -> DeviceIdentity | None:
        """See DaxBackend."""
        return None

    def remove(self, allocation_id: str, wanted: PhysicalRange) -> None:
        """See DaxBackend."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        found = "has it in a form that no release defines" if self._has_patches() else "lacks it"
        raise ConfigError(
            f"--backend dcd: CXL dynamic capacity is not supported by this kernel: "
            f"{platform.release()} {found}; use --backend sysfs, with regions that are static"
        )

    def _has_patches(self) -> bool:
        return any(
            _CREATE_REGION.fullmatch(attribute)
            for decoder in self._sysfs.names(_CXL_DEVICES)
            if decoder.startswith("decoder0.")
            for attribute in self._sysfs.names(f"{_CXL_DEVICES}/{decoder}")
        )
