"""The region as a secondary tier of vLLM's TieringOffloadingSpec: GPU <-> CPU memory <-> region.

All of it runs in the scheduler's process, which copies between its CPU tier and the region, so
this process does map data slots. Here a load may fail as such (`JobResult.successful_keys`): the
tier above gives its place back and asks again, and a key whose load failed is then a miss, until it
has been stored anew.

A slot holds a chunk of all ranks, as the CPU tier has it. There is no worker of ours to say what
the order of its bytes depends on, and vLLM's configuration is not shown: the name of the model and
a digest of its weights, the KV's dtype, layout and geometry are all that is known. Engines that
differ otherwise (revision, quantization on load, overrides of the model's configuration) need
different values of `variant`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from hymcache._core import BlockStatus
from hymcache.connector.block_layout import GroupLayout, Run
from hymcache.connector.shared_region.facts import tier_facts
from hymcache.connector.shared_region.handoff import Handoff, Handoffs
from hymcache.connector.shared_region.keys import RegionKeys
from hymcache.connector.shared_region.mapped_region import open_store
from hymcache.connector.shared_region.metrics import RegionStats, metric_definitions
from hymcache.connector.shared_region.outcomes import TAKEN, reason_of
from hymcache.connector.shared_region.region_counts import RegionCounts
from hymcache.connector.shared_region.settings import Role, read_settings
from hymcache.connector.shared_region.transfers import RegionTransfers
from hymcache.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import (
        OffloadingMetricMetadata,
        OffloadingSpec,
        OffloadKey,
        ReqContext,
    )
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import TransferJob

_FAILED_KEYS_MAX: Final = 4096
_LOADED: Final[frozenset[int]] = frozenset({BlockStatus.OK})


class SharedRegionTier(SecondaryTierManager):
    """A shared region below vLLM's CPU tier."""

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **extra: Any,
    ) -> None:
        """`extra` are the settings of the tier, as those of SharedRegionOffloadingSpec.

        Raises ConfigError for settings that cannot be, DeviceError for a device that cannot be
        mapped.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings = read_settings(extra)
        chunks = np.asarray(primary_kv_view)
        self._role = settings.role
        self._deadline_s = settings.deadline_s
        self._stats = RegionStats()
        self._handoffs = Handoffs(
            always=settings.role is Role.CONSUMER,
            timeout_s=settings.handoff_timeout_s,
            clock=time.monotonic,
            stats=self._stats,
        )
        self._waits: dict[str, Handoff] = {}
        self._failed: OrderedDict[bytes, None] = OrderedDict()
        facts = tier_facts(offloading_spec.config, settings, self.block_size_bytes)
        self._keys = RegionKeys(facts, shards=1, blocks_per_chunk=1)
        self._store = open_store(settings, facts, self.block_size_bytes)
        layout = GroupLayout(
            0,
            chunks.shape[0],
            (Run(chunks.ctypes.data, self.block_size_bytes, self.block_size_bytes),),
            "",
        )
        self._counts = RegionCounts(self._store.attachment, self._stats, slots=True)
        self._transfers = RegionTransfers(
            self._store,
            [layout],
            load_threads=settings.load_threads,
            store_threads=settings.store_threads,
        )
        self._jobs: dict[int, TransferJob] = {}

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """The metrics of a region."""
        del extra_config
        return metric_definitions()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Begins to follow a request."""
        self._waits[req_context.req_id] = self._handoffs.of(req_context.kv_transfer_params)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forgets a request."""
        handoff = self._waits.pop(req_context.req_id, None)
        if handoff is not None:
            self._handoffs.finished(handoff)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether a chunk can be loaded. RETRY while it is on its way from another engine."""
        if not self._role.loads or key in self._failed:
            return LookupResult.MISS
        if self._store.holds_all(self._keys.of_chunk(key)):
            return LookupResult.HIT
        handoff = self._waits.get(req_context.req_id)
        if handoff is not None and self._handoffs.waits(handoff):
            return LookupResult.RETRY
        return LookupResult.MISS

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Marks chunks as used, so that CLOCK passes them by once."""
        del req_context
        self._store.touch(self._keys.of_shard(0, keys))

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begins to store chunks of the CPU tier; those that are there are not copied again."""
        keys = tuple(job_metadata.keys) if self._role.stores else ()
        chunk_ids = job_metadata.chunk_ids[: len(keys)].astype(np.int64)
        self._jobs[job_metadata.job_id] = job_metadata
        self._transfers.submit_save(
            job_metadata.job_id,
            0,
            self._keys.of_shard(0, keys),
            self._keys.name_space(0),
            chunk_ids,
            deadline_s=self._deadline_s,
        )

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begins to load chunks into the CPU tier."""
        handoff = self._waits.get(job_metadata.req_context.req_id)
        if handoff is not None:
            self._handoffs.found(handoff)
        self._jobs[job_metadata.job_id] = job_metadata
        self._transfers.submit_load(
            job_metadata.job_id,
            0,
            self._keys.of_shard(0, job_metadata.keys),
            0,
            job_metadata.chunk_ids.astype(np.int64),
            deadline_s=self._deadline_s,
        )

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that have ended since the last call."""
        results = []
        for done in self._transfers.poll():
            job = self._jobs.pop(done.job)
            keys = tuple(job.keys)
            statuses = done.statuses
            good = _LOADED if done.is_load else TAKEN
            fine = [key for key, status in zip(keys, statuses, strict=False) if status in good]
            self._count(done.is_load, statuses, done.bytes_moved, done.seconds)
            self._remember(keys, fine, is_load=done.is_load)
            results.append(
                JobResult(
                    job_id=done.job,
                    success=all(status in good for status in statuses),
                    successful_keys=fine,
                    transfer_time=done.seconds,
                    transfer_bytes=done.bytes_moved,
                )
            )
        return results

    def has_pending_work(self) -> bool:
        """Whether jobs are under way."""
        return bool(self._jobs)

    def drain_jobs(self) -> None:
        """Waits until no job touches the CPU tier any more."""
        jobs = list(self._jobs)
        # A copy ends by its deadline; what is queued behind it is let go after that.
        if not self._transfers.wait(jobs, self._deadline_s):
            self._transfers.cancel(jobs)
            if not self._transfers.wait(jobs, self._deadline_s):
                raise Unavailable("copies between the CPU tier and the region have not ended")

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What was counted since the last call."""
        self._counts.report()
        return self._stats.take()

    def shutdown(self) -> None:
        """Ends all jobs and unmaps the region."""
        self._transfers.close()
        self._counts.close()
        self._store.close()

    def _count(self, is_load: bool, statuses: bytes, bytes_moved: int, seconds: float) -> None:
        direction, counted, missed = (
            ("load", "region_blocks_loaded", "region_blocks_load_failed")
            if is_load
            else ("store", "region_blocks_stored", "region_blocks_not_stored")
        )
        self._stats.add("region_bytes", bytes_moved, direction)
        self._stats.observe(f"region_{direction}_seconds", seconds)
        for status in statuses:
            if status == BlockStatus.OK:
                self._stats.add(counted, 1)
            else:
                self._stats.add(missed, 1, reason_of(status))

    def _remember(self, keys: tuple[bytes, ...], fine: list[Any], *, is_load: bool) -> None:
        if not is_load:
            for key in fine:
                self._failed.pop(key, None)
            return
        for key in set(keys).difference(fine):
            self._failed[key] = None
            if len(self._failed) > _FAILED_KEYS_MAX:
                self._failed.popitem(last=False)
