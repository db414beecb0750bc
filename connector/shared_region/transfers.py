"""Copies between a mapped region and memory of this host, on threads of their own.

The `Transfers` of connector/ports.py over a region: straight into the engine's blocks on a CPU;
behind StagedTransfers, into pinned memory, on a GPU. A job is cut into pieces that the threads
share, so one load uses all of them; before each it looks at its deadline. When it is cancelled, the
pieces that no thread has begun end at once, whatever is before them in the queue. The copies are
the core's, non-temporal, with the crc32c taken on the way.

A load's `plan` is the keys of its blocks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from vllm.logger import init_logger

from hymcache._core import BlockStatus
from hymcache.connector.block_layout import GroupLayout
from hymcache.connector.ports import TransferResult
from hymcache.connector.shared_region.outcomes import TAKEN
from hymcache.lookup.keys import KEY_BYTES

logger = init_logger("vllm.hymcache.region")

# Large enough for a copy to run at full speed, small enough to end soon when it is to.
_PIECE_BYTES: Final = 4 << 20
# Saves under way; a save beyond them is skipped, as the region keeps less than the engine makes.
_SAVES_MAX: Final = 256
_CLOSE_S: Final = 5.0
_TRANSPORT: Final = "region"


class RegionCopies(Protocol):
    """What moves the bytes: mapped_region.RegionStore."""

    def store(
        self,
        keys: bytes,
        addresses: NDArray[np.int64],
        sizes: NDArray[np.int64],
        name_space: int,
    ) -> bytes:
        """Stores a block for each key; its runs are a row of `addresses`, their bytes `sizes`.

        The answer is a BlockStatus or an outcomes.Refusal for each.
        """

    def load(self, keys: bytes, addresses: NDArray[np.int64], sizes: NDArray[np.int64]) -> bytes:
        """Loads a block for each key, likewise. The answer is a status for each, as of a store."""


@dataclass(slots=True)
class RegionResult:
    """A finished job; see TransferResult."""

    job: int
    is_load: bool
    statuses: bytes
    bytes_moved: int
    seconds: float
    transport: str = _TRANSPORT


@dataclass(slots=True)
class _Job:
    number: int
    layout: int
    keys: bytes
    block_ids: NDArray[np.int64]
    started_at: float
    deadline_at: float
    # Of a save; a load has none.
    name_space: int | None = None
    statuses: bytearray = field(default_factory=bytearray)
    open_pieces: int = 0
    moved_blocks: int = 0
    # A save: blocks from here on could never be found, because one before was not taken.
    stopped_at: int = 1 << 62

    @property
    def is_load(self) -> bool:
        return self.name_space is None


class _Piece(NamedTuple):
    job: _Job
    first: int
    end: int


class _Layout(NamedTuple):
    bases: NDArray[np.int64]
    strides: NDArray[np.int64]
    sizes: NDArray[np.int64]
    block_bytes: int


class RegionTransfers:
    """Transfers between a region and the memory of some layouts."""

    def __init__(
        self,
        copies: RegionCopies,
        layouts: Sequence[GroupLayout],
        *,
        load_threads: int,
        store_threads: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._copies = copies
        self._clock = clock
        self._layouts = [_as_arrays(layout) for layout in layouts]
        self._load_threads = load_threads
        lock = threading.RLock()
        self._queued, self._ended = threading.Condition(lock), threading.Condition(lock)
        self._loads: deque[_Piece] = deque()
        self._saves: deque[_Piece] = deque()
        self._closing = False
        self._open: dict[int, _Job] = {}
        self._open_saves = 0
        self._results: list[TransferResult] = []
        self._threads = [
            threading.Thread(target=self._run, args=(pieces,), name=f"hymcache-{name}", daemon=True)
            for name, pieces, count in (
                ("load", self._loads, load_threads),
                ("store", self._saves, store_threads),
            )
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

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
        """Loads rows `first...` of a plan into these blocks."""
        keys = plan[first * KEY_BYTES : (first + len(block_ids)) * KEY_BYTES]
        self._submit(self._job(job, layout, keys, block_ids, deadline_s))

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
        """Saves these blocks under these keys; what follows one that was not taken is skipped."""
        saving = self._job(job, layout, keys, block_ids, deadline_s)
        saving.name_space = name_space
        self._submit(saving)

    def poll(self) -> Sequence[TransferResult]:
        """Jobs that have finished since the last call."""
        with self._ended:
            results, self._results = self._results, []
        return results

    def wait(self, jobs: Sequence[int], timeout_s: float) -> bool:
        """Whether these jobs have finished within the time."""
        with self._ended:
            return self._ended.wait_for(
                lambda: not any(job in self._open for job in jobs), timeout_s
            )

    def cancel(self, jobs: Sequence[int]) -> None:
        """Ends these jobs but for the pieces being copied; each still comes out of `poll`."""
        ended = frozenset(jobs)
        with self._ended:
            for pieces in (self._loads, self._saves):
                for _ in range(len(pieces)):
                    piece = pieces.popleft()
                    if piece.job.number in ended:
                        self._settle(piece.job)
                    else:
                        pieces.append(piece)

    def close(self) -> None:
        """Ends all jobs and threads."""
        with self._queued:
            self._closing = True
            self.cancel(list(self._open))
            self._queued.notify_all()
        for thread in self._threads:
            thread.join(_CLOSE_S)

    def _submit(self, job: _Job) -> None:
        if len(job.keys) != len(job.block_ids) * KEY_BYTES:
            raise ValueError(f"{len(job.keys)} bytes of keys for {len(job.block_ids)} blocks")
        pieces = self._cut(job)
        with self._queued:
            if not pieces or (not job.is_load and self._open_saves >= _SAVES_MAX):
                job.statuses[:] = bytes([BlockStatus.SKIP_BUFFER_FULL]) * len(job.block_ids)
                self._results.append(self._result(job))
                return
            self._open[job.number] = job
            self._open_saves += not job.is_load
            (self._loads if job.is_load else self._saves).extend(pieces)
            self._queued.notify_all()

    def _job(
        self, number: int, layout: int, keys: bytes, block_ids: NDArray[np.int64], deadline_s: float
    ) -> _Job:
        now = self._clock()
        job = _Job(number, layout, keys, block_ids, now, now + deadline_s)
        job.statuses = bytearray([BlockStatus.CANCELLED]) * len(block_ids)
        return job

    def _cut(self, job: _Job) -> list[_Piece]:
        count = len(job.block_ids)
        fitting = max(1, _PIECE_BYTES // self._layouts[job.layout].block_bytes)
        step = min(fitting, -(-count // self._load_threads)) if job.is_load else fitting
        pieces = [
            _Piece(job, first, min(count, first + step)) for first in range(0, count, max(1, step))
        ]
        job.open_pieces = len(pieces)
        return pieces

    # The threads

    def _run(self, pieces: deque[_Piece]) -> None:
        while (piece := self._next(pieces)) is not None:
            try:
                statuses = self._copy(piece)
            except Exception:  # the engine goes on, whatever the device does
                logger.exception("HyMCache: the region refused a copy")
                statuses = bytes([BlockStatus.DEVICE_ERROR]) * (piece.end - piece.first)
            self._end(piece, statuses)

    def _next(self, pieces: deque[_Piece]) -> _Piece | None:
        """The next piece, once there is one; None at the end."""
        with self._queued:
            self._queued.wait_for(lambda: pieces or self._closing)
            return pieces.popleft() if pieces else None

    def _copy(self, piece: _Piece) -> bytes:
        job, count = piece.job, piece.end - piece.first
        if self._clock() >= job.deadline_at:
            return bytes([BlockStatus.DEADLINE]) * count
        if piece.first > job.stopped_at:
            return bytes([BlockStatus.SKIP_PREFIX]) * count
        layout = self._layouts[job.layout]
        block_ids = job.block_ids[piece.first : piece.end]
        addresses = layout.bases + block_ids[:, None] * layout.strides
        keys = job.keys[piece.first * KEY_BYTES : piece.end * KEY_BYTES]
        if job.name_space is None:
            return self._copies.load(keys, addresses, layout.sizes)
        return self._copies.store(keys, addresses, layout.sizes, job.name_space)

    def _end(self, piece: _Piece, statuses: bytes) -> None:
        job = piece.job
        moved = statuses.count(BlockStatus.OK)
        with self._ended:
            job.statuses[piece.first : piece.end] = statuses
            job.moved_blocks += moved
            if not job.is_load:
                for index, status in enumerate(statuses, piece.first):
                    if status not in TAKEN:
                        job.stopped_at = min(job.stopped_at, index)
                        break
            self._settle(job)

    def _settle(self, job: _Job) -> None:
        """One piece less; called with the lock."""
        job.open_pieces -= 1
        if job.open_pieces:
            return
        del self._open[job.number]
        self._open_saves -= not job.is_load
        self._results.append(self._result(job))
        self._ended.notify_all()

    def _result(self, job: _Job) -> RegionResult:
        return RegionResult(
            job.number,
            job.is_load,
            bytes(job.statuses),
            job.moved_blocks * self._layouts[job.layout].block_bytes,
            self._clock() - job.started_at,
        )


def _as_arrays(layout: GroupLayout) -> _Layout:
    runs = np.asarray(layout.runs, dtype=np.int64)
    return _Layout(runs[:, 0].copy(), runs[:, 1].copy(), runs[:, 2].copy(), layout.block_bytes)
