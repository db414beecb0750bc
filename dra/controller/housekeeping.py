"""What nothing tells of: blades are looked at now and then, for power cycles and orphans.

offline ─▶ resync ─▶ regions gone ─▶ lost: freed on the hosts, composed anew if still wanted
regions that are nobody's ─▶ after a while: into the ledger, and freed
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from hymcache.dra.claim import RegionKey
from hymcache.dra.cluster import ClusterError
from hymcache.dra.controller.blades import BladeBook, BladeState, pool_name
from hymcache.dra.controller.composer import Composer
from hymcache.dra.controller.ledger import Ledger, LedgerConflict
from hymcache.dra.controller.region_record import RecordState, RegionRecord
from hymcache.dra.controller.settings import PERIOD_S_MIN, ControllerSettings
from hymcache.dra.fabric import (
    AllocationId,
    BladeKey,
    FabricConflict,
    FabricManager,
    FabricRejected,
    MemoryId,
    Region,
)
from hymcache.dra.retry import Backoff
from hymcache.errors import Corrupt, Unavailable

_log = logging.getLogger(__name__)

# Looks that are asked for come at most so often, and ever less while they keep being asked for.
_PAUSE_S: Final = Backoff(first_s=2.0, factor=2.0, longest_s=PERIOD_S_MIN, jitter=0.0)
# A quarantine has ended for sure when a look that is for its end comes.
_MARGIN_S: Final = 0.2


@dataclass
class LookCounters:
    """What looks found, since the start."""

    looks: int = 0
    failures: int = 0
    resyncs: int = 0
    orphans: int = 0


class Housekeeping:
    """Looks at all blades every `fabric_period_s`, and when asked.

    `lost` is told of each region that its blade does not have any more, `changed` of anything
    that slices may show.
    """

    def __init__(
        self,
        *,
        fabric: FabricManager,
        ledger: Ledger,
        book: BladeBook,
        composer: Composer,
        settings: ControllerSettings,
        lost: Callable[[RegionKey], None],
        orphaned: Callable[[RegionRecord], None],
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fabric = fabric
        self._ledger = ledger
        self._book = book
        self._composer = composer
        self._settings = settings
        self._lost = lost
        self._orphaned = orphaned
        self._changed = changed
        self._clock = clock
        self._source = random.Random()  # noqa: S311 - the pauses have no jitter
        self._wanted = asyncio.Event()
        self._unowned_since: dict[tuple[BladeKey, MemoryId], float] = {}
        self.counters = LookCounters()
        self.reachable = False

    def look_again(self) -> None:
        """Looks soon."""
        self._wanted.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        asked = 1
        while True:
            self._wanted.clear()
            await self.look()
            await asyncio.sleep(self._until_change(_PAUSE_S.delay_s(asked, self._source)))
            try:
                async with asyncio.timeout(self._until_change(self._settings.fabric_period_s)):
                    await self._wanted.wait()
                asked += 1
            except TimeoutError:
                asked = 1

    def _until_change(self, delay_s: float) -> float:
        """That long, or until a quarantine is over."""
        ends_s = self._book.quarantine_ends()
        return delay_s if ends_s is None else min(delay_s, ends_s + _MARGIN_S)

    async def look(self) -> None:
        """Looks at all blades once."""
        self.counters.looks += 1
        try:
            self._book.update(await self._fabric.list_blades())
            self.reachable = True
        except (Unavailable, FabricConflict, FabricRejected) as error:
            self.counters.failures += 1
            self.reachable = False
            _log.warning("fabric manager: %s", error)
        else:
            for state in self._book.states:
                await self._look_at(state)
        self._book.expire_quarantines()
        self._changed()

    async def _look_at(self, state: BladeState) -> None:
        key = state.blade.key
        try:
            # Nothing is composed or freed meanwhile: what is in no record, is no one's.
            async with self._composer.lock(key):
                if not state.blade.online:
                    await self._resync(state)
                if state.blade.online:
                    await self._compare(state)
        except (
            Unavailable,
            FabricConflict,
            FabricRejected,
            ClusterError,
            LedgerConflict,
            Corrupt,
        ) as error:
            self.counters.failures += 1
            _log.warning("blade %s: %s", key, error)

    async def _resync(self, state: BladeState) -> None:
        key = state.blade.key
        self.counters.resyncs += 1
        _log.warning("blade %s is offline: asking for a resync", key)
        await self._fabric.resync(key)
        blade = await self._fabric.get_blade(key)
        if blade is not None:
            self._book.note(blade)
        # What it has lost by its power cycle is told by the first look.
        state.missing = frozenset(self._ledger.memory_ids(key))

    async def _compare(self, state: BladeState) -> None:
        key = state.blade.key
        present = await self._fabric.list_memory_ids(key)
        known = self._ledger.memory_ids(key)
        missing = frozenset(
            memory_id
            for memory_id, record in known.items()
            if memory_id not in present and record.state is not RecordState.DETACHED
        )
        # Gone at two looks in a row, or at the first after a resync.
        for memory_id in missing & state.missing:
            record = known[memory_id]
            if record.live and not record.lost:
                _log.error("blade %s lost region %s of %s", key, memory_id, record.key)
                self._lost(record.key)
        state.missing = missing
        unknown = present - known.keys()
        regions = await self._fabric.list_regions(key, skip=known.keys()) if unknown else ()
        await self._look_at_unknown(state, regions)

    async def _look_at_unknown(self, state: BladeState, regions: tuple[Region, ...]) -> None:
        key = state.blade.key
        # The region of an attempt whose answer was lost belongs to its record; one beside the
        # record's own, of an attempt that was answered too late, does not.
        own = {
            record.key.owner(self._settings.cluster)
            for record in self._ledger.of_blade(key)
            if record.ref is None
        }
        # Composed and recorded since the look began.
        known = self._ledger.memory_ids(key).keys()
        foreign = [r for r in regions if r.owner not in own and r.memory_id not in known]
        state.foreign_mib = sum(region.size_mib for region in foreign)
        state.foreign_regions = len(foreign)
        now = self._clock()
        seen = {(key, region.memory_id) for region in foreign}
        for name in [n for n in self._unowned_since if n[0] == key and n not in seen]:
            del self._unowned_since[name]
        for region in foreign:
            since = self._unowned_since.setdefault((key, region.memory_id), now)
            if now - since >= self._settings.orphan_grace_s and self._is_ours(region):
                await self._collect(state, region)

    def _is_ours(self, region: Region) -> bool:
        if region.owner is None:
            return self._settings.exclusive
        return region.owner.endswith(f"@{self._settings.cluster}")

    async def _collect(self, state: BladeState, region: Region) -> None:
        """Takes an orphan into the ledger as one that is being freed: that outlives a crash."""
        uid, _, rest = (region.owner or "").partition("/")
        key = RegionKey(uid, rest.rpartition("@")[0] or "none")
        if not uid or self._ledger.get(key) is not None:
            # Of nobody, or beside the region of a claim, which keeps its own.
            where = pool_name(region.blade).replace("/", "-")
            key = RegionKey(f"orphan-{where}-{region.memory_id}", region.allocation_id or "none")
        record = RegionRecord(
            key=key,
            claim_namespace="",
            claim_name="",
            request="",
            pool="",
            device="",
            blade=region.blade,
            request_mib=0,
            size_mib=region.size_mib,
            qos=1,
            hosts=tuple(a.host_id for a in region.attachments),
            state=RecordState.FREEING,
            memory_id=region.memory_id,
            allocation_id=region.allocation_id or AllocationId(region.memory_id),
            since=time.time(),
        )
        if self._ledger.get(record.key) is not None:
            return
        _log.warning("blade %s: region %s is nobody's: freeing it", region.blade, region.memory_id)
        try:
            record = await self._ledger.add(record)
        except LedgerConflict:
            # It was written before, and the answer lost: the ledger has read it now.
            known = self._ledger.get(key)
            if known is None:
                raise
            record = known
        self.counters.orphans += 1
        state.foreign_mib -= region.size_mib
        self._orphaned(record)
