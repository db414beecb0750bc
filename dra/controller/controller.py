"""The controller: its parts, put together, and its life as a leader.

claims, pods ─▶ informers ─▶ queue ─▶ workers ─▶ Reconciler ─▶ Provider, Composer ─▶ fabric
                                          ▲                          │
fabric ─▶ Housekeeping ─▶ BladeBook ──────┴── ledger ◀───────────────┘
                             └─▶ SlicePublisher ─▶ ResourceSlices
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from typing import Final

from hymcache.dra import cluster
from hymcache.dra.claim import Claim, RegionKey, trim_claim
from hymcache.dra.cluster import ClusterClient, ClusterError, JsonObject, ObjectConflict
from hymcache.dra.controller.blades import BladeBook
from hymcache.dra.controller.claim_writer import ClaimWriter, read_regions
from hymcache.dra.controller.composer import Composer
from hymcache.dra.controller.consumers import Consumers, trim_pod
from hymcache.dra.controller.housekeeping import Housekeeping
from hymcache.dra.controller.informer import Informer
from hymcache.dra.controller.leadership import Leadership
from hymcache.dra.controller.ledger import Ledger, LedgerConflict
from hymcache.dra.controller.metrics import BladeNumbers, ControllerSnapshot
from hymcache.dra.controller.provider import Provider
from hymcache.dra.controller.reconciler import AGAIN, Reconciler
from hymcache.dra.controller.region_record import RecordState, RegionRecord
from hymcache.dra.controller.settings import ControllerSettings
from hymcache.dra.controller.slice_publisher import SlicePublisher, trim_slice
from hymcache.dra.controller.slices import Taint
from hymcache.dra.controller.steps import StepHook, no_hook
from hymcache.dra.controller.work_queue import WorkQueue
from hymcache.dra.fabric import BladeKey, FabricManager
from hymcache.errors import Corrupt, HymcacheError, Unavailable

_log = logging.getLogger(__name__)

_SHRINK_TIMEOUT_S: Final = 2.0


class Controller:
    """One candidate. `run` leads once and returns when it leads no more."""

    def __init__(
        self,
        client: ClusterClient,
        fabric: FabricManager,
        settings: ControllerSettings,
        *,
        hook: StepHook = no_hook,
    ) -> None:
        self._client = client
        self._fabric = fabric
        self._settings = settings
        self.leadership = Leadership(
            client,
            namespace=settings.namespace,
            name=settings.driver,
            identity=settings.identity,
            times=settings.lease,
            clock=time.monotonic,
        )
        self._queue: WorkQueue[str] = WorkQueue()
        self._source = random.Random()  # noqa: S311 - spreads retries
        self._uids: dict[str, tuple[str, str]] = {}
        self._consumers = Consumers()
        self._errors = 0
        self._ledger = Ledger(client, settings.namespace, settings.driver)
        self._book = BladeBook(self._ledger, time.monotonic)
        self._claims = Informer(
            client, cluster.RESOURCE_CLAIM, lambda c: trim_claim(c, settings.driver), self._on_claim
        )
        self._pods = Informer(client, cluster.POD, trim_pod, self._on_pod)
        self._writer = ClaimWriter(client, settings, remember=self._claims.remember)
        self._composer = Composer(
            fabric, self._ledger, self._book, settings, hook=hook, leading=self._leads
        )
        self._slices = SlicePublisher(client, self._book, settings, self._taint_of)
        self._slice_informer = Informer(
            client,
            cluster.RESOURCE_SLICE,
            lambda s: trim_slice(s, settings.driver),
            self._slices.note,
        )
        self._provider = Provider(
            ledger=self._ledger,
            book=self._book,
            composer=self._composer,
            writer=self._writer,
            consumers=self._consumers,
            settings=settings,
            hook=hook,
            shrink=self._shrink,
            look_again=self._look_again,
        )
        self._reconciler = Reconciler(
            ledger=self._ledger,
            composer=self._composer,
            provider=self._provider,
            writer=self._writer,
            settings=settings,
            hook=hook,
            claim_of=self._claim_of,
            publish_slices=self._shrink,
        )
        self._housekeeping = Housekeeping(
            fabric=fabric,
            ledger=self._ledger,
            book=self._book,
            composer=self._composer,
            settings=settings,
            lost=self._on_lost,
            orphaned=lambda record: self._queue.add(record.key.claim_uid),
            changed=self._on_look,
        )
        self._ledger.listen(self._on_record)

    # --- life --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Waits for leadership, leads, and returns when it has lost it."""
        await self.leadership.acquire()
        tasks = [asyncio.create_task(self.leadership.keep(), name="lease")]
        try:
            tasks += [
                asyncio.create_task(informer.run(), name="informer")
                for informer in (self._claims, self._pods, self._slice_informer)
            ]
            tasks.append(asyncio.create_task(self._lead(), name="lead"))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.leadership.release()

    async def _lead(self) -> None:
        for informer in (self._claims, self._pods, self._slice_informer):
            await informer.synced.wait()
        await self._load()
        await self._housekeeping.look()
        for uid in self._ledger.claim_uids() | self._uids.keys():
            self._queue.add(uid)
        loops = [self._housekeeping.run(), self._slices.run()]
        loops += [self._work() for _ in range(self._settings.workers)]
        async with asyncio.TaskGroup() as group:
            for loop in loops:
                group.create_task(loop)

    async def _load(self) -> None:
        """Reads the ledger, and mends it from what claims say."""
        failures = 0
        while True:
            try:
                await self._ledger.load()
                for uid in list(self._uids):
                    claim = self._claim_of(uid)
                    if claim is not None and not self._writer.is_anothers(claim):
                        await self._restore(claim)
                return
            except (Unavailable, ClusterError, LedgerConflict) as error:
                _log.warning("ledger: %s", error)
                failures += 1
                await asyncio.sleep(self._settings.backoff.delay_s(failures, self._source))

    async def _restore(self, claim: Claim) -> None:
        for record in read_regions(claim):
            if record.key.claim_uid != claim.uid or self._ledger.get(record.key) is not None:
                continue
            ref = record.ref
            if ref is None or ref.memory_id in self._ledger.memory_ids(ref.blade):
                continue
            fresh = await self._client.get(cluster.RESOURCE_CLAIM, claim.name, claim.namespace)
            if record not in read_regions(Claim(fresh, self._settings.driver)):
                continue
            _log.warning("ledger: restored %s from its claim", record.key)
            await self._ledger.add(record)

    async def _work(self) -> None:
        while True:
            uid = await self._queue.take()
            try:
                await self._work_on(uid)
            finally:
                self._queue.done(uid)

    async def _work_on(self, uid: str) -> None:
        try:
            delay_s = await self._reconciler.reconcile(uid)
        except (ObjectConflict, LedgerConflict) as error:
            # Out of date: the watch, or the ledger, has the newer by the next time.
            _log.info("claim %s: %s", uid, error)
            delay_s = AGAIN
        except (ClusterError, Unavailable, Corrupt) as error:
            self._errors += 1
            _log.warning("claim %s: %s", uid, error)
            delay_s = AGAIN
        except (HymcacheError, LookupError, ValueError, TypeError, AssertionError):
            # A fault of ours with one claim must not stop the others.
            self._errors += 1
            _log.exception("claim %s", uid)
            delay_s = AGAIN
        if delay_s is None:
            self._queue.succeeded(uid)
        elif delay_s == AGAIN:
            failures = self._queue.failed(uid)
            self._queue.add_after(uid, self._settings.backoff.delay_s(failures, self._source))
        else:
            self._queue.add_after(uid, delay_s)

    # --- what happens ------------------------------------------------------------------------

    def _on_claim(self, before: JsonObject | None, after: JsonObject | None) -> None:
        item = after or before
        if item is None:
            return
        uid = item["metadata"]["uid"]
        if before is not None and before["metadata"]["uid"] != uid:
            self._forget(before["metadata"]["uid"])
        if after is None:
            self._forget(uid)
            return
        self._uids[uid] = (after["metadata"]["namespace"], after["metadata"]["name"])
        self._reconciler.seen(Claim(after, self._settings.driver), time.monotonic())
        self._queue.add(uid)

    def _forget(self, uid: str) -> None:
        self._uids.pop(uid, None)
        self._queue.add(uid)

    def _on_pod(self, before: JsonObject | None, after: JsonObject | None) -> None:
        if not self._consumers.note(before, after):
            return
        item = after or before
        if item is None:
            return
        for name in item["claims"]:
            claim = self._claims.get(item["metadata"]["namespace"], name)
            if claim is not None:
                self._queue.add(claim["metadata"]["uid"])

    def _on_record(self, record: RegionRecord) -> None:
        self._slices.wake()
        if record.state is RecordState.FREED:
            if record.ref is not None:
                self._book.accept(record.blade)
            waiting, self._provider.waiting_for_room = self._provider.waiting_for_room, set()
            for uid in waiting:
                self._queue.add(uid)

    def _on_lost(self, key: RegionKey) -> None:
        self._reconciler.lost.add(key)
        self._queue.add(key.claim_uid)

    def _on_look(self) -> None:
        self._slices.wake()
        if self._provider.waiting_for_room:
            for uid in self._provider.waiting_for_room:
                self._queue.add(uid)
            self._provider.waiting_for_room = set()

    # --- what the parts ask ------------------------------------------------------------------

    def _leads(self) -> bool:
        return self.leadership.leading

    def _claim_of(self, uid: str) -> Claim | None:
        name = self._uids.get(uid)
        item = self._claims.get(*name) if name else None
        if item is None or item["metadata"]["uid"] != uid:
            return None
        return Claim(item, self._settings.driver)

    def _look_again(self) -> None:
        self._housekeeping.look_again()

    async def _shrink(self) -> None:
        await self._slices.publish(_SHRINK_TIMEOUT_S)

    def _taint_of(self, key: BladeKey) -> Taint | None:
        state = self._book.state(key)
        if self._book.lost_all(key):
            return Taint("lost-regions", evicts=True)
        if self._book.has_lost(key):
            # Nothing is composed there meanwhile.
            return Taint("lost-regions")
        if state is None or not state.blade.online:
            return Taint("offline")
        now = time.time()
        for record in self._ledger.of_blade(key):
            stuck = not record.live and record.key in self._reconciler.stuck
            if stuck and now - record.since > self._settings.stuck_after_s:
                return Taint("stuck")
        return None

    def snapshot(self) -> ControllerSnapshot:
        """What metrics show."""
        counters, looks = self._reconciler.counters, self._housekeeping.counters
        informers = (self._claims, self._pods, self._slice_informer)
        blades = {}
        for state in self._book.states:
            key = state.blade.key
            records = self._ledger.of_blade(key)
            sellable = self._book.sellable_mib(state)
            blades[str(key.appliance_id), str(key.blade_id)] = BladeNumbers(
                total=state.blade.total_mib,
                published=sellable
                if self._slices.features.capacity
                else self._book.free_mib(state),
                allocated=sum(record.size_mib for record in records if record.live),
                leaking=self._book.leaking_mib(state),
                foreign=state.foreign_mib,
                online=state.blade.online,
            )
        return ControllerSnapshot(
            leading=self.leadership.leading,
            fabric_reachable=self._housekeeping.reachable,
            numbers={
                "composed": self._composer.composed,
                "freed": self._composer.freed,
                "attached": counters.attached,
                "attach_seconds": counters.attach_s,
                "attach_own_seconds": counters.attach_own_s,
                "attach_failures": counters.attach_failures,
                "given_up": counters.given_up,
                "lost_regions": counters.lost,
                "orphans": looks.orphans,
                "resyncs": looks.resyncs,
                "fabric_looks": looks.looks,
                "fabric_look_failures": looks.failures,
                "fabric_seconds": self._composer.timer.total_s,
                "lists": sum(informer.lists for informer in informers),
                "watches": sum(informer.watches for informer in informers),
                "slice_writes": self._slices.writes,
                "reconcile_errors": self._errors,
                "queue_length": len(self._queue),
            },
            regions={
                state.value: count
                for state, count in Counter(record.state for record in self._ledger).items()
            },
            free_failures=dict(counters.free_failures),
            blades=blades,
        )
