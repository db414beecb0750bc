"""The path to a GPU's memory, on tensors of the CPU with the GPU's layouts."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from hymcache._core import BlockStatus
from hymcache.connector.block_layout import GroupLayout, group_layout
from hymcache.connector.cache_groups import CacheGroup, GroupKind
from hymcache.connector.ports import TransferResult
from hymcache.connector.staged_transfers import StagedTransfers
from hymcache.connector.staging_buffer import BlockCopies
from hymcache.errors import ConfigError
from tests.connector.memory_store import MemoryStore, read_block

pytestmark = pytest.mark.vllm

BLOCKS, LAYERS, HEADS, TOKENS, HEAD_SIZE = 24, 3, 2, 4, 8
SLOT_BYTES = 4096
OK = BlockStatus.OK
WAIT_S = 20.0


class TensorDevice:
    """Copies with memmove, some time after it was asked to."""

    def __init__(self) -> None:
        self.held = threading.Event()
        self.held.set()
        self.fences = 0
        self.fences_used: list[int] = []
        self.broken = False
        self.pinned: set[int] = set()

    def pin(self, buffer: torch.Tensor) -> None:
        self.pinned.add(buffer.data_ptr())

    def unpin(self, buffer: torch.Tensor) -> None:
        self.pinned.remove(buffer.data_ptr())

    def enter_thread(self) -> None:
        self.thread = threading.current_thread()

    def fence(self) -> int:
        assert threading.current_thread() is threading.main_thread()
        self.fences += 1
        return self.fences

    def copy(self, copies: BlockCopies, fence: int, *, to_device: bool) -> list[Any]:
        assert threading.current_thread() is self.thread
        if self.broken:
            raise RuntimeError("an illegal memory access was encountered")
        self.fences_used.append(fence)
        return [copies, False]

    def done(self, event: list[Any]) -> bool:
        if not self.held.is_set():
            return False
        copies, copied = event
        if not copied:
            for source, target, size in zip(*copies, strict=True):
                ctypes.memmove(int(target), int(source), int(size))
            event[1] = True
            return False
        return True

    def close(self) -> None:
        pass


class Engine:
    """A device's KV cache in one of vLLM's layouts, with staging before it."""

    def __init__(self, store: MemoryStore, layout: KVCacheLayout, slots: int) -> None:
        spec = FullAttentionSpec(
            block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16
        )
        names = [f"layers.{i}" for i in range(LAYERS)]
        strides = compute_layout_strides(spec, BLOCKS, LAYERS, layout)
        size = BLOCKS * LAYERS * spec.page_size_bytes
        placed = KVCacheTensor(size, names, layer_stride=strides[0], block_stride=strides[1])
        self.memory = torch.randint(0, 256, (size,), dtype=torch.uint8)
        self.raw = self.memory.view(torch.int8)
        views = create_kv_cache_views(self.raw, spec, BLOCKS, layout, placed)
        config = KVCacheConfig(BLOCKS, [placed], [KVCacheGroupSpec(names, spec)])
        self.layout: GroupLayout = group_layout(
            CacheGroup(0, GroupKind.FULL, TOKENS, 1),
            config,
            dict(zip(names, views, strict=True)),
            (),
        )
        self.device = TensorDevice()
        self.now = 0.0
        self.transfers = StagedTransfers(
            store.transfers,
            [self.layout],
            self.device,
            staging_bytes=slots * SLOT_BYTES,
            clock=lambda: self.now,
        )
        self.results: dict[int, TransferResult] = {}

    def save(self, job: int, keys: bytes, block_ids: list[int]) -> None:
        ids = np.asarray(block_ids, dtype=np.int64)
        self.transfers.submit_save(job, 0, keys, 1, ids, deadline_s=10.0)

    def load(self, job: int, plan: bytes, block_ids: list[int], first: int = 0) -> None:
        ids = np.asarray(block_ids, dtype=np.int64)
        self.transfers.submit_load(job, 0, plan, first, ids, deadline_s=10.0)

    def result(self, job: int) -> TransferResult:
        assert self.transfers.wait([job], WAIT_S), "the job does not end"
        self.results |= {result.job: result for result in self.transfers.poll()}
        return self.results.pop(job)

    def block(self, block_id: int) -> bytes:
        return read_block(self.layout, block_id)


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def start_engine(
        store: MemoryStore, layout: KVCacheLayout = KVCacheLayout.LBHNC, slots: int = 8
    ) -> Engine:
        engines.append(Engine(store, layout, slots))
        return engines[-1]

    yield start_engine
    for engine in engines:
        engine.device.held.set()
        engine.transfers.close()
        assert not engine.device.pinned


def keys_of(count: int) -> bytes:
    return b"".join(bytes([i]) * 16 for i in range(count))


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_blocks_come_back_as_they_were(start: Callable[..., Engine], layout: KVCacheLayout) -> None:
    store = MemoryStore()
    engine = start(store, layout)
    blocks = [engine.block(b) for b in (3, 1, 7)]
    engine.save(1, keys_of(3), [3, 1, 7])
    assert engine.result(1).statuses == bytes([OK] * 3)
    before = [engine.block(b) for b in range(BLOCKS)]
    engine.load(2, keys_of(3), [20, 9], first=1)
    result = engine.result(2)
    assert result.statuses == bytes([OK] * 2)
    assert result.is_load
    assert result.bytes_moved == 2 * engine.layout.block_bytes
    assert result.transport == "shm"
    before[20], before[9] = blocks[1], blocks[2]
    assert [engine.block(b) for b in range(BLOCKS)] == before


def test_a_load_larger_than_the_staging_goes_through_it_in_parts(
    start: Callable[..., Engine],
) -> None:
    store = MemoryStore()
    engine = start(store, slots=3)
    for i in range(12):
        engine.save(i, keys_of(12)[16 * i : 16 * (i + 1)], [i])
        assert engine.result(i).statuses == bytes([OK])
    engine.load(20, keys_of(12), list(range(12, 24)))
    assert engine.result(20).statuses == bytes([OK] * 12)
    assert [engine.block(b) for b in range(12, 24)] == [engine.block(b) for b in range(12)]


def test_a_load_keeps_to_the_blocks_that_were_there(start: Callable[..., Engine]) -> None:
    store = MemoryStore()
    engine = start(store)
    engine.save(1, keys_of(3), [0, 1, 2])
    engine.result(1)
    del store.objects[keys_of(3)[16:32]]
    untouched = engine.block(11)
    engine.load(2, keys_of(3), [10, 11, 12])
    assert engine.result(2).statuses == bytes([OK, BlockStatus.MISS, OK])
    assert engine.block(10) == engine.block(0)
    assert engine.block(11) == untouched
    assert engine.block(12) == engine.block(2)


def test_each_job_waits_for_the_fence_of_its_submission(start: Callable[..., Engine]) -> None:
    engine = start(MemoryStore())
    engine.save(1, keys_of(2), [0, 1])
    engine.result(1)
    engine.load(2, keys_of(2), [5, 6])
    engine.result(2)
    assert engine.device.fences_used == [1, 2]


def test_saves_have_half_of_the_slots_and_skip_what_finds_none(
    start: Callable[..., Engine],
) -> None:
    store = MemoryStore()
    engine = start(store, slots=8)
    engine.device.held.clear()
    engine.save(1, keys_of(6), list(range(6)))
    engine.save(2, keys_of(8)[6 * 16 :], [6, 7])
    full = BlockStatus.SKIP_BUFFER_FULL
    # Nothing had to wait for the slots that will come free.
    assert engine.result(2).statuses == bytes([full, full])
    engine.device.held.set()
    assert engine.result(1).statuses == bytes([OK] * 4 + [full] * 2)
    assert len(store.objects) == 4
    engine.save(3, keys_of(8)[6 * 16 :], [6, 7])
    assert engine.result(3).statuses == bytes([OK, OK])


def test_a_load_waits_for_slots_up_to_its_deadline(start: Callable[..., Engine]) -> None:
    store = MemoryStore()
    engine = start(store, slots=2)
    for i in range(4):
        engine.save(i, keys_of(4)[16 * i : 16 * (i + 1)], [i])
        engine.result(i)
    engine.device.held.clear()
    engine.load(10, keys_of(4), [10, 11, 12, 13])
    engine.load(11, keys_of(4), [14])
    wait_until(lambda: engine.transfers._copying != [])
    engine.now = 11.0
    late = BlockStatus.DEADLINE
    assert engine.result(11).statuses == bytes([late])
    assert not engine.transfers.wait([10], 0.0)
    engine.device.held.set()
    statuses = engine.result(10).statuses
    assert statuses[0] == OK
    assert statuses[-1] == late


def test_a_cancelled_load_ends_and_leaves_its_blocks_alone(start: Callable[..., Engine]) -> None:
    store = MemoryStore()
    engine = start(store, slots=2)
    for i in range(4):
        engine.save(i, keys_of(4)[16 * i : 16 * (i + 1)], [i])
        engine.result(i)
    engine.device.held.clear()
    engine.load(10, keys_of(4), [10, 11, 12, 13])
    wait_until(lambda: engine.transfers._copying != [])
    engine.transfers.cancel([10])
    engine.device.held.set()
    last = engine.block(13)
    assert engine.result(10).statuses[-1] == BlockStatus.CANCELLED
    assert engine.block(13) == last


def test_a_cancelled_save_is_not_stored(start: Callable[..., Engine]) -> None:
    store = MemoryStore()
    engine = start(store)
    engine.device.held.clear()
    engine.save(1, keys_of(2), [0, 1])
    wait_until(lambda: engine.transfers._copying != [])
    engine.transfers.cancel([1])
    engine.device.held.set()
    assert engine.result(1).statuses == bytes([BlockStatus.CANCELLED] * 2)
    assert not store.objects


def test_after_an_error_of_the_device_jobs_fail_at_once(start: Callable[..., Engine]) -> None:
    store = MemoryStore()
    engine = start(store)
    engine.save(1, keys_of(2), [0, 1])
    engine.result(1)
    engine.device.broken = True
    engine.load(2, keys_of(2), [5, 6])
    assert engine.result(2).statuses == bytes([BlockStatus.DEVICE_ERROR] * 2)
    engine.save(3, keys_of(3), [0, 1, 2])
    assert engine.result(3).statuses == bytes([BlockStatus.DEVICE_ERROR] * 3)


def test_staging_for_less_than_two_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"staging_bytes = 4096 is too small .* set it to 8192"):
        Engine(MemoryStore(), KVCacheLayout.LBHNC, slots=1)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it never comes"
        time.sleep(0.001)
