"""The health of the devices that pods on this node use: whether all of them is still there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hymcache.dra.kubelet_plugin.checkpoint import Checkpoint
from hymcache.dra.kubelet_plugin.prepared_device import missing_parts
from hymcache.dra.state_file import StateFile
from hymcache.errors import HymcacheError

# How often devices are looked at when nothing was prepared or unprepared.
LOOK_S: Final = 20.0
# The kubelet takes a device's health for unknown when it has not heard of it for so long: two
# looks may be late.
TIMEOUT_S: Final = 60


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """A device of a pool, which may serve several claims; `fault` is None while it works."""

    pool: str
    device: str
    fault: str | None
    updated_s: int


class DeviceHealth:
    """Looks at the prepared devices, and tells those who follow."""

    def __init__(
        self,
        checkpoint: StateFile[Checkpoint],
        cdi_root: Path,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._checkpoint = checkpoint
        self._cdi_root = cdi_root
        self._now_s = now_s
        self._changed = asyncio.Event()
        self.followers = 0

    def tell_change(self) -> None:
        """What is prepared has changed: followers get a report now."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def look(self) -> tuple[DeviceReport, ...]:
        """All devices that are in use on this node, as they are now."""
        updated_s = int(self._now_s())
        faults: dict[tuple[str, str], str | None] = {}
        for uid, claim in sorted(self._checkpoint.load().claims.items()):
            for prepared in claim.devices:
                key = (prepared.pool, prepared.device)
                fault = self._fault(prepared.cdi_names)
                told = f"claim {claim.namespace}/{claim.name} ({uid}): {fault}" if fault else None
                faults[key] = faults.get(key) or told
        return tuple(
            DeviceReport(pool, device, fault, updated_s)
            for (pool, device), fault in sorted(faults.items())
        )

    async def follow(self) -> AsyncIterator[tuple[DeviceReport, ...]]:
        """The devices now, after each change, and every LOOK_S."""
        self.followers += 1
        try:
            while True:
                changed = self._changed
                yield await asyncio.to_thread(self.look)
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await changed.wait()
        finally:
            self.followers -= 1

    def _fault(self, cdi_names: tuple[str, ...]) -> str | None:
        try:
            return missing_parts(cdi_names, self._cdi_root)
        except HymcacheError as error:
            return str(error)
