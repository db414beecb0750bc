"""The allocations of a host: recorded before they are made, and until they are gone.

                 MaterializeDAX            device made, CDI spec written
    (nothing) ───────────────▶ Materializing ───────────────▶ Ready ──(restart fails)──▶ Failed
        ▲                            │                          │ ▲                        │
        │   nobody holds it,         │      UnmaterializeDAX    │ │ MaterializeDAX         │
        └────────────────────── Draining ◀──────────────────────┘ └────────────────────────┘
          device removed              CDI spec removed: no new container gets it

A crash leaves a record, and `recover` takes up what it says.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from hymcache.dra.cdi import remove_cdi_spec, write_cdi_spec
from hymcache.dra.host_agent.backend import DaxBackend, MemoryRegion, PhysicalRange
from hymcache.dra.host_agent.holders import DeviceIdentity, find_holders
from hymcache.dra.host_agent.resources import AllocationPhase, DaxConflict, DaxDevice, Holder
from hymcache.dra.host_agent.revocation import FindHolders, wait_until_free
from hymcache.dra.names import cdi_device_name
from hymcache.dra.state_file import StateDocument, StateFile
from hymcache.errors import ConfigError, HymcacheError, Unavailable

# As many as a host can have: each region of a blade is at least one 8 GiB block.
_ALLOCATIONS_MAX: Final = 4_096
# How long a call waits for an earlier one of the same allocation.
_TURN_TIMEOUT_S: Final = 20.0

logger = logging.getLogger("hymcache.dra.host_agent")


class AllocationRecord(BaseModel):
    """What is known of an allocation across restarts. `path` as containers see it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    physical_start: int
    size_bytes: int
    phase: AllocationPhase
    path: str = ""
    message: str = ""

    @property
    def range(self) -> PhysicalRange:
        """Its bytes."""
        return PhysicalRange(self.physical_start, self.size_bytes)


class HostState(StateDocument):
    """The agent's state file: allocation id -> record."""

    allocations: dict[str, AllocationRecord] = Field(default_factory=dict)


@dataclass(slots=True)
class AllocationCounts:
    """What happened since the process started."""

    materialized: int = 0
    unmaterialized: int = 0
    failed: int = 0
    held: int = 0
    fenced: int = 0
    recovered: int = 0


@dataclass(slots=True)
class _Turn:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    calls: int = 0


class HostAllocations:
    """All allocations of one host. The methods that are not `async` are called from threads."""

    def __init__(
        self,
        backend: DaxBackend,
        state: StateFile[HostState],
        cdi_root: Path,
        *,
        find: FindHolders = find_holders,
    ) -> None:
        self._backend = backend
        self._state = state
        self._cdi_root = cdi_root
        self._find = find
        # Making and removing devices is read-modify-write on the kernel's bus.
        self._devices = threading.Lock()
        self._turns: dict[str, _Turn] = {}
        self.counts = AllocationCounts()

    def list_all(self) -> tuple[DaxDevice, ...]:
        """All records, in order of their ids."""
        allocations = self._state.load().allocations
        return tuple(_resource(name, record) for name, record in sorted(allocations.items()))

    def regions(self) -> tuple[MemoryRegion, ...]:
        """The memory that devices are made of."""
        with self._devices:
            return self._backend.regions()

    def recover(self) -> None:
        """Makes what the records say, after a restart of the agent or of the host.

        What cannot be made is FAILED and told; the others are not held up by it.
        """
        for name, record in self._state.load().allocations.items():
            if record.phase is AllocationPhase.DRAINING:
                remove_cdi_spec(self._cdi_root, name)
                continue
            try:
                self._make(name, record)
                self.counts.recovered += 1
            except HymcacheError as error:
                self.counts.failed += 1
                logger.error("%s: cannot be made again: %s", name, error)
                remove_cdi_spec(self._cdi_root, name)
                self._record(name, record, AllocationPhase.FAILED, message=str(error))

    async def materialize(
        self, allocation_id: str, physical_start: int, size_bytes: int
    ) -> tuple[DaxDevice, bool]:
        """The device of these bytes, and whether it was made now.

        Raises DaxConflict, ConfigError, DeviceError, and Unavailable while the allocation is
        being unmaterialised.
        """
        try:
            wanted = PhysicalRange(physical_start, size_bytes)
        except ValueError as error:
            raise ConfigError(f"{allocation_id}: {error}") from error
        async with self._turn(allocation_id):
            return await asyncio.to_thread(self._materialize, allocation_id, wanted)

    async def unmaterialize(
        self, allocation_id: str, *, fence: bool, wait_s: float
    ) -> tuple[Holder, ...]:
        """Takes the device away, at the latest when `wait_s` are over; who holds it if not."""
        async with self._turn(allocation_id):
            record = await asyncio.to_thread(self._drain, allocation_id)
            if record is None:
                return ()
            return await self._remove_when_free(allocation_id, record, fence, wait_s)

    # --- materialise ---------------------------------------------------------------------------

    def _materialize(self, name: str, wanted: PhysicalRange) -> tuple[DaxDevice, bool]:
        with self._state.change() as state:
            _check_free(state.allocations, name, wanted)
            before = state.allocations.get(name)
            if before is None:
                state.allocations[name] = AllocationRecord(
                    physical_start=wanted.start,
                    size_bytes=wanted.size_bytes,
                    phase=AllocationPhase.MATERIALIZING,
                )
            record = state.allocations[name]
        try:
            made = self._make(name, record)
        except HymcacheError:
            self.counts.failed += 1
            if before is None:
                self._forget_unmade(name, wanted)
            raise
        is_new = before is None or before.phase is not AllocationPhase.READY
        self.counts.materialized += is_new
        return made, is_new

    def _make(self, name: str, record: AllocationRecord) -> DaxDevice:
        with self._devices:
            device = self._backend.create(name, record.range)
        write_cdi_spec(self._cdi_root, device)
        ready = self._record(name, record, AllocationPhase.READY, path=device.container_path)
        return _resource(name, ready)

    def _forget_unmade(self, name: str, wanted: PhysicalRange) -> None:
        """What could not be made is not remembered, unless a part of it stays."""
        try:
            with self._devices:
                if self._backend.identify(name, wanted) is not None:
                    return
        except HymcacheError as error:
            logger.warning("%s: %s", name, error)
            return
        with self._state.change() as state:
            state.allocations.pop(name, None)

    # --- unmaterialise -------------------------------------------------------------------------

    def _drain(self, name: str) -> AllocationRecord | None:
        record = self._state.load().allocations.get(name)
        remove_cdi_spec(self._cdi_root, name)
        if record is None or record.phase is AllocationPhase.DRAINING:
            return record
        return self._record(name, record, AllocationPhase.DRAINING, path=record.path)

    async def _remove_when_free(
        self, name: str, record: AllocationRecord, fence: bool, wait_s: float
    ) -> tuple[Holder, ...]:
        identity = await asyncio.to_thread(self._identify, name, record)
        if identity is not None:
            holders = await wait_until_free(
                identity, wait_s=wait_s, fence=fence, find=self._find, on_kill=self._on_kill
            )
            if holders:
                self.counts.held += 1
                return holders
        return await asyncio.to_thread(self._remove, name, record)

    def _remove(self, name: str, record: AllocationRecord) -> tuple[Holder, ...]:
        with self._devices:
            # Once more, right before: somebody on the host may have come in the meantime.
            identity = self._backend.identify(name, record.range)
            holders = self._find(identity) if identity is not None else ()
            if holders:
                self.counts.held += 1
                return holders
            self._backend.remove(name, record.range)
        with self._state.change() as state:
            state.allocations.pop(name, None)
        self.counts.unmaterialized += 1
        return ()

    def _identify(self, name: str, record: AllocationRecord) -> DeviceIdentity | None:
        with self._devices:
            return self._backend.identify(name, record.range)

    def _on_kill(self, holder: Holder) -> None:
        self.counts.fenced += 1
        logger.warning("killing %s, which holds a device that is to go", holder)

    # --- records and turns ---------------------------------------------------------------------

    def _record(
        self,
        name: str,
        record: AllocationRecord,
        phase: AllocationPhase,
        *,
        path: str = "",
        message: str = "",
    ) -> AllocationRecord:
        update = {"phase": phase, "path": path or record.path, "message": message}
        changed = record.model_copy(update=update)
        with self._state.change() as state:
            state.allocations[name] = changed
        return changed

    @asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[None]:
        """One call at a time for each allocation."""
        turn = self._turns.setdefault(name, _Turn())
        turn.calls += 1
        try:
            try:
                async with asyncio.timeout(_TURN_TIMEOUT_S):
                    await turn.lock.acquire()
            except TimeoutError as error:
                raise Unavailable(f"{name}: an earlier request for it is under way") from error
            try:
                yield
            finally:
                turn.lock.release()
        finally:
            turn.calls -= 1
            if turn.calls == 0:
                del self._turns[name]


def _check_free(allocations: dict[str, AllocationRecord], name: str, wanted: PhysicalRange) -> None:
    own = allocations.get(name)
    if own is not None and own.range != wanted:
        raise DaxConflict(f"{name}: is materialised as {own.range}, not as {wanted}")
    for other, record in allocations.items():
        if other != name and record.range.overlaps(wanted):
            raise DaxConflict(f"{name}: {wanted} has bytes of the allocation {other}")
    if own is None and len(allocations) >= _ALLOCATIONS_MAX:
        raise Unavailable(f"{name}: this host has {_ALLOCATIONS_MAX} allocations already")


def _resource(name: str, record: AllocationRecord) -> DaxDevice:
    return DaxDevice(
        allocation_id=name,
        path=record.path,
        size_bytes=record.size_bytes,
        physical_start=record.physical_start,
        cdi_name=cdi_device_name(name),
        phase=record.phase,
        message=record.message,
    )
