"""The workers' half: starts what the scheduler's half ordered, and reports how it went.

    start_loads .. after the forward was launched   saves and loads run on the threads of Transfers
    start_saves .. when the step's KV is written
    finished ..... at the end of every step: what is done, what failed

Nothing here waits. A load that fails in any way is reported as such: vLLM computes its blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger

from hymcache._core import BlockStatus
from hymcache.connector.metadata import (
    ALL_BLOCKS,
    LoadPart,
    LoadRequest,
    SaveJob,
    SaveReport,
    StepMetadata,
    StepReport,
)
from hymcache.connector.metrics import StoreStats
from hymcache.connector.ports import TransferResult, Transfers
from hymcache.connector.shard_namespaces import Rank, Shards, WorkerLayout
from hymcache.errors import HymcacheError

logger = init_logger("vllm.hymcache.worker")

_STORED = frozenset({BlockStatus.OK, BlockStatus.STORED_ALREADY})


@dataclass(slots=True)
class _Loading:
    """A request's load: the jobs that are not done, and how the blocks of its parts fared."""

    parts: tuple[LoadPart, ...]
    open_jobs: set[int] = field(default_factory=set)
    statuses: dict[int, bytes] = field(default_factory=dict)
    aborted: bool = False


class WorkerSide:
    """The half of the connector that lives in one worker."""

    def __init__(
        self,
        transfers: Transfers,
        rank: Rank,
        shards: Shards,
        layouts: Sequence[WorkerLayout],
        *,
        deadline_s: float,
        verbs_fallbacks: Callable[[], int] = lambda: 0,
    ) -> None:
        """`layouts` are those of the KV cache groups kept, in their order.

        `verbs_fallbacks` counts the calls so far that went over TCP although RDMA was to be used.
        """
        self._transfers = transfers
        self._shard = shards.shard_of(rank)
        self._saves_shard = shards.saves(rank)
        self._single_group = len(layouts) == 1
        self._deadline_s = deadline_s
        self._verbs_fallbacks = verbs_fallbacks
        self._fallbacks_counted = 0
        self._next_job = 0
        self._loads: dict[str, _Loading] = {}
        # A job of Transfers -> the request and part that it loads, or the save that it is.
        self._load_of_job: dict[int, tuple[str, int]] = {}
        self._save_of_job: dict[int, SaveJob] = {}
        self._job_of_save: dict[int, int] = {}
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._report = StepReport(layouts={rank: tuple(layouts)})
        self._stats = StoreStats()

    def start_loads(self, metadata: StepMetadata) -> None:
        """Starts the loads of a step."""
        for load in metadata.loads:
            self._start_load(load)

    def start_saves(self, metadata: StepMetadata) -> None:
        """Starts the saves of a step, and ends those that nobody waits for any more."""
        if self._saves_shard:
            for save in metadata.saves:
                self._start_save(save)
        dropped = [self._job_of_save[s] for s in metadata.dropped_saves if s in self._job_of_save]
        if dropped:
            self._transfers.cancel(dropped)

    def finished(self, finished_req_ids: Iterable[str]) -> KVConnectorTransferResults:
        """The loads that are done, failed ones among them. A request comes here exactly once."""
        for req_id in finished_req_ids:
            # An aborted request's blocks are given back when its load is reported.
            loading = self._loads.get(req_id)
            if loading is not None:
                loading.aborted = True
                self._transfers.cancel(sorted(loading.open_jobs))
        for result in self._transfers.poll():
            if result.job in self._load_of_job:
                self._end_load_job(result)
            elif result.job in self._save_of_job:
                self._end_save(result)
        results = KVConnectorTransferResults(
            finished_recving=self._finished, failed_recving=self._failed
        )
        self._finished, self._failed = set(), set()
        return results

    def take_bad_blocks(self) -> set[int]:
        """The blocks of the loads just reported that do not hold what was asked for."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self) -> StepReport | None:
        """What the scheduler's half should know of this step."""
        report, self._report = self._report, StepReport()
        return report if report else None

    def take_stats(self) -> StoreStats | None:
        """What was counted since the last call."""
        fallbacks = self._verbs_fallbacks()
        self._stats.add("verbs_fallbacks", fallbacks - self._fallbacks_counted)
        self._fallbacks_counted = fallbacks
        return self._stats.take()

    def close(self) -> None:
        """Ends all transfers."""
        self._transfers.close()

    def _new_job(self) -> int:
        self._next_job += 1
        return self._next_job

    def _start_load(self, load: LoadRequest) -> None:
        loading = _Loading(load.parts)
        self._loads[load.req_id] = loading
        for index, part in enumerate(load.parts):
            if not part.block_ids:
                continue
            job = self._new_job()
            try:
                self._transfers.submit_load(
                    job,
                    part.group,
                    part.plans[self._shard],
                    part.first,
                    np.asarray(part.block_ids, dtype=np.int64),
                    deadline_s=self._deadline_s,
                )
            except (HymcacheError, ValueError) as error:
                # A plan that makes no sense, perhaps of another version: nothing to load by.
                logger.warning("HyMCache cannot load for request %s: %s", load.req_id, error)
                loading.statuses[index] = bytes([BlockStatus.MISS]) * len(part.block_ids)
                continue
            loading.open_jobs.add(job)
            self._load_of_job[job] = (load.req_id, index)
        if not loading.open_jobs:
            self._end_load(load.req_id, loading)

    def _end_load_job(self, result: TransferResult) -> None:
        req_id, index = self._load_of_job.pop(result.job)
        loading = self._loads[req_id]
        loading.open_jobs.discard(result.job)
        loading.statuses[index] = result.statuses
        self._count_bytes("load", result)
        self._stats.observe("load_seconds", result.seconds)
        if not loading.open_jobs:
            self._end_load(req_id, loading)

    def _end_load(self, req_id: str, loading: _Loading) -> None:
        del self._loads[req_id]
        self._finished.add(req_id)
        counts = Counter(b"".join(loading.statuses.values()))
        self._stats.add("blocks_loaded", counts.pop(BlockStatus.OK, 0))
        if not counts:
            self._report.loads[req_id] = ALL_BLOCKS
            return
        if loading.aborted:
            self._report.loads[req_id] = 0
            return
        for status, count in counts.items():
            self._stats.add("blocks_load_failed", count, BlockStatus(status).name.lower())
        logger.warning(
            "HyMCache failed to load %d blocks for request %s (%s): they are computed instead",
            counts.total(),
            req_id,
            ", ".join(sorted(BlockStatus(status).name.lower() for status in counts)),
        )
        if self._single_group:
            statuses = loading.statuses[0]
            self._report.loads[req_id] = _leading(statuses, {BlockStatus.OK})
            self._bad_blocks.update(
                block_id
                for block_id, status in zip(loading.parts[0].block_ids, statuses, strict=True)
                if status != BlockStatus.OK
            )
        else:
            # Block ids say nothing without their group: vLLM takes the whole request back.
            self._report.loads[req_id] = 0
            self._failed.add(req_id)

    def _start_save(self, save: SaveJob) -> None:
        job = self._new_job()
        try:
            self._transfers.submit_save(
                job,
                save.group,
                save.keys[self._shard],
                save.name_spaces[self._shard],
                np.asarray(save.block_ids, dtype=np.int64),
                deadline_s=self._deadline_s,
            )
        except (HymcacheError, ValueError) as error:
            logger.warning("HyMCache cannot save: %s", error)
            self._stats.add("blocks_skipped", len(save.block_ids), "refused")
            self._report.saves[save.job] = SaveReport(1, 0)
            return
        self._save_of_job[job] = save
        self._job_of_save[save.job] = job

    def _end_save(self, result: TransferResult) -> None:
        save = self._save_of_job.pop(result.job)
        del self._job_of_save[save.job]
        self._report.saves[save.job] = SaveReport(1, _leading(result.statuses, _STORED))
        self._count_bytes("save", result)
        self._stats.observe("save_seconds", result.seconds)
        for status, count in Counter(result.statuses).items():
            if status == BlockStatus.OK:
                self._stats.add("blocks_saved", count)
            else:
                reason = BlockStatus(status).name.lower().removeprefix("skip_")
                self._stats.add("blocks_skipped", count, reason)

    def _count_bytes(self, direction: str, result: TransferResult) -> None:
        self._stats.add("bytes", result.bytes_moved, direction, result.transport or "none")


def _leading(statuses: bytes, good: Iterable[BlockStatus]) -> int:
    """How many of the statuses, from the first on, are good."""
    good_values = frozenset(good)
    return sum(1 for _ in takewhile(good_values.__contains__, statuses))
