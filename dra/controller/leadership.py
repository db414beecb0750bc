"""Leadership by a Lease: one controller acts, others stand by.

kubernetes.aio's own election lets a leader act past its lease while a renewal hangs, and ends when
the API server cannot be reached; this one stops acting `renew_deadline_s` after its last renewal,
before others may take over (`duration_s` after they saw that renewal, by their own clocks).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Final

from hymcache.dra import cluster
from hymcache.dra.cluster import (
    ClusterClient,
    ClusterError,
    JsonObject,
    ObjectConflict,
    ObjectMissing,
)
from hymcache.dra.controller.settings import LeaseTimes
from hymcache.dra.retry import Backoff
from hymcache.errors import Unavailable

_log = logging.getLogger(__name__)

# Between attempts where the API server does not answer, or does not let the lease be watched.
_RETRY_LONGEST_S: Final = 10.0


class Leadership:
    """A candidate for a Lease. `clock` is monotonic."""

    def __init__(
        self,
        client: ClusterClient,
        *,
        namespace: str,
        name: str,
        identity: str,
        times: LeaseTimes,
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._times = times
        self._clock = clock
        self._backoff = Backoff(
            first_s=times.retry_s, factor=2.0, longest_s=_RETRY_LONGEST_S, jitter=0.2
        )
        self._source = random.Random()  # noqa: S311 - spreads candidates
        # What the lease said when it last changed, and when that was seen here.
        self._seen: tuple[str, str] = ("", "")
        self._seen_at = 0.0
        self._seen_duration_s = times.duration_s
        self._version = ""
        self._renewed_at: float | None = None

    @property
    def leading(self) -> bool:
        """Whether this process may act now."""
        return (
            self._renewed_at is not None
            and self._clock() - self._renewed_at < self._times.renew_deadline_s
        )

    async def acquire(self) -> None:
        """Returns once this process leads."""
        failures = 0
        while not await self._try():
            failures = 0 if await self._wait_for_end() else failures + 1
            # Candidates do not come all at once.
            delay_s = self._times.retry_s * 0.2 * self._source.random()
            if failures:
                delay_s += self._backoff.delay_s(failures, self._source)
            await asyncio.sleep(delay_s)
        _log.info("leading as %s", self._identity)

    async def keep(self) -> None:
        """Renews the lease; returns when it could not in time, or somebody else has it."""
        while self.leading:
            await asyncio.sleep(self._times.retry_s)
            if not await self._try() and self._seen[0] not in ("", self._identity):
                _log.error("%s leads now", self._seen[0])
                self._renewed_at = None
        _log.error("the lease could not be renewed in %g s", self._times.renew_deadline_s)

    async def _wait_for_end(self) -> bool:
        """Until the lease is given up or has ended, told by a watch; False where that breaks."""
        if (
            self._seen[0] in ("", self._identity)
            or self._end() <= asyncio.get_running_loop().time()
        ):
            # It is free, or ours from a life before, but could not be had just now.
            return False
        field_selector = f"metadata.name={self._name}"
        try:
            async with asyncio.timeout_at(self._end()) as limit:
                events = self._client.watch(
                    cluster.LEASE, self._version, self._namespace, field_selector=field_selector
                )
                async with aclosing(events):
                    async for event in events:
                        self._version = event.item["metadata"]["resourceVersion"]
                        if event.kind == "BOOKMARK" or event.item["metadata"]["name"] != self._name:
                            continue
                        self._note(event.item)
                        if event.kind == "DELETED" or not self._seen[0]:
                            return True
                        limit.reschedule(self._end())
        except TimeoutError:
            return True
        except (ClusterError, Unavailable) as error:
            _log.warning("lease %s: %s", self._name, error)
            return False
        # The server ends every watch after a while.
        return True

    def _end(self) -> float:
        """When the holder's lease ends by this process's clock, as the event loop's time."""
        left_s = max(0.0, self._seen_at + self._seen_duration_s - self._clock())
        return asyncio.get_running_loop().time() + left_s

    def _note(self, lease: JsonObject) -> None:
        spec = lease.get("spec") or {}
        state = (spec.get("holderIdentity") or "", spec.get("renewTime") or "")
        self._seen_duration_s = float(spec.get("leaseDurationSeconds") or self._times.duration_s)
        self._version = lease["metadata"]["resourceVersion"]
        if state != self._seen:
            self._seen, self._seen_at = state, self._clock()

    async def release(self) -> None:
        """Gives the lease up, so that another need not wait for its end. Failing that, it ends."""
        if not self.leading:
            return
        self._renewed_at = None
        try:
            async with asyncio.timeout(self._times.retry_s):
                lease = await self._client.get(cluster.LEASE, self._name, self._namespace)
                if lease["spec"].get("holderIdentity") == self._identity:
                    lease["spec"] = {**lease["spec"], "holderIdentity": "", "renewTime": _now()}
                    await self._client.replace(cluster.LEASE, lease)
        except (ClusterError, Unavailable, TimeoutError) as error:
            _log.warning("the lease ends by itself: %s", error)

    async def _try(self) -> bool:
        """Takes or renews the lease; False where that is not possible now."""
        # Leadership counts from before the request: it may be answered late.
        asked_at = self._clock()
        try:
            async with asyncio.timeout(self._times.retry_s * 2):
                taken = await self._take()
        except (ClusterError, Unavailable, TimeoutError) as error:
            _log.warning("lease %s: %s", self._name, error or "no answer")
            return False
        if taken:
            self._renewed_at = asked_at
        return taken

    async def _take(self) -> bool:
        try:
            lease = await self._client.get(cluster.LEASE, self._name, self._namespace)
        except ObjectMissing:
            return await self._write(self._lease({}, _now(), 0), new=True)
        self._note(lease)
        spec = lease.get("spec") or {}
        holder = self._seen[0]
        if holder == self._identity:
            acquired = spec.get("acquireTime") or _now()
            transitions = int(spec.get("leaseTransitions") or 0)
        else:
            if holder and self._clock() - self._seen_at < self._seen_duration_s:
                return False
            acquired, transitions = _now(), int(spec.get("leaseTransitions") or 0) + 1
        return await self._write(self._lease(lease, acquired, transitions), new=False)

    async def _write(self, lease: JsonObject, *, new: bool) -> bool:
        try:
            if new:
                await self._client.create(cluster.LEASE, lease)
            else:
                await self._client.replace(cluster.LEASE, lease)
        except ObjectConflict:
            return False
        self._seen = (self._identity, lease["spec"]["renewTime"])
        self._seen_at = self._clock()
        return True

    def _lease(self, found: JsonObject, acquired: str, transitions: int) -> JsonObject:
        metadata = found.get("metadata") or {"name": self._name, "namespace": self._namespace}
        return {
            "apiVersion": cluster.LEASE.api_version,
            "kind": cluster.LEASE.kind,
            "metadata": metadata,
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": max(1, round(self._times.duration_s)),
                "acquireTime": acquired,
                "renewTime": _now(),
                "leaseTransitions": transitions,
            },
        }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
