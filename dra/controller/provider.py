"""Gives one device of a claim what it asks for: a region, attached where its pods are."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Final

from hymcache.dra.claim import AllocatedDevice, BadRequest, Claim, Wish
from hymcache.dra.controller.blades import BladeBook, BladeState
from hymcache.dra.controller.claim_writer import ClaimWriter, DeviceStatus
from hymcache.dra.controller.composer import Composer, NotYet
from hymcache.dra.controller.consumers import Consumers
from hymcache.dra.controller.ledger import Ledger
from hymcache.dra.controller.placement import choose_hosts
from hymcache.dra.controller.region_record import RecordState, RegionRecord
from hymcache.dra.controller.settings import ControllerSettings
from hymcache.dra.controller.steps import Step, StepHook
from hymcache.dra.fabric import FabricConflict, FabricRejected, HostId
from hymcache.errors import HymcacheError, Unavailable

_log = logging.getLogger(__name__)

# When there is more to do and nothing in the way.
_SOON_S: Final = 0.01


class Provider:
    """Brings a device from "allocated" to "attached", as far as that goes now."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        book: BladeBook,
        composer: Composer,
        writer: ClaimWriter,
        consumers: Consumers,
        settings: ControllerSettings,
        hook: StepHook,
        shrink: Callable[[], Awaitable[None]],
        look_again: Callable[[], None],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._ledger = ledger
        self._book = book
        self._composer = composer
        self._writer = writer
        self._consumers = consumers
        self._settings = settings
        self._hook = hook
        self._shrink = shrink
        self._look_again = look_again
        self._wall_clock = wall_clock
        # When a claim was first seen without knowing where its pods will be.
        self._waiting_since: dict[str, float] = {}
        # Claims that wait for others' regions to be freed.
        self.waiting_for_room: set[str] = set()

    def forget(self, claim_uid: str) -> None:
        """The claim needs nothing any more."""
        self._waiting_since.pop(claim_uid, None)

    async def provide(self, claim: Claim, device: AllocatedDevice) -> DeviceStatus:
        """One step after the other; what is in the way becomes the device's status."""
        record = self._ledger.get(device.key)
        try:
            wish = claim.wish(device.request)
            if record is None:
                self._check_away(claim)
                record = self._new_record(claim, device, wish)
                if record is None:
                    return self._waiting(claim, device)
            if record.state is RecordState.INTENDED:
                choices = self._qos_choices(record, wish)
                record = await self._composer.compose(record, choices)
                await self._note(claim)
            return await self._attached(claim, device, wish, record)
        except NotYet as error:
            self.waiting_for_room.add(claim.uid)
            return self._status(device, "WaitingForFree", str(error), requeue_s=0.0)
        except BadRequest as error:
            # It is no better on another blade: the pod waits until somebody mends the claim.
            await self._writer.tell(claim, "BadRequest", str(error))
            return self._status(device, "BadRequest", str(error))
        except (FabricConflict, FabricRejected) as error:
            # The blade is fuller than was published, or not what was published, or gone.
            self._look_again()
            await self._writer.tell(claim, "ComposeFailed", str(error))
            failed = device.has_conditions
            if failed:
                # First the slice without it, then the failure: the scheduler forgets at once
                # where it failed.
                if record is not None:
                    quarantine_s = self._settings.quarantine_s
                    self._book.refuse(record.blade, record.size_mib, quarantine_s)
                await self._shrink()
            return self._status(device, "ComposeFailed", str(error), failed=failed, requeue_s=0.0)
        except Unavailable as error:
            await self._writer.tell(claim, "FabricUnavailable", str(error))
            return self._status(device, "FabricUnavailable", str(error), requeue_s=0.0)

    # --- a new region ------------------------------------------------------------------------

    def _check_away(self, claim: Claim) -> None:
        """An agent that is away would strand one region of the claim after the other."""
        consumers, _ = self._consumers.hosts_of(claim.consumers)
        for record in self._ledger.of_claim(claim.uid):
            stranded = sorted(self._composer.away.get(record.key, set()) & set(consumers))
            if stranded:
                raise NotYet(
                    f"the claim's last region cannot be freed on {', '.join(stranded)}: the "
                    "host's agent, or the fabric manager, does not answer"
                )

    def _new_record(self, claim: Claim, device: AllocatedDevice, wish: Wish) -> RegionRecord | None:
        """What is going to be composed; None while it is not known where the pods will be."""
        state = self._book.of_pool(device.pool)
        if state is None and self._book.complete:
            # Allocated by a slice that was left of it.
            raise FabricRejected(f"pool {device.pool}: the fabric manager has no such blade", 404)
        if state is None:
            self._look_again()
            raise Unavailable(f"pool {device.pool}: the fabric manager does not tell its blades")
        consumers, all_known = self._consumers.hosts_of(claim.consumers)
        limited = wish.share_count is not None and wish.share_count < len(state.blade.hosts)
        if limited and not (all_known and consumers) and self._may_wait(claim):
            return None
        size_mib = max(device.counted_mib or 0, self._size_mib(device, wish))
        size_mib, qos = self._whole_regions(state, size_mib, wish)
        usable = self._book.hosts(state)
        hosts = choose_hosts(usable, consumers, wish.share_count)
        if not hosts:
            raise Unavailable(f"blade {state.blade.key}: no host with a working link to it")
        return RegionRecord.intended(
            claim,
            device,
            state.blade.key,
            size_mib=size_mib,
            qos=qos,
            share_count=wish.share_count,
            hosts=hosts,
        )

    def _size_mib(self, device: AllocatedDevice, wish: Wish) -> int:
        if wish.size_mib is not None:
            return wish.size_mib
        if device.counted_mib is not None:
            return device.counted_mib
        return self._settings.default_request_mib

    def _whole_regions(self, state: BladeState, size_mib: int, wish: Wish) -> tuple[int, int]:
        """The next size that a region can have, and its QoS."""
        block_mib = max(1, state.blade.block_mib)
        asked = wish.qos or self._settings.default_qos
        unit_mib = block_mib * (asked or 1)
        size_mib = -(-size_mib // unit_mib) * unit_mib
        return size_mib, asked or fitting_qos(state, size_mib)[0]

    def _qos_choices(self, record: RegionRecord, wish: Wish) -> tuple[int, ...]:
        """What else to try where nobody asked for a certain QoS: fewer channels."""
        state = self._book.state(record.blade)
        if state is None or wish.qos or self._settings.default_qos:
            return ()
        return tuple(q for q in fitting_qos(state, record.size_mib) if q < record.qos)

    def _may_wait(self, claim: Claim) -> bool:
        now = self._wall_clock()
        since = self._waiting_since.setdefault(claim.uid, now)
        return now - since < self._settings.consumer_wait_s

    def _waiting(self, claim: Claim, device: AllocatedDevice) -> DeviceStatus:
        since = self._waiting_since[claim.uid]
        left_s = max(0.1, since + self._settings.consumer_wait_s - self._wall_clock())
        message = "waits until it is known on which nodes the claim's pods will be"
        return self._status(device, "WaitingForConsumer", message, requeue_s=left_s)

    # --- hosts -------------------------------------------------------------------------------

    async def _attached(
        self, claim: Claim, device: AllocatedDevice, wish: Wish, record: RegionRecord
    ) -> DeviceStatus:
        consumers, all_known = self._consumers.hosts_of(claim.consumers)
        record, withheld = await self._with_hosts(claim, record, consumers, all_known)
        needed = {host for host in consumers if host in record.hosts}
        if not needed or not all_known:
            needed |= set(record.hosts)
        # Hosts that pods wait for come first; an agent that is away must not hold them up.
        missing = needed - set(record.ready_hosts) or set(record.hosts) - set(record.ready_hosts)
        record, failures = await self._attach(record, sorted(missing))
        missing = needed - set(record.ready_hosts)
        attached = not missing or (wish.any_host_will_do and bool(record.ready_hosts))
        failed = () if attached else await self._given_up(device, record, failures, missing)
        reason, message = _explain(record, attached, failures, failed)
        if failures:
            await self._writer.tell(claim, "AttachFailed", message)
        unfinished = set(record.hosts) - set(record.ready_hosts)
        requeue_s = None if not unfinished else (0.0 if failures else _SOON_S)
        if withheld:
            requeue_s = 0.0
        return DeviceStatus(device, record, attached, bool(failed), reason, message, requeue_s)

    async def _with_hosts(
        self,
        claim: Claim,
        record: RegionRecord,
        consumers: tuple[HostId, ...],
        all_known: bool,
    ) -> tuple[RegionRecord, bool]:
        """The record with the hosts that the claim's pods need, as far as its share goes.

        And whether a host that needs it waits for one that does not to let go of it.
        """
        state = self._book.state(record.blade)
        usable = record.hosts
        if state is not None:
            quarantined = state.quarantine.keys() - set(consumers)
            usable = tuple(host for host in state.blade.hosts if host not in quarantined)
        hosts = choose_hosts(usable, consumers, record.share_count, record.hosts)
        beyond = [host for host in consumers if host not in hosts]
        movable = [host for host in beyond if host in usable]
        idle = [host for host in record.hosts if host not in consumers]
        withheld = False
        if movable and idle and all_known:
            # A pod has moved: its share moves with it.
            try:
                record = await self._composer.withdraw(record, idle[: len(movable)])
            except (FabricConflict, FabricRejected, Unavailable) as error:
                _log.warning("claim %s: share not moved yet: %s", record.key, error)
                record, withheld = self._ledger.get(record.key) or record, True
            hosts = choose_hosts(usable, consumers, record.share_count, record.hosts)
            beyond = [host for host in consumers if host not in hosts]
        if hosts != record.hosts:
            # Written before any host is asked: the ledger names every host that may have it.
            record = await self._ledger.put(replace(record, hosts=hosts))
        if beyond:
            await self._tell_beyond(claim, record, beyond)
        return record, withheld

    async def _attach(
        self, record: RegionRecord, hosts: Iterable[HostId]
    ) -> tuple[RegionRecord, dict[HostId, HymcacheError]]:
        attached, failures = await self._composer.attach(record, hosts)
        if attached.ready_hosts != record.ready_hosts:
            self._hook(Step.ATTACHED)
        welcomed = [self._book.welcome(record.blade, host) for host in attached.ready_hosts]
        if any(welcomed):
            self._look_again()
        return attached, failures

    async def _given_up(
        self,
        device: AllocatedDevice,
        record: RegionRecord,
        failures: dict[HostId, HymcacheError],
        missing: Iterable[HostId],
    ) -> tuple[HostId, ...]:
        """Hosts that are not waited for any longer: pods are sent elsewhere.

        Not once pods use the region: they keep it.
        """
        late = self._wall_clock() - record.since > self._settings.attach_deadline_s
        gone = [
            host
            for host in missing
            if host in failures and (late or not isinstance(failures[host], Unavailable))
        ]
        if not gone:
            return ()
        for host in gone:
            self._book.quarantine(record.blade, host, self._settings.quarantine_s)
        # First the slice without the host, then the failure: the scheduler forgets at once where
        # it failed.
        await self._shrink()
        if record.state is RecordState.PUBLISHED or not device.has_conditions:
            return ()
        return tuple(sorted(gone))

    async def _tell_beyond(self, claim: Claim, record: RegionRecord, beyond: list[HostId]) -> None:
        await self._writer.tell(
            claim,
            "ShareCountReached",
            f"the region is shared by {record.share_count} hosts ({', '.join(record.hosts)}); pods "
            f"on {', '.join(beyond)} do not get it: raise shareCount, or keep them on these hosts",
        )

    async def _note(self, claim: Claim) -> None:
        await self._writer.note_teardown(claim, self._ledger.of_claim(claim.uid))
        self._hook(Step.NOTED)

    def _status(
        self,
        device: AllocatedDevice,
        reason: str,
        message: str,
        *,
        failed: bool = False,
        requeue_s: float | None = None,
    ) -> DeviceStatus:
        record = self._ledger.get(device.key)
        return DeviceStatus(device, record, False, failed, reason, message, requeue_s)


def fitting_qos(state: BladeState, size_mib: int) -> tuple[int, ...]:
    """QoS that a region of this size can have without taking more, the most channels first."""
    block_mib = max(1, state.blade.block_mib)
    channels = max(1, state.blade.channels)
    return tuple(q for q in (8, 4, 2, 1) if q <= channels and size_mib % (q * block_mib) == 0)


def _explain(
    record: RegionRecord,
    attached: bool,
    failures: dict[HostId, HymcacheError],
    failed: tuple[HostId, ...],
) -> tuple[str, str]:
    parts = [f"on {', '.join(record.ready_hosts)}"] if record.ready_hosts else []
    parts += [f"{host}: {failures[host]}" for host in sorted(failures)]
    message = "; ".join(parts) or "no host has it yet"
    if attached:
        return "Attached", message
    return ("AttachFailed" if failed else "Attaching"), message
