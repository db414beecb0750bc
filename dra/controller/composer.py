"""Makes regions and gives them back: the steps at the fabric manager, each noted in the ledger.

Composes and frees of one blade come one after another: a region whose answer was lost is found
again among those that were not there before, and names of regions that were freed come back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import replace
from typing import Final

from hymcache.dra.claim import RegionKey
from hymcache.dra.controller.blades import BladeBook
from hymcache.dra.controller.fabric_timer import FabricTimer
from hymcache.dra.controller.ledger import Ledger
from hymcache.dra.controller.region_record import RecordState, RegionRecord
from hymcache.dra.controller.settings import ControllerSettings
from hymcache.dra.controller.steps import Step, StepHook
from hymcache.dra.fabric import (
    AllocationId,
    BladeKey,
    ComposeRequest,
    FabricConflict,
    FabricManager,
    FabricRejected,
    HostId,
    MemoryId,
    Region,
)
from hymcache.errors import HymcacheError, Unavailable

_log = logging.getLogger(__name__)
_NOT_FOUND: Final = 404


class NotYet(HymcacheError):
    """Regions that nobody has any more are in the way, or an attempt may still be under way."""


class Composer:
    """Changes regions. `leading` is asked before each change: one who lost the lease makes none."""

    def __init__(
        self,
        fabric: FabricManager,
        ledger: Ledger,
        book: BladeBook,
        settings: ControllerSettings,
        *,
        hook: StepHook,
        leading: Callable[[], bool],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._fabric = fabric
        self._ledger = ledger
        self._book = book
        self._settings = settings
        self._hook = hook
        self._leading = leading
        self._wall_clock = wall_clock
        self._locks: defaultdict[BladeKey, asyncio.Lock] = defaultdict(asyncio.Lock)
        # Records all of whose attempts to compose were refused: there is no region of theirs.
        self._nothing_made: set[RegionKey] = set()
        # Hosts from which a region could not be taken because something does not answer.
        self.away: dict[RegionKey, set[HostId]] = {}
        self.timer = FabricTimer()
        self.composed = 0
        self.freed = 0

    def lock(self, blade: BladeKey) -> asyncio.Lock:
        """Held while regions of a blade come or go."""
        return self._locks[blade]

    # --- making ------------------------------------------------------------------------------

    async def compose(self, record: RegionRecord, qos: Sequence[int] = ()) -> RegionRecord:
        """The region of a record that is new, or whose attempt was cut short.

        `qos` are tried one after the other where the blade has no room for the record's. Raises
        NotYet, FabricConflict (no room), FabricRejected, Unavailable.
        """
        for following in (*qos, None):
            try:
                return await self._compose(record)
            except FabricConflict as error:
                if following is None:
                    self._check_leaking(record.blade, error)
                    raise
                # Refused: nothing was made. An attempt is in the ledger by now, if not before.
                known = self._ledger.get(record.key)
                record = replace(known or record, qos=following)
                if known is not None:
                    record = await self._ledger.put(record)
        raise AssertionError("not reached")

    async def _compose(self, record: RegionRecord) -> RegionRecord:
        if not record.resource_version:
            self._nothing_made.add(record.key)
        async with self.lock(record.blade):
            record, resumed = await self._intend(record)
            if not self._fabric.knows_owners:
                return await self._make(record, resumed)
        # Found again by its owner, whatever else is composed at the same time.
        return await self._make(record, resumed)

    async def _intend(self, record: RegionRecord) -> tuple[RegionRecord, bool]:
        """The record in the ledger, and whether an earlier attempt may have made its region."""
        self._check_leading()
        self._check_room(record)
        if not record.resource_version:
            record = await self._ledger.add(await self._prepared(record))
            self._hook(Step.INTENDED)
            return record, False
        if self._fabric.knows_owners:
            return record, True
        prepared = await self._prepared(record)
        new = prepared.taken - record.taken
        self._check_settled(record.blade, new)
        if new - self._ledger.memory_ids(record.blade).keys():
            return record, True
        # None of those that are there now is of an earlier attempt.
        return await self._ledger.put(prepared), False

    async def _make(self, record: RegionRecord, resumed: bool) -> RegionRecord:
        # By its owner a region is found whatever its name was before.
        taken: frozenset[MemoryId] = frozenset()
        if not self._fabric.knows_owners:
            taken = record.taken | self._ledger.memory_ids(record.blade).keys()
        request = ComposeRequest(
            blade=record.blade,
            size_mib=record.size_mib,
            qos=record.qos,
            hosts=record.hosts,
            owner=record.key.owner(self._settings.cluster),
            resumed=resumed,
            taken=taken,
        )
        nothing_made = record.key in self._nothing_made
        self._nothing_made.discard(record.key)
        try:
            with self.timer.measured():
                region = await self._fabric.compose(request)
        except (FabricConflict, FabricRejected):
            if nothing_made:
                self._nothing_made.add(record.key)
            raise
        self._check_not_anothers(record, region)
        self._hook(Step.COMPOSED)
        await self._note_reuse(record, region)
        record = await self._ledger.put(
            record.moved(
                RecordState.COMPOSED,
                self._wall_clock(),
                memory_id=region.memory_id,
                allocation_id=region.allocation_id,
                size_mib=region.size_mib,
                ready_hosts=_ready(region, record.hosts),
                taken=frozenset(),
            )
        )
        self.composed += 1
        self._hook(Step.RECORDED)
        return record

    async def _prepared(self, record: RegionRecord) -> RegionRecord:
        """The record, knowing which regions are there before the one that is to be composed."""
        record = replace(record, since=self._wall_clock())
        if self._fabric.knows_owners:
            return record
        with self.timer.measured():
            taken = await self._fabric.list_memory_ids(record.blade)
        return replace(record, taken=taken)

    async def attach(
        self, record: RegionRecord, hosts: Iterable[HostId]
    ) -> tuple[RegionRecord, dict[HostId, HymcacheError]]:
        """Has these hosts make their devices; which failed, and why. The ledger is not written."""
        self._check_leading()
        region = _region_of(record)
        failures: dict[HostId, HymcacheError] = {}
        ready = set(record.ready_hosts)

        async def attach_one(host: HostId) -> None:
            try:
                await self._fabric.attach(region, host)
            except (Unavailable, FabricConflict, FabricRejected) as error:
                failures[host] = error
            else:
                ready.add(host)

        missing = [host for host in hosts if host not in ready]
        if missing:
            with self.timer.measured():
                await asyncio.gather(*(attach_one(host) for host in missing))
        return replace(record, ready_hosts=tuple(sorted(ready))), failures

    async def withdraw(self, record: RegionRecord, hosts: Collection[HostId]) -> RegionRecord:
        """Takes a region away from hosts where no pod needs it, so that others can have it.

        Raises FabricConflict while somebody has the device open, Unavailable, FabricRejected.
        """
        self._check_leading()
        # Whoever takes over in between knows that they may have it, but not that they do.
        ready = tuple(host for host in record.ready_hosts if host not in hosts)
        record = await self._ledger.put(replace(record, ready_hosts=ready))
        with self.timer.measured():
            for host in hosts:
                await self._fabric.detach(_region_of(record), host)
        left = tuple(host for host in record.hosts if host not in hosts)
        return await self._ledger.put(replace(record, hosts=left))

    # --- giving back -------------------------------------------------------------------------

    async def free(self, record: RegionRecord) -> RegionRecord:
        """Gives a region back, whatever of it there is; the record is FREED then.

        Raises FabricConflict while somebody holds a device, NotYet while an attempt to compose may
        still be under way, Unavailable, FabricRejected.
        """
        if record.live:
            record = await self._ledger.put(record.moved(RecordState.FREEING, self._wall_clock()))
            self._hook(Step.FREEING)
        detached_before = record.state is RecordState.DETACHED
        uncertain = record.ref is None and record.key not in self._nothing_made
        if uncertain and record.state is RecordState.FREEING:
            record = await self._find_unrecorded(record)
        if record.ref is not None and record.state is RecordState.FREEING:
            await self._detach(record)
            record = await self._ledger.put(replace(record, state=RecordState.DETACHED))
            self._hook(Step.DETACHED)
        async with self.lock(record.blade):
            # Its name may have come back meanwhile: then it is known to be free.
            record = self._ledger.get(record.key) or record
            if record.state is RecordState.FREED:
                return record
            if record.ref is not None:
                self._check_leading()
                with self.timer.measured():
                    if not (detached_before and await self._is_anothers(record)):
                        await self._fabric.free(
                            record.ref,
                            record.hosts if record.lost else (),
                            fence=self._is_to_fence(record),
                        )
                self._hook(Step.FREED)
            record = await self._freed(record)
        self._hook(Step.FREED_RECORDED)
        return record

    async def _freed(self, record: RegionRecord) -> RegionRecord:
        record = await self._ledger.put(record.moved(RecordState.FREED, self._wall_clock()))
        self._nothing_made.discard(record.key)
        self.away.pop(record.key, None)
        self.freed += 1
        return record

    def _is_to_fence(self, record: RegionRecord) -> bool:
        after_s = self._settings.fence_after_s
        return after_s is not None and self._wall_clock() - record.since > after_s

    async def _is_anothers(self, record: RegionRecord) -> bool:
        """Whether the region was freed by an attempt before, and its name is a stranger's now.

        Told by what ours is not: attached anywhere, or of another size.
        """
        if self._fabric.knows_owners or record.ref is None:
            return False
        region = await self._fabric.get_region(record.ref)
        return region is not None and bool(region.attachments or region.size_mib != record.size_mib)

    async def _note_reuse(self, record: RegionRecord, region: Region) -> None:
        """A name comes back when its region is free: that of an attempt to free is, then."""
        for other in self._ledger.of_blade(record.blade):
            detached = other.state is RecordState.DETACHED
            if detached and other.memory_id == region.memory_id and other.key != record.key:
                await self._freed(other)

    async def _detach(self, record: RegionRecord) -> None:
        """Takes the devices away first: that may take long, and others may compose meanwhile."""
        self._check_leading()
        region = _region_of(record)
        fence = self._is_to_fence(record)
        with self.timer.measured():
            results = await asyncio.gather(
                *(self._fabric.detach(region, host, fence=fence) for host in record.hosts),
                return_exceptions=True,
            )
        self.away[record.key] = {
            host
            for host, result in zip(record.hosts, results, strict=True)
            if isinstance(result, Unavailable)
        }
        for failure in results:
            gone = isinstance(failure, FabricRejected) and failure.status == _NOT_FOUND
            if isinstance(failure, BaseException) and not gone:
                raise failure

    async def _find_unrecorded(self, record: RegionRecord) -> RegionRecord:
        """The region of an attempt to compose that was cut short, if it made one."""
        async with self.lock(record.blade):
            with self.timer.measured():
                if self._fabric.knows_owners:
                    # What has another owner, or none, is a stranger's.
                    owner = record.key.owner(self._settings.cluster)
                    regions = await self._fabric.list_regions(record.blade)
                    found = [r for r in regions if r.owner == owner]
                else:
                    known = self._ledger.memory_ids(record.blade).keys()
                    skip = record.taken | (known - self._ledger.detached_ids(record.blade))
                    regions = await self._fabric.list_regions(record.blade, skip=skip)
                    found = [r for r in regions if not r.attachments and self._may_be(record, r)]
                    self._check_settled(record.blade, {region.memory_id for region in found})
            if not found:
                # One that came after its record has gone would be nobody's, without an owner.
                age_s = self._wall_clock() - record.since
                if not self._fabric.knows_owners and age_s < self._settings.late_compose_s:
                    raise NotYet("an attempt to compose it may still be under way")
                return record
            region = found[0]
            _log.info("claim %s: found region %s of an attempt", record.key, region.memory_id)
            return await self._ledger.put(
                replace(
                    record,
                    memory_id=region.memory_id,
                    # Without a name of its own it was never attached, nor named to a host.
                    allocation_id=region.allocation_id or AllocationId(record.key.share_id),
                    size_mib=region.size_mib,
                    hosts=region.ready_hosts,
                )
            )

    # --- checks ------------------------------------------------------------------------------

    def _check_leading(self) -> None:
        if not self._leading():
            raise Unavailable("this controller does not lead any more")

    def _check_room(self, record: RegionRecord) -> None:
        """The ledger's own count, whatever the scheduler and the fabric manager believe."""
        state = self._book.state(record.blade)
        if state is None or not state.blade.online:
            raise Unavailable(f"blade {record.blade} is offline; its fabric manager resyncs it")
        if self._book.has_lost(record.blade):
            raise NotYet(f"blade {record.blade} lost regions that are being cleaned up")
        taken_mib = self._book.committed_mib(state, but=record)
        if taken_mib + record.size_mib <= state.blade.total_mib:
            return
        raise FabricConflict(
            f"blade {record.blade} has {state.blade.total_mib - taken_mib} MiB free "
            f"of {state.blade.total_mib}; {record.size_mib} are asked for"
        )

    def _check_settled(self, blade: BladeKey, found: Set[MemoryId]) -> None:
        """Whose a region is that has the name of one that is being freed, shows when it is free."""
        for memory_id in found & self._ledger.detached_ids(blade):
            raise NotYet(f"region {memory_id}, or one before it, is being freed")

    def _check_leaking(self, blade: BladeKey, error: FabricConflict) -> None:
        """Where regions of nobody are in the way, it is not the claim's fault."""
        state = self._book.state(blade)
        leaking_mib = self._book.leaking_mib(state) if state else 0
        if leaking_mib:
            text = f"{leaking_mib} MiB of claims that are gone are being freed"
            raise NotYet(f"{error}; {text}") from error

    def _check_not_anothers(self, record: RegionRecord, region: Region) -> None:
        """The same bytes must never have two owners, whatever the fabric manager says."""
        for other in self._ledger.of_blade(record.blade):
            same = other.memory_id == region.memory_id and other.key != record.key
            gone = other.state in (RecordState.DETACHED, RecordState.FREED)
            if not same or gone:
                continue
            raise Unavailable(
                f"fabric manager: region {region.memory_id} of blade {record.blade}, composed for "
                f"{record.claim_namespace}/{record.claim_name}, belongs to "
                f"{other.claim_namespace}/{other.claim_name}; the blade is looked at anew"
            )

    def _may_be(self, record: RegionRecord, region: Region) -> bool:
        state = self._book.state(record.blade)
        block_mib = state.blade.block_mib if state else 0
        beyond = max(1, record.qos * block_mib)
        return record.size_mib <= region.size_mib < record.size_mib + beyond


def _region_of(record: RegionRecord) -> Region:
    ref = record.ref
    if ref is None:
        raise AssertionError(f"{record.key}: no region")
    return Region(ref.blade, ref.memory_id, ref.allocation_id, record.size_mib)


def _ready(region: Region, hosts: tuple[HostId, ...]) -> tuple[HostId, ...]:
    return tuple(host for host in region.ready_hosts if host in hosts)
