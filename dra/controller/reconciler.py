"""Makes the world what one claim needs: its regions composed, attached and published, or freed."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final

from hymcache.dra import names
from hymcache.dra.claim import Claim, RegionKey
from hymcache.dra.cluster import Rejected
from hymcache.dra.controller.claim_writer import ClaimWriter, DeviceStatus
from hymcache.dra.controller.composer import Composer, NotYet
from hymcache.dra.controller.ledger import Ledger
from hymcache.dra.controller.provider import Provider
from hymcache.dra.controller.region_record import RecordState, RegionRecord
from hymcache.dra.controller.settings import ControllerSettings
from hymcache.dra.controller.steps import Step, StepHook
from hymcache.dra.fabric import FabricConflict, FabricRejected
from hymcache.errors import HymcacheError, Unavailable

_log = logging.getLogger(__name__)

# How soon to look again where something is in the way; the queue's backoff makes it longer.
AGAIN: Final = 0.0
# How long a lost region is kept for the sake of the blade's taint, which ends the pods on it. Where
# the cluster knows no taints, pods keep a device that is not there any more, whatever is done.
_EVICTION_S: Final = 30.0


@dataclass
class Counters:
    """What happened since the start; metrics show it."""

    attached: int = 0
    attach_s: float = 0.0
    attach_own_s: float = 0.0
    attach_failures: int = 0
    free_failures: dict[str, int] = field(default_factory=dict)
    given_up: int = 0
    lost: int = 0


class Reconciler:
    """Works on one claim at a time; several workers call it for different claims."""

    def __init__(
        self,
        ledger: Ledger,
        composer: Composer,
        provider: Provider,
        writer: ClaimWriter,
        settings: ControllerSettings,
        *,
        hook: StepHook,
        claim_of: Callable[[str], Claim | None],
        publish_slices: Callable[[], Awaitable[None]],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._ledger = ledger
        self._composer = composer
        self._provider = provider
        self._writer = writer
        self._settings = settings
        self._hook = hook
        self._claim_of = claim_of
        self._publish_slices = publish_slices
        self._wall_clock = wall_clock
        # Regions that blades have lost, by their looks; and why frees failed the last time.
        self.lost: set[RegionKey] = set()
        self.stuck: dict[RegionKey, str] = {}
        self.counters = Counters()
        self._seen_at: dict[RegionKey, float] = {}

    def seen(self, claim: Claim, now: float) -> None:
        """Notes when an allocation was first seen, to measure how long it takes to attach."""
        for device in claim.wanted:
            if self._ledger.get(device.key) is None:
                self._seen_at.setdefault(device.key, now)

    async def reconcile(self, uid: str) -> float | None:
        """One pass for the claim of that UID; when to come again: None, 0 (backoff) or seconds."""
        await self._ledger.settle(uid)
        claim = self._claim_of(uid)
        if claim is not None and self._writer.is_anothers(claim):
            # Who owns it, composes and frees; what was ours before is freed all the same.
            claim = None
        wanted = {device.key for device in claim.wanted} if claim else set()
        again = [await self._free_unwanted(claim, uid, wanted)]
        if claim is not None and wanted:
            again.append(await self._provide(claim))
        else:
            self._provider.forget(uid)
            if claim is None and not self._ledger.of_claim(uid):
                self._forget(uid)
            for key in [key for key in self._seen_at if key.claim_uid == uid]:
                del self._seen_at[key]
            if claim is not None and not self._ledger.of_claim(uid):
                await self._release(claim)
        delays = [delay for delay in again if delay is not None]
        return min(delays) if delays else None

    def _forget(self, uid: str) -> None:
        self._writer.forget(uid)
        self.lost = {key for key in self.lost if key.claim_uid != uid}
        for key in [key for key in self.stuck if key.claim_uid == uid]:
            del self.stuck[key]

    # --- having ------------------------------------------------------------------------------

    async def _provide(self, claim: Claim) -> float | None:
        self._composer.timer.reset()
        if await self._writer.take(claim):
            self._hook(Step.CLAIMED)
        statuses = []
        for device in claim.wanted:
            record = self._ledger.get(device.key)
            if record is not None and not record.live:
                # The same share again: its last region is still being freed.
                message = "waits until the claim's last region is freed"
                statuses.append(
                    DeviceStatus(device, None, False, False, "WaitingForFree", message, AGAIN)
                )
            else:
                statuses.append(await self._provider.provide(claim, device))
        try:
            changed = await self._writer.publish(claim, statuses)
        except Rejected as error:
            # Deallocated meanwhile: the watch will say so.
            _log.info("claim %s/%s: status: %s", claim.namespace, claim.name, error)
            return AGAIN
        if changed:
            self._hook(Step.PUBLISHED)
        for status in statuses:
            await self._settle(claim, status)
        delays = [s.requeue_s for s in statuses if s.requeue_s is not None]
        return min(delays) if delays else None

    async def _settle(self, claim: Claim, status: DeviceStatus) -> None:
        """The ledger says what the claim says."""
        record = status.record
        if status.failed:
            self.counters.attach_failures += 1
        if record is None or record.ref is None or not record.live:
            return
        settled = record
        if status.attached and record.state is not RecordState.PUBLISHED:
            settled = record.moved(RecordState.PUBLISHED, self._wall_clock())
        if settled != self._ledger.get(record.key):
            await self._ledger.put(settled)
            await self._writer.note_teardown(claim, self._ledger.of_claim(claim.uid))
            self._hook(Step.SETTLED)
        if settled.state is RecordState.PUBLISHED and record.state is not RecordState.PUBLISHED:
            self._count_attached(claim, settled)

    def _count_attached(self, claim: Claim, record: RegionRecord) -> None:
        seen_at = self._seen_at.pop(record.key, None)
        self.counters.attached += 1
        if seen_at is None:
            return
        whole_s = time.monotonic() - seen_at
        own_s = max(0.0, whole_s - self._composer.timer.spent_s())
        self.counters.attach_s += whole_s
        self.counters.attach_own_s += own_s
        _log.info(
            "claim %s/%s: attached on %s in %.1f ms, %.1f ms of it the driver's own",
            claim.namespace,
            claim.name,
            ", ".join(record.ready_hosts),
            whole_s * 1e3,
            own_s * 1e3,
        )

    # --- giving back -------------------------------------------------------------------------

    async def _free_unwanted(
        self, claim: Claim | None, uid: str, wanted: set[RegionKey]
    ) -> float | None:
        again: float | None = None
        for record in self._ledger.of_claim(uid):
            lost = record.lost or record.key in self.lost
            if record.live and record.key in wanted and not lost:
                continue
            if not await self._free(claim, await self._marked(record) if lost else record):
                again = AGAIN
        return again

    async def _marked(self, record: RegionRecord) -> RegionRecord:
        """The record, as that of a region which its blade has lost."""
        self.lost.discard(record.key)
        if record.lost:
            return record
        self.counters.lost += 1
        marked = replace(record, lost=True)
        # A live one is written with its next state.
        return marked if record.live else await self._ledger.put(marked)

    async def _free(self, claim: Claim | None, record: RegionRecord) -> bool:
        """Frees a region as far as that goes now; whether it is free."""
        if record.lost and claim is not None:
            if record.live:
                await self._tell_lost(claim, record)
                record = await self._ledger.put(
                    record.moved(RecordState.FREEING, self._wall_clock())
                )
                self._hook(Step.FREEING)
                await self._publish_slices()
            if claim.consumers and self._wall_clock() - record.since < _EVICTION_S:
                return False
        try:
            record = await self._composer.free(record)
        except NotYet as error:
            _log.info("claim %s: not freed yet: %s", record.key, error)
            return False
        except (FabricConflict, FabricRejected, Unavailable) as error:
            await self._failed_to_free(claim, record.key, error)
            return False
        self.stuck.pop(record.key, None)
        others = [r for r in self._ledger.of_claim(record.key.claim_uid) if r.key != record.key]
        if claim is not None:
            if not others and not claim.wanted:
                await self._release(claim)
                self._hook(Step.RELEASED)
            else:
                await self._writer.note_teardown(claim, others)
        await self._ledger.remove(record)
        self._hook(Step.FORGOTTEN)
        return True

    async def _failed_to_free(
        self, claim: Claim | None, key: RegionKey, error: HymcacheError
    ) -> None:
        kind = "held" if isinstance(error, FabricConflict) else "fabric"
        failures = self.counters.free_failures
        failures[kind] = failures.get(kind, 0) + 1
        self.stuck[key] = str(error)
        record = self._ledger.get(key)
        if record is not None and self._is_late(record, self._settings.stuck_after_s):
            # The blade is tainted.
            await self._publish_slices()
        _log.warning("claim %s: not freed yet: %s", key, error)
        if claim is not None:
            await self._writer.tell(claim, "FreeFailed", f"memory is not freed yet: {error}")
        give_up_after_s = self._settings.give_up_after_s
        if record is None or give_up_after_s is None:
            return
        if self._is_late(record, give_up_after_s) and not record.abandoned:
            # The claim may go; the capacity stays withheld, and frees are tried on.
            self.counters.given_up += 1
            await self._ledger.put(replace(record, abandoned=True))
            if claim is not None and not claim.wanted:
                await self._release(claim)

    def _is_late(self, record: RegionRecord, after_s: float) -> bool:
        return self._wall_clock() - record.since > after_s

    async def _release(self, claim: Claim) -> None:
        if names.FINALIZER in claim.finalizers or names.ANNOTATION_OWNER in claim.annotations:
            await self._writer.release(claim)

    async def _tell_lost(self, claim: Claim, record: RegionRecord) -> None:
        await self._writer.tell(
            claim,
            "RegionLost",
            f"blade {record.blade} lost region {record.memory_id}, e.g. by a power cycle; it is "
            "composed anew when the claim's pods have ended",
        )
        for device in claim.wanted:
            if device.key == record.key:
                message = f"blade {record.blade} lost the region"
                status = DeviceStatus(device, None, False, False, "RegionLost", message)
                await self._writer.publish(claim, [status])
