"""An engine's two halves over a real region, without an engine: a scheduler's and a worker's."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
    TransferResult,
    make_offload_key,
)

from hymcache.chm_device.region import Region, RegionFormat
from hymcache.connector.block_layout import GroupLayout, Run
from hymcache.connector.shared_region.directory import Directory
from hymcache.connector.shared_region.keys import RegionKeys
from hymcache.connector.shared_region.load_errors import WorkerReports
from hymcache.connector.shared_region.manager import SharedRegionManager
from hymcache.connector.shared_region.mapped_region import (
    RegionStore,
    attach_directory,
    open_store,
)
from hymcache.connector.shared_region.region_counts import RegionCounts
from hymcache.connector.shared_region.settings import read_settings
from hymcache.connector.shared_region.transfers import RegionCopies, RegionTransfers
from hymcache.connector.shared_region.worker import SharedRegionWorker

BLOCK_BYTES = 4096
BLOCKS = 16
FACTS = {"model": "made-up", "block_tokens": "32", "ranks": "1"}
SIZE = 16 << 20
_WAIT_S = 20.0


def chunk_key(number: int, group: int = 0) -> bytes:
    return bytes(make_offload_key(hashlib.sha256(b"%d" % number).digest(), group))


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class HalfEngines:
    """What of an engine touches a region; `memory[group][block]` are its blocks."""

    def __init__(
        self,
        region: Path,
        *,
        groups: int = 1,
        chunk_blocks: int = 1,
        facts: Mapping[str, str] = FACTS,
        wrap: Callable[[RegionStore], RegionCopies] = lambda store: store,
        clock: Callable[[], float] = time.monotonic,
        **extra: Any,
    ) -> None:
        self.settings = read_settings({"device": str(region), "size": SIZE} | extra)
        self.memory = np.zeros((groups, BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        self.store = open_store(self.settings, facts, BLOCK_BYTES)
        self.keys = RegionKeys(facts, shards=1, blocks_per_chunk=chunk_blocks)
        self.reports = WorkerReports()
        self.manager = SharedRegionManager(
            Directory(lambda: attach_directory(self.settings), lambda _: self.keys, clock=clock),
            self.settings,
            clock=clock,
        )
        half = BLOCK_BYTES // 2
        transfers = RegionTransfers(
            wrap(self.store),
            [
                GroupLayout(
                    group,
                    BLOCKS,
                    # Two layers, the second one first in memory.
                    (
                        Run(self.memory[group].ctypes.data + half, BLOCK_BYTES, half),
                        Run(self.memory[group].ctypes.data, BLOCK_BYTES, half),
                    ),
                    "",
                )
                for group in range(groups)
            ],
            load_threads=2,
            store_threads=1,
        )
        self.worker = SharedRegionWorker(
            transfers,
            self.keys,
            self.reports,
            RegionCounts(self.store.attachment, self.reports.stats, clock=clock),
            shard=0,
            group_ids=range(groups),
            chunk_blocks=chunk_blocks,
            deadline_s=self.settings.deadline_s,
            close=self.store.close,
        )
        self._jobs = 0

    def close(self) -> None:
        self.worker.shutdown()
        self.manager.shutdown()

    def request(self, req_id: str, **params: Any) -> ReqContext:
        context = ReqContext(req_id, kv_transfer_params=params or None)
        self.manager.on_new_request(context)
        return context

    def lookup(self, keys: list[bytes], context: ReqContext) -> list[LookupResult]:
        return [self.manager.lookup(key, context) for key in keys]

    def begin_store(self, keys: list[bytes], blocks: GPULoadStoreSpec, context: ReqContext) -> int:
        output = self.manager.prepare_store(keys, context)
        assert output.keys_to_store == keys
        self._jobs += 1
        assert self.worker.submit_store(self._jobs, blocks, output.store_spec)
        return self._jobs

    def begin_load(self, keys: list[bytes], blocks: GPULoadStoreSpec, context: ReqContext) -> int:
        spec = self.manager.prepare_load(keys, context)
        self._jobs += 1
        assert self.worker.submit_load(self._jobs, spec, blocks)
        return self._jobs

    def finish(self, job: int) -> TransferResult:
        end = time.monotonic() + _WAIT_S
        while True:
            finished = self.worker.get_finished()
            if finished:
                (result,) = finished
                assert result.job_id == job
                assert result.success
                return result
            assert time.monotonic() < end, "the job never ends"
            time.sleep(0.001)

    def fill(self, group: int, blocks: list[int], seed: int) -> NDArray[np.uint8]:
        """Random bytes in some blocks; a copy of them."""
        rng = np.random.default_rng(seed)
        self.memory[group, blocks] = rng.integers(0, 256, (len(blocks), BLOCK_BYTES), np.uint8)
        return self.memory[group, blocks].copy()

    def counts(self) -> dict[str, float]:
        """What both halves have counted since the last call."""
        counts: dict[str, float] = {}
        for stats in (self.reports.stats.take(), self.manager.get_stats()):
            for name, values in ({} if stats is None else stats.data["data"]).items():
                for labels, value in values.items():
                    if not isinstance(value, list):
                        short = name.removeprefix("vllm:hymcache_region_")
                        counts["|".join([short, *labels])] = value
        return counts


def format_anew(region: Path) -> None:
    """As an operator does it, under the engines: empty, and for the same facts."""
    old = Region.attach(region)
    form = RegionFormat(old.geometry["slot_bytes"], old.facts)
    Region.open(region, form, force=True)


def gpu_blocks(block_ids: list[int], first: int = 0) -> GPULoadStoreSpec:
    """Blocks of one group; `first` is the logical index of the first one."""
    return GPULoadStoreSpec(block_ids, group_sizes=[len(block_ids)], block_indices=[first])
