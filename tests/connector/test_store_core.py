"""What of an engine's memory RDMA gets to know, and what is told of it."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from hymcache.connector.block_layout import GroupLayout, Run
from hymcache.connector.shard_namespaces import Rank, Shards
from hymcache.connector.store_core import memory_ranges
from hymcache.connector.worker_side import WorkerSide
from tests.connector.memory_store import MemoryStore


def layout(num_blocks: int, *runs: Run) -> GroupLayout:
    return GroupLayout(0, num_blocks, runs, "id")


def test_one_tensor_is_one_range_however_its_runs_interleave() -> None:
    # Keys and values of each block side by side.
    runs = (Run(1000, 200, 100), Run(1100, 200, 100))
    assert memory_ranges([layout(10, *runs)]) == [(1000, 2000)]


def test_tensors_apart_are_ranges_apart() -> None:
    apart = [layout(4, Run(5000, 100, 100)), layout(4, Run(1000, 100, 100))]
    assert memory_ranges(apart) == [(1000, 400), (5000, 400)]


def test_layouts_that_share_memory_share_a_range() -> None:
    # Groups of a hybrid model lie in the same slots, with blocks of their own lengths.
    shared = [layout(4, Run(1000, 100, 100)), layout(4, Run(1000, 100, 60))]
    assert memory_ranges(shared) == [(1000, 400)]


def test_the_last_block_ends_with_its_run() -> None:
    assert memory_ranges([layout(3, Run(0, 100, 40))]) == [(0, 240)]
    assert memory_ranges([layout(0, Run(0, 100, 40))]) == []


def test_calls_that_went_over_tcp_are_counted_once() -> None:
    so_far = iter([0, 3, 3, 5])
    worker = WorkerSide(
        MemoryStore().transfers([]),
        Rank(0, 0),
        Shards(1, 1, 1),
        [],
        deadline_s=5.0,
        verbs_fallbacks=lambda: next(so_far),
    )
    taken = [worker.take_stats() for _ in range(4)]
    counts = [None if stats is None else stats.data["counts"] for stats in taken]
    assert counts == [None, {"verbs_fallbacks": 3}, None, {"verbs_fallbacks": 2}]
    worker.close()
