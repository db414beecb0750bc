"""Prepares claims on this node: reads what the controller attached, and remembers what it told.

Everything was done before the pod was bound: the region is composed, the device made, the CDI spec
written. So preparing is one request to the API server, a look at files of this node, and a
record. Where the API server counts no capacity (Kubernetes 1.34 and 1.35 by default) the pod is
bound first, and preparing waits for the controller, by a watch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hymcache.dra.claim import Claim
from hymcache.dra.cluster import JsonObject, ObjectMissing
from hymcache.dra.kubelet_plugin.checkpoint import Checkpoint, ClaimRecord
from hymcache.dra.kubelet_plugin.claim_source import ClaimSource
from hymcache.dra.kubelet_plugin.prepared_device import (
    NotAttached,
    PreparedDevice,
    missing_parts,
    read_devices,
)
from hymcache.dra.state_file import StateFile
from hymcache.errors import HymcacheError

# As long as the paper's controller waits for a consumer (arXiv 2609.10790, section 2.3), and well
# below the kubelet's 45 s, so that it is told why.
ATTACH_WAIT_S: Final = 30.0
# Left of the kubelet's deadline for the answer.
_ANSWER_S: Final = 5.0


class ClaimReplaced(HymcacheError):
    """Another claim has the name by now: the pod's is gone."""


@dataclass(frozen=True, slots=True)
class ClaimName:
    """A claim as the kubelet names it."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """Whose devices are prepared, on which node, and where its CDI specs are."""

    driver: str
    node: str
    cdi_root: Path


@dataclass(slots=True)
class PrepareCounts:
    """What happened since the process started. Times in seconds, waiting included."""

    prepared: int = 0
    failed: int = 0
    unprepared: int = 0
    prepare_s: float = 0.0


class ClaimPreparer:
    """Prepares and unprepares claims. All calls may be repeated."""

    def __init__(
        self,
        options: PrepareOptions,
        checkpoint: StateFile[Checkpoint],
        source: ClaimSource,
        *,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_change` is called when what is prepared on this node has changed."""
        self._options = options
        self._checkpoint = checkpoint
        self._source = source
        self._on_change = on_change
        self._clock = clock
        self.counts = PrepareCounts()

    async def prepare(self, claim: ClaimName, left_s: float | None) -> tuple[PreparedDevice, ...]:
        """The devices of a claim. `left_s` is until the caller's deadline, None without one.

        Raises NotAttached, AttachFailed, ClaimReplaced, and what the API server says.
        """
        start_s = self._clock()
        try:
            devices = await asyncio.to_thread(self._recorded, claim)
            if devices is None:
                devices = await self._read(claim, left_s)
                await asyncio.to_thread(self._record, claim, devices)
        except HymcacheError:
            self.counts.failed += 1
            raise
        finally:
            self.counts.prepare_s += self._clock() - start_s
        self.counts.prepared += 1
        self._on_change()
        return devices

    async def unprepare(self, claim: ClaimName) -> None:
        """Forgets a claim. Its memory is freed by the controller when the claim goes."""
        await asyncio.to_thread(self._forget, claim)
        self.counts.unprepared += 1
        self._on_change()

    def prepared(self) -> dict[str, ClaimRecord]:
        """What is prepared on this node, by UID."""
        return self._checkpoint.load().claims

    def _recorded(self, claim: ClaimName) -> tuple[PreparedDevice, ...] | None:
        """What was told before, if it still holds: no request is needed then."""
        record = self._checkpoint.load().claims.get(claim.uid)
        if record is None:
            return None
        root = self._options.cdi_root
        if any(missing_parts(device.cdi_names, root) for device in record.devices):
            return None
        return record.devices

    async def _read(self, claim: ClaimName, left_s: float | None) -> tuple[PreparedDevice, ...]:
        wait_s = ATTACH_WAIT_S if left_s is None else min(ATTACH_WAIT_S, left_s - _ANSWER_S)
        reason: HymcacheError = NotAttached(f"claim {claim}: the API server does not answer")
        try:
            async with (
                asyncio.timeout(max(0.0, wait_s)),
                aclosing(self._source.follow(claim.namespace, claim.name)) as versions,
            ):
                async for item in versions:
                    try:
                        return await asyncio.to_thread(self._read_version, claim, item)
                    except NotAttached as error:
                        reason = error
        except ObjectMissing as error:
            raise ClaimReplaced(f"claim {claim} is gone") from error
        except TimeoutError:
            raise reason from None
        raise ClaimReplaced(f"claim {claim} was deleted while it was prepared")

    def _read_version(self, claim: ClaimName, item: JsonObject) -> tuple[PreparedDevice, ...]:
        read = Claim(item, self._options.driver)
        if read.uid != claim.uid:
            raise ClaimReplaced(
                f"claim {claim} has the UID {read.uid}: that of the pod, {claim.uid}, is gone"
            )
        return read_devices(read, self._options.node, self._options.cdi_root)

    def _record(self, claim: ClaimName, devices: tuple[PreparedDevice, ...]) -> None:
        record = ClaimRecord(namespace=claim.namespace, name=claim.name, devices=devices)
        with self._checkpoint.change() as checkpoint:
            checkpoint.claims[claim.uid] = record

    def _forget(self, claim: ClaimName) -> None:
        with self._checkpoint.change() as checkpoint:
            checkpoint.claims.pop(claim.uid, None)
