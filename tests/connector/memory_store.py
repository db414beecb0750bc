"""A store in the test's memory, slow and unreliable as its seed will have it.

It stands behind the connector's ports in place of the C++ core, so that what the connector does
with the answers can be tried in any order of events. It copies one block at a time, as late as
it likes: a block that changes under a save is stored wrong, and seen when it is loaded.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hymcache._core import BlockStatus
from hymcache.connector.block_layout import GroupLayout
from hymcache.lookup.keys import KEY_BYTES


@dataclass
class Faults:
    """Chances of what may go wrong, each from 0 to 1."""

    slow: float = 0.0
    lookup_fails: float = 0.0
    load_fails: float = 0.0
    save_skipped: float = 0.0
    evicted: float = 0.0
    saves_hang: bool = False


@dataclass
class MemoryStore:
    """Objects by key, shared by all engines that were given it."""

    seed: int = 0
    faults: Faults = field(default_factory=Faults)
    objects: dict[bytes, bytes] = field(default_factory=dict)
    lookups: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def happens(self, chance: float) -> bool:
        return self.random.random() < chance

    def matcher(self) -> MemoryMatcher:
        return MemoryMatcher(self)

    def transfers(self, layouts: Sequence[GroupLayout]) -> MemoryTransfers:
        return MemoryTransfers(self, layouts)

    def warn_if_unreachable(self) -> None:
        pass

    def verbs_fallbacks(self) -> int:
        return 0

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class MemoryMatch:
    hits: int
    plan: bytes
    reason: str = ""


class MemoryMatcher:
    """The plan of a match is the keys that were hit."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.open: dict[int, bytes] = {}
        self._next = 0

    def start(self, keys: bytes) -> int:
        assert keys
        assert len(keys) % KEY_BYTES == 0
        self._next += 1
        self.open[self._next] = keys
        self._store.lookups += 1
        return self._next

    def poll(self, ticket: int) -> MemoryMatch | None:
        keys = self.open[ticket]
        if self._store.happens(self._store.faults.slow):
            return None
        if self._store.happens(self._store.faults.lookup_fails):
            return MemoryMatch(0, b"", "unavailable")
        hits = 0
        for key in each(keys):
            if self._store.happens(self._store.faults.evicted):
                self._store.objects.pop(key, None)
            if key not in self._store.objects:
                break
            hits += 1
        return MemoryMatch(hits, keys[: hits * KEY_BYTES])

    def take(self, ticket: int) -> None:
        del self.open[ticket]

    cancel = take


@dataclass
class MemoryResult:
    job: int
    is_load: bool
    statuses: bytes
    bytes_moved: int
    seconds: float = 0.001
    transport: str = "shm"


@dataclass
class _Job:
    number: int
    is_load: bool
    layout: GroupLayout
    keys: list[bytes]
    block_ids: list[int]
    statuses: list[int] = field(default_factory=list)
    cancelled: bool = False


class MemoryTransfers:
    """Moves at most one block of each job in a `poll`."""

    def __init__(self, store: MemoryStore, layouts: Sequence[GroupLayout]) -> None:
        self._store = store
        self._layouts = layouts
        self._jobs: dict[int, _Job] = {}

    def submit_load(
        self,
        job: int,
        layout: int,
        plan: bytes,
        first: int,
        block_ids: NDArray[np.int64],
        *,
        deadline_s: float,
    ) -> None:
        keys = list(each(plan))[first : first + len(block_ids)]
        assert len(keys) == len(block_ids)
        assert deadline_s > 0
        self._jobs[job] = _Job(job, True, self._layouts[layout], keys, block_ids.tolist())

    def submit_save(
        self,
        job: int,
        layout: int,
        keys: bytes,
        name_space: int,
        block_ids: NDArray[np.int64],
        *,
        deadline_s: float,
    ) -> None:
        assert name_space
        assert deadline_s > 0
        assert len(keys) == KEY_BYTES * len(block_ids)
        self._jobs[job] = _Job(
            job, False, self._layouts[layout], list(each(keys)), block_ids.tolist()
        )

    def poll(self) -> list[MemoryResult]:
        done = []
        for job in list(self._jobs.values()):
            hangs = self._store.faults.saves_hang and not job.is_load
            if not job.cancelled and (hangs or self._store.happens(self._store.faults.slow)):
                continue
            while len(job.statuses) < len(job.keys):
                i = len(job.statuses)
                job.statuses.append(self._status(job, job.keys[i], job.block_ids[i]))
                if self._store.happens(self._store.faults.slow):
                    break
            if len(job.statuses) == len(job.keys):
                del self._jobs[job.number]
                moved = job.statuses.count(BlockStatus.OK) * job.layout.block_bytes
                done.append(MemoryResult(job.number, job.is_load, bytes(job.statuses), moved))
        return done

    def wait(self, jobs: Sequence[int], timeout_s: float) -> bool:
        return not any(job in self._jobs for job in jobs)

    def cancel(self, jobs: Sequence[int]) -> None:
        for job in jobs:
            if job in self._jobs:
                self._jobs[job].cancelled = True

    def close(self) -> None:
        self._jobs.clear()

    def _status(self, job: _Job, key: bytes, block_id: int) -> int:
        if job.cancelled:
            return BlockStatus.CANCELLED
        if job.is_load:
            return self._load(job, key, block_id)
        return self._save(job, key, block_id)

    def _load(self, job: _Job, key: bytes, block_id: int) -> int:
        store = self._store
        if store.happens(store.faults.load_fails):
            return store.random.choice(
                [BlockStatus.CORRUPT, BlockStatus.UNAVAILABLE, BlockStatus.DEADLINE]
            )
        if key not in store.objects:
            return BlockStatus.MISS
        write_block(job.layout, block_id, store.objects[key])
        return BlockStatus.OK

    def _save(self, job: _Job, key: bytes, block_id: int) -> int:
        store = self._store
        if job.statuses and job.statuses[-1] not in {BlockStatus.OK, BlockStatus.STORED_ALREADY}:
            return BlockStatus.SKIP_PREFIX
        if key in store.objects:
            return BlockStatus.STORED_ALREADY
        if store.happens(store.faults.save_skipped):
            return BlockStatus.SKIP_BUFFER_FULL
        store.objects[key] = read_block(job.layout, block_id)
        return BlockStatus.OK


def each(keys: bytes) -> list[bytes]:
    return [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]


def read_block(layout: GroupLayout, block_id: int) -> bytes:
    return b"".join(
        ctypes.string_at(run.base + block_id * run.stride, run.size) for run in layout.runs
    )


def write_block(layout: GroupLayout, block_id: int, contents: bytes) -> None:
    assert len(contents) == layout.block_bytes
    for run in layout.runs:
        ctypes.memmove(run.base + block_id * run.stride, contents[: run.size], run.size)
        contents = contents[run.size :]
