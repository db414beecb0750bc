"""Transfers to memory that the store cannot reach: by way of pinned host memory.

    load   store ==> slots --copy--> device        save   device --copy--> slots ==> store
           (threads of Transfers)  (streams of the device)

One thread drives both; the engine's thread only hands jobs in and takes results out. Loads get
slots in the order of their arrival and wait for them, up to their deadline. Saves get at most
half of the slots, and what finds none is skipped: an engine never waits for a save.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.logger import init_logger

from hymcache._core import BlockStatus
from hymcache.connector.block_layout import GroupLayout
from hymcache.connector.ports import TransferResult, Transfers
from hymcache.connector.staging_buffer import BlockCopies, StagingBuffer
from hymcache.lookup.keys import KEY_BYTES

logger = init_logger("vllm.hymcache.staging")

# How often the thread looks for what has finished while something is under way.
_POLL_S: Final = 0.0005
# How long close() waits for the thread; copies that were started end within milliseconds.
_CLOSE_S: Final = 5.0


class Device(Protocol):
    """Asynchronous copies between staging memory and blocks."""

    def pin(self, buffer: torch.Tensor) -> None:
        """Makes host memory fit for fast copies."""

    def unpin(self, buffer: torch.Tensor) -> None:
        """Takes that back."""

    def enter_thread(self) -> None:
        """Called once on the thread that copies."""

    def fence(self) -> Any:
        """A mark behind all that the engine has submitted to the device so far."""

    def copy(self, copies: BlockCopies, fence: Any, *, to_device: bool) -> Any:
        """Starts copies behind a fence; returns an event that comes after them."""

    def done(self, event: Any) -> bool:
        """Whether an event has come. Never blocks."""

    def close(self) -> None:
        """Waits for the copies that were started."""


@dataclass(slots=True)
class StagedResult:
    """A finished job; see TransferResult."""

    job: int
    is_load: bool
    statuses: bytes
    bytes_moved: int
    seconds: float
    transport: str


@dataclass(slots=True)
class _Job:
    number: int
    is_load: bool
    layout: int
    block_ids: NDArray[np.int64]
    fence: Any
    started_at: float
    deadline_at: float
    plan: bytes = b""
    first: int = 0
    keys: bytes = b""
    name_space: int = 0
    cancelled: bool = False
    # Blocks that have slots or never will; blocks that have a status.
    begun: int = 0
    settled: int = 0
    statuses: bytearray = field(default_factory=bytearray)
    bytes_moved: int = 0
    transport: str = ""


@dataclass(slots=True)
class _Batch:
    """Consecutive blocks of a job that are under way together."""

    job: _Job
    first: int
    slots: NDArray[np.int64]
    event: Any = None

    @property
    def span(self) -> slice:
        return slice(self.first, self.first + len(self.slots))


class StagedTransfers:
    """Transfers over a device's memory."""

    def __init__(
        self,
        open_store: Callable[[Sequence[GroupLayout]], Transfers],
        layouts: Sequence[GroupLayout],
        device: Device,
        *,
        staging_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`open_store` gives the transfers over host memory. Raises ConfigError."""
        self._device = device
        self._clock = clock
        self._buffer = StagingBuffer(staging_bytes, layouts)
        device.pin(self._buffer.memory)
        self._store = open_store(self._buffer.store_layouts())
        self._save_slots_max = self._buffer.slots // 2
        self._batch_max = max(1, self._buffer.slots // 2)
        # Shared with the engine's thread, under the lock.
        self._changed = threading.Condition()
        self._arrived: list[_Job] = []
        self._open: dict[int, _Job] = {}
        self._results: list[TransferResult] = []
        self._cancelled = False
        self._closing = False
        # The thread's own.
        self._broken = False
        self._waiting_loads: deque[_Job] = deque()
        self._in_store: dict[int, _Batch] = {}
        self._copying: list[_Batch] = []
        self._save_slots_used = 0
        self._next_batch = 0
        self._thread = threading.Thread(target=self._run, name="hymcache-staging", daemon=True)
        self._thread.start()

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
        loading = self._make_job(job, layout, block_ids, deadline_s, is_load=True)
        loading.plan, loading.first = plan, first
        self._hand_in(loading)

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
        """Saves these blocks under these keys, in order, up to the first that is not taken."""
        saving = self._make_job(job, layout, block_ids, deadline_s, is_load=False)
        saving.keys, saving.name_space = keys, name_space
        self._hand_in(saving)

    def poll(self) -> Sequence[TransferResult]:
        """Jobs that have finished since the last call."""
        with self._changed:
            results, self._results = self._results, []
        return results

    def wait(self, jobs: Sequence[int], timeout_s: float) -> bool:
        """Whether these jobs have finished within the time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not any(job in self._open for job in jobs), timeout_s
            )

    def cancel(self, jobs: Sequence[int]) -> None:
        """Has these jobs end at their next batch; each still comes out of `poll`."""
        with self._changed:
            for number in jobs:
                if number in self._open:
                    self._open[number].cancelled = True
                    self._cancelled = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ends all jobs and the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)
        self._store.close()
        self._device.close()
        self._device.unpin(self._buffer.memory)

    # The engine's thread

    def _make_job(
        self,
        number: int,
        layout: int,
        block_ids: NDArray[np.int64],
        deadline_s: float,
        *,
        is_load: bool,
    ) -> _Job:
        now = self._clock()
        # The fence belongs here: loads must come after what the engine does to their blocks now,
        # saves after the kernels that fill theirs.
        job = _Job(number, is_load, layout, block_ids, self._device.fence(), now, now + deadline_s)
        job.statuses = bytearray([BlockStatus.CANCELLED]) * len(block_ids)
        return job

    def _hand_in(self, job: _Job) -> None:
        with self._changed:
            self._open[job.number] = job
            self._arrived.append(job)
            self._changed.notify_all()

    # The thread

    def _run(self) -> None:
        self._device.enter_thread()
        while self._wait_for_work():
            try:
                self._take_store_results()
                self._take_copies()
                self._start_loads()
            except Exception:  # whatever a driver raises: the engine must go on
                logger.exception("HyMCache: staging is off after an error of the device")
                self._break()

    def _wait_for_work(self) -> bool:
        with self._changed:
            if not self._arrived and not self._closing:
                self._changed.wait(_POLL_S if self._open else None)
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, False
            closing = self._closing
        if closing:
            return False
        if cancelled:
            self._store.cancel([n for n, batch in self._in_store.items() if batch.job.cancelled])
        for job in arrived:
            if self._broken:
                self._settle_rest(job, BlockStatus.DEVICE_ERROR)
            elif job.is_load:
                self._waiting_loads.append(job)
            else:
                self._start_save(job)
        return True

    def _start_loads(self) -> None:
        while self._waiting_loads:
            job = self._waiting_loads[0]
            late = self._clock() >= job.deadline_at
            if job.cancelled or late or job.begun == len(job.block_ids):
                self._waiting_loads.popleft()
                rest = BlockStatus.CANCELLED if job.cancelled else BlockStatus.DEADLINE
                self._settle_rest(job, rest)
                continue
            count = min(len(job.block_ids) - job.begun, self._buffer.free_slots, self._batch_max)
            if count == 0:
                return
            batch = self._begin(job, count)
            self._store.submit_load(
                self._track(batch),
                job.layout,
                job.plan,
                job.first + batch.first,
                batch.slots,
                deadline_s=max(0.0, job.deadline_at - self._clock()),
            )

    def _start_save(self, job: _Job) -> None:
        room = min(self._buffer.free_slots, self._save_slots_max - self._save_slots_used)
        count = min(room, len(job.block_ids))
        if count:
            batch = self._begin(job, count)
            self._save_slots_used += count
            self._copy(batch, np.arange(count), to_device=False)
        self._settle_rest(job, BlockStatus.SKIP_BUFFER_FULL)

    def _begin(self, job: _Job, count: int) -> _Batch:
        batch = _Batch(job, job.begun, self._buffer.take(count))
        job.begun += count
        return batch

    def _track(self, batch: _Batch) -> int:
        self._next_batch += 1
        self._in_store[self._next_batch] = batch
        return self._next_batch

    def _copy(self, batch: _Batch, which: NDArray[np.intp], *, to_device: bool) -> None:
        block_ids = batch.job.block_ids[batch.span][which]
        copies = self._buffer.copies(
            batch.job.layout, batch.slots[which], block_ids, to_device=to_device
        )
        batch.event = self._device.copy(copies, batch.job.fence, to_device=to_device)
        self._copying.append(batch)

    def _take_store_results(self) -> None:
        for result in self._store.poll():
            batch = self._in_store.pop(result.job, None)
            if batch is None:
                # Of a job that ended with an error of the device.
                continue
            job = batch.job
            job.statuses[batch.span] = result.statuses
            job.bytes_moved += result.bytes_moved
            job.transport = result.transport or job.transport
            loaded = np.flatnonzero(np.frombuffer(result.statuses, np.uint8) == BlockStatus.OK)
            if job.is_load and len(loaded) and not job.cancelled:
                self._copy(batch, loaded, to_device=True)
            else:
                if job.is_load and job.cancelled:
                    job.statuses[batch.span] = bytes([BlockStatus.CANCELLED]) * len(batch.slots)
                self._settle(batch)

    def _take_copies(self) -> None:
        copying, self._copying = self._copying, []
        for batch in copying:
            if not self._device.done(batch.event):
                self._copying.append(batch)
            elif batch.job.is_load or batch.job.cancelled:
                self._settle(batch)
            else:
                job = batch.job
                self._store.submit_save(
                    self._track(batch),
                    job.layout,
                    job.keys[
                        batch.first * KEY_BYTES : (batch.first + len(batch.slots)) * KEY_BYTES
                    ],
                    job.name_space,
                    batch.slots,
                    deadline_s=max(0.0, job.deadline_at - self._clock()),
                )

    def _settle(self, batch: _Batch) -> None:
        self._buffer.give_back(batch.slots)
        if not batch.job.is_load:
            self._save_slots_used -= len(batch.slots)
        batch.job.settled += len(batch.slots)
        self._finish_if_settled(batch.job)

    def _settle_rest(self, job: _Job, status: BlockStatus) -> None:
        rest = len(job.block_ids) - job.begun
        job.statuses[job.begun :] = bytes([status]) * rest
        job.begun += rest
        job.settled += rest
        self._finish_if_settled(job)

    def _finish_if_settled(self, job: _Job) -> None:
        if job.settled < len(job.block_ids):
            return
        seconds = self._clock() - job.started_at
        result = StagedResult(
            job.number, job.is_load, bytes(job.statuses), job.bytes_moved, seconds, job.transport
        )
        with self._changed:
            if self._open.pop(job.number, None) is not None:
                self._results.append(result)
                self._changed.notify_all()

    def _break(self) -> None:
        """After an error of the device nothing that is under way can be trusted."""
        self._broken = True
        self._waiting_loads.clear()
        self._in_store.clear()
        self._copying.clear()
        with self._changed:
            stranded = [job for job in self._open.values() if job not in self._arrived]
        for job in stranded:
            job.begun = job.settled = 0
            self._settle_rest(job, BlockStatus.DEVICE_ERROR)
