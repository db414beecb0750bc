"""The worker's half: moves blocks between the engine and the region, and tells how it went.

    submit_load, submit_store   a job becomes one transfer for each KV cache group that it touches
    get_finished                jobs all of whose transfers are done; every one of them succeeds
    wait                        before vLLM overwrites blocks that are still being stored

A load that fails - evicted since the lookup, a checksum that does not match, too late - is a job
that succeeds all the same, and its blocks are reported as load errors: see load_errors.py for why
that is the way. A store that is not taken is counted by reason; the block is simply not there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker, TransferResult

from hymcache._core import BlockStatus
from hymcache.connector.shared_region.keys import RegionKeys, group_of
from hymcache.connector.shared_region.load_errors import WorkerReports
from hymcache.connector.shared_region.load_store_spec import RegionLoadStoreSpec
from hymcache.connector.shared_region.outcomes import reason_of
from hymcache.lookup.keys import KEY_BYTES

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import LoadStoreSpec

    from hymcache.connector.ports import TransferResult as PartResult
    from hymcache.connector.ports import Transfers
    from hymcache.connector.shared_region.region_counts import RegionCounts

logger = init_logger("vllm.hymcache.region")

# How long vLLM is held up for stores whose blocks it wants back, before they are given up.
_FLUSH_S: Final = 1.0
_MISALIGNED: Final = "misaligned"


class Part(NamedTuple):
    """Blocks of one group, and the keys of the chunks that they are in.

    `skip` of the first chunk's blocks come before the first of `block_ids`.
    """

    group: int
    chunks: list[bytes]
    skip: int
    block_ids: NDArray[np.int64]


def parts_of(
    blocks: GPULoadStoreSpec, spec: RegionLoadStoreSpec, group_ids: Sequence[int], chunk_blocks: int
) -> Iterator[Part]:
    """A job by group; `group_ids` are vLLM's of the groups that are offloaded, in their order."""
    start = 0
    for group, group_id in enumerate(group_ids):
        count = blocks.group_sizes[group]
        if count == 0:
            continue
        block_ids = blocks.block_ids[start : start + count].astype(np.int64)
        start += count
        chunks = [chunk for chunk in spec.chunks if group_of(chunk) == group_id]
        yield Part(group, chunks, blocks.block_indices[group] % chunk_blocks, block_ids)


@dataclass(slots=True)
class _Job:
    is_load: bool
    req_id: str
    open_parts: dict[int, Part] = field(default_factory=dict)
    bytes_moved: int = 0
    seconds: float = 0.0
    failed: Counter[int] = field(default_factory=Counter)
    bad_blocks: set[int] = field(default_factory=set)


class SharedRegionWorker(OffloadingWorker):
    """What OffloadingConnector's worker drives."""

    def __init__(
        self,
        transfers: Transfers,
        keys: RegionKeys,
        reports: WorkerReports,
        counts: RegionCounts,
        *,
        shard: int,
        group_ids: Sequence[int],
        chunk_blocks: int,
        deadline_s: float,
        close: Callable[[], None],
    ) -> None:
        """`close` is called last, when no transfer is left."""
        self._close = close
        self._transfers = transfers
        self._keys = keys
        self._reports = reports
        self._counts = counts
        self._shard = shard
        self._group_ids = tuple(group_ids)
        self._chunk_blocks = chunk_blocks
        self._deadline_s = deadline_s
        self._jobs: dict[int, _Job] = {}
        self._job_of_transfer: dict[int, int] = {}
        self._next_transfer = 0
        self._finished: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Begins to store blocks."""
        self._submit(job_id, src_spec, dst_spec, is_load=False)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Begins to load blocks."""
        self._submit(job_id, dst_spec, src_spec, is_load=True)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Jobs that have ended since the last call. Never waits."""
        self._counts.report()
        for result in self._transfers.poll():
            self._end_part(result)
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Returns when nothing reads or writes the blocks of these jobs any more."""
        numbers = [n for n, job_id in self._job_of_transfer.items() if job_id in job_ids]
        if self._transfers.wait(numbers, _FLUSH_S):
            return
        self._transfers.cancel(numbers)
        if not self._transfers.wait(numbers, self._deadline_s):
            raise TimeoutError(
                f"a copy between the region and the engine has not ended within "
                f"{self._deadline_s:.0f} s; its blocks cannot be used again"
            )

    def shutdown(self) -> None:
        """Ends all transfers and leaves the region."""
        self._transfers.close()
        self._close()

    def _submit(
        self, job_id: int, blocks: GPULoadStoreSpec, spec: LoadStoreSpec, *, is_load: bool
    ) -> None:
        if not isinstance(spec, RegionLoadStoreSpec):
            raise TypeError(f"not a job of a shared region: {type(spec).__name__}")
        job = self._jobs[job_id] = _Job(is_load, spec.req_id)
        for part in parts_of(blocks, spec, self._group_ids, self._chunk_blocks):
            if not self._is_aligned(part, is_load=is_load):
                self._misaligned(job, part)
                continue
            first = part.skip * KEY_BYTES
            keys = self._keys.of_shard(self._shard, part.chunks)[first:]
            keys = keys[: len(part.block_ids) * KEY_BYTES]
            self._next_transfer += 1
            number = self._next_transfer
            job.open_parts[number] = part
            self._job_of_transfer[number] = job_id
            if is_load:
                self._transfers.submit_load(
                    number, part.group, keys, 0, part.block_ids, deadline_s=self._deadline_s
                )
            else:
                self._transfers.submit_save(
                    number,
                    part.group,
                    keys,
                    self._keys.name_space(self._shard),
                    part.block_ids,
                    deadline_s=self._deadline_s,
                )
        if not job.open_parts:
            self._end_job(job_id)

    def _end_part(self, result: PartResult) -> None:
        job_id = self._job_of_transfer.pop(result.job)
        job = self._jobs[job_id]
        part = job.open_parts.pop(result.job)
        job.bytes_moved += result.bytes_moved
        job.seconds = max(job.seconds, result.seconds)
        stats = self._reports.stats
        stats.add("region_bytes", result.bytes_moved, "load" if job.is_load else "store")
        counts = Counter(result.statuses)
        if job.is_load:
            stats.add("region_blocks_loaded", counts[BlockStatus.OK])
            stats.observe("region_load_seconds", result.seconds)
            self._fail(job, part, result.statuses)
        else:
            stats.add("region_blocks_stored", counts.pop(BlockStatus.OK, 0))
            stats.observe("region_store_seconds", result.seconds)
            for status, count in counts.items():
                stats.add("region_blocks_not_stored", count, reason_of(status))
        if not job.open_parts:
            self._end_job(job_id)

    def _end_job(self, job_id: int) -> None:
        job = self._jobs.pop(job_id)
        if job.failed:
            self._report_failure(job)
        self._finished.append(
            TransferResult(
                job_id=job_id,
                success=True,
                transfer_size=job.bytes_moved,
                transfer_time=job.seconds,
            )
        )

    def _report_failure(self, job: _Job) -> None:
        for status, count in job.failed.items():
            self._reports.stats.add("region_blocks_load_failed", count, reason_of(status))
        logger.warning(
            "HyMCache: %d blocks of request %s failed to load from the region (%s): they are "
            "computed instead",
            job.failed.total(),
            job.req_id,
            ", ".join(sorted(reason_of(status) for status in job.failed)),
        )
        if len(self._group_ids) > 1:
            # Block ids say nothing without their group: vLLM takes the whole request back.
            self._reports.failed_requests.add(job.req_id)
        else:
            self._reports.bad_blocks |= job.bad_blocks

    @staticmethod
    def _fail(job: _Job, part: Part, statuses: bytes) -> None:
        for block_id, status in zip(part.block_ids, statuses, strict=True):
            if status != BlockStatus.OK:
                job.failed[status] += 1
                job.bad_blocks.add(int(block_id))

    def _is_aligned(self, part: Part, *, is_load: bool) -> bool:
        """Whether `block_ids` are the blocks of the chunks from `skip` on: each has its key then.

        A load may end within its last chunk. Of a store vLLM leaves out the blocks that a sliding
        window has given back, wherever they are in their chunks, and does not say which; those
        behind one would go under the keys of their neighbours.
        """
        missing = len(part.chunks) * self._chunk_blocks - part.skip - len(part.block_ids)
        return 0 <= missing < self._chunk_blocks if is_load else missing == 0

    def _misaligned(self, job: _Job, part: Part) -> None:
        """Nobody knows which keys these blocks have."""
        if job.is_load:
            self._fail(job, part, bytes([BlockStatus.MISS]) * len(part.block_ids))
        else:
            self._reports.stats.add("region_blocks_not_stored", len(part.block_ids), _MISALIGNED)
