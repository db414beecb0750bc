"""The scheduler's and the worker's half of a shared region, over a real one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from numpy.typing import NDArray
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LookupResult,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
)

from hymcache._core import RegionStatus
from hymcache.chm_device.region import Region, RegionFormat
from hymcache.connector.shared_region.attachment import Attachment
from hymcache.connector.shared_region.mapped_region import RegionStore, open_store
from hymcache.connector.shared_region.settings import read_settings
from hymcache.errors import ConfigError
from hymcache.lookup.region_directory import RegionDirectory
from tests.connector.region_engine import (
    BLOCK_BYTES,
    FACTS,
    Clock,
    HalfEngines,
    chunk_key,
    format_anew,
    gpu_blocks,
)

pytestmark = pytest.mark.vllm

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
# Of a region that holds some hundred blocks.
SMALL = 6 << 20
Make = Callable[..., HalfEngines]


@pytest.fixture
def region(tmp_path: Path) -> Path:
    return tmp_path / "region"


@pytest.fixture
def make(region: Path) -> Iterator[Make]:
    made: list[HalfEngines] = []

    def make_one(**options: Any) -> HalfEngines:
        made.append(HalfEngines(region, **options))
        return made[-1]

    yield make_one
    for engine in made:
        engine.close()


def store(engine: HalfEngines, numbers: list[int], seed: int = 0) -> NDArray[np.uint8]:
    blocks = list(range(len(numbers)))
    contents = engine.fill(0, blocks, seed)
    keys = [chunk_key(number) for number in numbers]
    context = engine.request(f"store-{seed}-{numbers}")
    engine.finish(engine.begin_store(keys, gpu_blocks(blocks), context))
    return contents


def remove(engine: HalfEngines, chunk: bytes) -> None:
    directory = engine.store.attachment.directory
    assert directory is not None
    assert directory.remove([engine.keys.of_chunk(chunk)]) == [RegionStatus.OK]


def test_what_one_engine_stores_another_one_loads(make: Make) -> None:
    first, second = make(), make()
    contents = store(first, [1, 2, 3])
    keys = [chunk_key(number) for number in (1, 2, 3, 4)]
    context = second.request("r")
    assert second.lookup(keys, context) == [HIT, HIT, HIT, MISS]
    result = second.finish(second.begin_load(keys[:3], gpu_blocks([7, 5, 9]), context))
    assert np.array_equal(second.memory[0, [7, 5, 9]], contents)
    assert result.transfer_size == 3 * BLOCK_BYTES
    assert first.counts() == {"blocks_stored": 3, "bytes|store": 3 * BLOCK_BYTES}
    assert second.counts() == {"blocks_loaded": 3, "bytes|load": 3 * BLOCK_BYTES}


def test_what_is_there_is_not_stored_again(make: Make) -> None:
    first, second = make(), make()
    store(first, [1, 2])
    keys = [chunk_key(number) for number in (1, 2, 3)]
    output = second.manager.prepare_store(keys, second.request("r"))
    assert output.keys_to_store == keys[2:]


def test_what_was_loaded_is_offered_again_in_case_it_failed(make: Make) -> None:
    engine = make()
    context = ReqContext("r")
    policy = engine.manager.on_new_request(context).policy
    assert policy is OffloadPolicy.REQUEST_LEVEL


def test_two_engines_that_store_the_same_at_once(make: Make) -> None:
    first, second = make(), make()
    keys = [chunk_key(number) for number in range(4)]
    first.fill(0, [0, 1, 2, 3], 1)
    second.memory[:] = first.memory
    # Neither has stored any when the other one is told to.
    orders = [
        (engine, engine.manager.prepare_store(keys, engine.request("r")).store_spec)
        for engine in (first, second)
    ]
    for engine, order in orders:
        assert engine.worker.submit_store(1, gpu_blocks([0, 1, 2, 3]), order)
    for engine, _ in orders:
        engine.finish(1)
    totals = [engine.counts() for engine in (first, second)]
    assert sum(t.get("blocks_stored", 0) for t in totals) == 4
    reasons = ("blocks_not_stored|stored_already", "blocks_not_stored|pending")
    assert sum(t.get(reason, 0) for t in totals for reason in reasons) == 4


def test_an_engine_of_another_model_is_refused(make: Make, region: Path) -> None:
    make()
    with pytest.raises(ConfigError) as raised:
        HalfEngines(region, facts={**FACTS, "model": "another"})
    assert "model=made-up" in str(raised.value)
    assert "model=another" in str(raised.value)


def test_chunks_of_several_blocks_are_stored_and_loaded_in_part(make: Make) -> None:
    engine = make(chunk_blocks=4)
    contents = engine.fill(0, list(range(8)), 1)
    keys = [chunk_key(1), chunk_key(2)]
    context = engine.request("r")
    engine.finish(engine.begin_store(keys, gpu_blocks(list(range(8))), context))
    assert engine.lookup(keys, context) == [HIT, HIT]
    # Three blocks of the first chunk are in the engine's own cache.
    engine.memory[:] = 0
    engine.finish(engine.begin_load(keys, gpu_blocks([9, 10, 11, 12, 13], first=3), context))
    assert np.array_equal(engine.memory[0, 9:14], contents[3:])
    assert engine.counts()["blocks_loaded"] == 5


def test_a_chunk_that_was_stored_in_part_is_no_hit(make: Make) -> None:
    engine = make(chunk_blocks=4)
    context = engine.request("r")
    # The first block of the chunk is gone, as with a sliding window.
    engine.finish(engine.begin_store([chunk_key(1)], gpu_blocks([1, 2, 3], first=1), context))
    assert engine.counts()["blocks_stored"] == 3
    assert engine.lookup([chunk_key(1)], context) == [MISS]


@pytest.mark.parametrize(
    ("blocks", "first"),
    [
        # The third block of the first chunk is gone.
        ([1, 2, 4, 5, 6, 7, 8], 0),
        # The first block of each chunk is gone: only the first of them is told by the index.
        ([2, 3, 4, 6, 7, 8], 1),
        # More blocks than the chunks have.
        (list(range(1, 10)), 0),
    ],
)
def test_blocks_that_vllm_left_out_of_chunks_put_none_under_a_wrong_key(
    make: Make, blocks: list[int], first: int
) -> None:
    engine = make(chunk_blocks=4)
    keys = [chunk_key(1), chunk_key(2)]
    context = engine.request("r")
    engine.finish(engine.begin_store(keys, gpu_blocks(blocks, first=first), context))
    assert engine.counts() == {"blocks_not_stored|misaligned": len(blocks)}
    # Another engine has all of them: what it loads is what it stored.
    other = make(chunk_blocks=4)
    contents = other.fill(0, list(range(8)), 1)
    context = other.request("r")
    other.finish(other.begin_store(keys, gpu_blocks(list(range(8))), context))
    other.memory[:] = 0
    other.finish(other.begin_load(keys, gpu_blocks(list(range(8))), context))
    assert np.array_equal(other.memory[0, :8], contents)


def test_a_load_that_does_not_fit_its_chunks_fails(make: Make) -> None:
    engine = make(chunk_blocks=4)
    context = engine.request("r")
    keys = [chunk_key(1), chunk_key(2)]
    engine.fill(0, list(range(8)), 1)
    engine.finish(engine.begin_store(keys, gpu_blocks(list(range(8))), context))
    # It may end within the last chunk, not before.
    engine.finish(engine.begin_load(keys, gpu_blocks([1, 2, 3, 4, 5]), context))
    assert engine.reports.take_bad_blocks() == set()
    engine.finish(engine.begin_load(keys, gpu_blocks([1, 2, 3, 4]), context))
    assert engine.reports.take_bad_blocks() == {1, 2, 3, 4}


def test_an_object_that_went_between_lookup_and_load(make: Make, region: Path) -> None:
    first, second = make(), make()
    contents = store(first, [1, 2])
    keys = [chunk_key(1), chunk_key(2)]
    context = second.request("r")
    assert second.lookup(keys, context) == [HIT, HIT]
    remove(first, keys[1])
    second.finish(second.begin_load(keys, gpu_blocks([3, 4]), context))
    assert np.array_equal(second.memory[0, 3], contents[0])
    assert second.reports.take_bad_blocks() == {4}
    assert second.counts()["blocks_load_failed|miss"] == 1
    assert second.lookup(keys, context) == [HIT, MISS]


def test_a_flipped_bit_is_told_and_the_object_dropped(make: Make, region: Path) -> None:
    first, second = make(), make()
    contents = store(first, [1])
    # As the region has them: the second layer comes first.
    flip(region, contents[0, BLOCK_BYTES // 2 :].tobytes())
    context = second.request("r")
    second.finish(second.begin_load([chunk_key(1)], gpu_blocks([3]), context))
    assert second.reports.take_bad_blocks() == {3}
    assert second.reports.take_bad_blocks() == set()
    assert second.counts()["blocks_load_failed|corrupt"] == 1
    assert second.lookup([chunk_key(1)], context) == [MISS]


def flip(region: Path, contents: bytes) -> None:
    raw = bytearray(region.read_bytes())
    place = raw.find(contents)
    assert place >= 0
    with region.open("r+b") as file:
        file.seek(place + 100)
        file.write(bytes([raw[place + 100] ^ 1]))


def test_with_several_groups_the_request_fails_and_not_its_blocks(make: Make) -> None:
    engine = make(groups=2)
    keys = [chunk_key(1), chunk_key(2), chunk_key(1, group=1)]
    blocks = GPULoadStoreSpec([1, 2, 5], group_sizes=[2, 1], block_indices=[0, 1])
    contents = engine.fill(0, [1, 2], 1), engine.fill(1, [5], 2)
    context = engine.request("r")
    engine.finish(engine.begin_store(keys, blocks, context))
    assert engine.lookup(keys, context) == [HIT, HIT, HIT]
    engine.memory[:] = 0
    engine.finish(engine.begin_load(keys, blocks, context))
    assert np.array_equal(engine.memory[0, [1, 2]], contents[0])
    assert np.array_equal(engine.memory[1, [5]], contents[1])
    assert engine.reports.take_failed_requests() == set()
    remove(engine, keys[2])
    engine.finish(engine.begin_load(keys, blocks, context))
    assert engine.reports.take_failed_requests() == {"r"}
    assert engine.reports.take_bad_blocks() == set()


def test_a_block_that_never_loads_becomes_a_miss(make: Make) -> None:
    engine = make(wrap=BrokenLoads)
    store(engine, [1])
    context = engine.request("r")
    for _ in range(3):
        assert engine.lookup([chunk_key(1)], context) == [HIT]
        engine.finish(engine.begin_load([chunk_key(1)], gpu_blocks([3]), context))
    assert engine.lookup([chunk_key(1)], context) == [MISS]
    assert engine.lookup([chunk_key(1)], engine.request("another")) == [HIT]
    assert engine.counts()["blocks_load_failed|device_error"] == 3


class BrokenLoads:
    """A region whose loads raise."""

    def __init__(self, store: RegionStore) -> None:
        self.store = store.store

    def load(self, keys: bytes, addresses: object, sizes: object) -> bytes:
        raise OSError("the device is gone")


class HeldStores:
    """A region whose stores wait until they may go on."""

    def __init__(self, store: RegionStore) -> None:
        self._store = store
        self.load = store.load
        self.may_go = threading.Event()

    def store(
        self,
        keys: bytes,
        addresses: NDArray[np.int64],
        sizes: NDArray[np.int64],
        name_space: int,
    ) -> bytes:
        assert self.may_go.wait(20)
        return self._store.store(keys, addresses, sizes, name_space)


def test_stores_are_over_before_their_blocks_are_used_again(make: Make) -> None:
    held: list[HeldStores] = []

    def wrap(store: RegionStore) -> HeldStores:
        held.append(HeldStores(store))
        return held[0]

    engine = make(wrap=wrap)
    keys = [chunk_key(1), chunk_key(2)]
    engine.fill(0, [1, 2], 1)
    first = engine.begin_store(keys[:1], gpu_blocks([1]), engine.request("a"))
    second = engine.begin_store(keys[1:], gpu_blocks([2]), engine.request("b"))
    timer = threading.Timer(1.5, held[0].may_go.set)
    timer.start()
    engine.worker.wait({first, second})
    timer.join()
    assert held[0].may_go.is_set()
    engine.memory[:] = 0
    assert {result.job_id for result in engine.worker.get_finished()} == {first, second}
    # The one that had begun was stored whole; the other one was given up, and says so.
    counts = engine.counts()
    assert counts["blocks_stored"] == 1
    assert counts["blocks_not_stored|cancelled"] == 1
    assert engine.lookup(keys, engine.request("r")) == [HIT, MISS]


def test_stores_that_wait_for_others_end_at_once_when_they_are_cancelled(make: Make) -> None:
    held: list[HeldStores] = []

    def wrap(store: RegionStore) -> HeldStores:
        held.append(HeldStores(store))
        return held[0]

    engine = make(wrap=wrap, deadline_s="2s")
    engine.fill(0, [1, 2], 1)
    first = engine.begin_store([chunk_key(1)], gpu_blocks([1]), engine.request("a"))
    second = engine.begin_store([chunk_key(2)], gpu_blocks([2]), engine.request("b"))
    # The thread is with the first one, and stays there.
    engine.worker.wait({second})
    assert not held[0].may_go.is_set()
    engine.finish(second)
    assert engine.counts() == {"blocks_not_stored|cancelled": 1}
    held[0].may_go.set()
    engine.finish(first)
    assert engine.counts()["blocks_stored"] == 1


def test_a_store_that_comes_too_late_is_skipped(make: Make) -> None:
    engine = make(deadline_s="1us")
    engine.finish(engine.begin_store([chunk_key(1)], gpu_blocks([1]), engine.request("a")))
    assert engine.counts() == {"blocks_not_stored|deadline": 1}


def test_a_region_that_is_formatted_anew_is_used_again(make: Make, region: Path) -> None:
    clock = Clock()
    engine = make(clock=clock)
    store(engine, [1])
    context = engine.request("r")
    assert engine.lookup([chunk_key(1)], context) == [HIT]
    clock.now += 2
    format_anew(region)
    # A load that was ordered before fails, as one of an object that was evicted does.
    engine.finish(engine.begin_load([chunk_key(1)], gpu_blocks([3]), context))
    assert engine.reports.take_bad_blocks() == {3}
    engine.manager.touch([OffloadKey(chunk_key(1))], context)
    assert engine.lookup([chunk_key(1)], context) == [MISS]
    contents = store(engine, [1], seed=2)
    assert engine.lookup([chunk_key(1)], context) == [HIT]
    engine.finish(engine.begin_load([chunk_key(1)], gpu_blocks([3]), context))
    assert np.array_equal(engine.memory[0, [3]], contents)


def test_who_leaves_a_region_that_is_gone_takes_nobodys_place(make: Make, region: Path) -> None:
    engine = make()
    format_anew(region)
    with RegionDirectory(Region.attach(region), name="new", maintain=False) as directory:
        engine.store.close()
        assert [(p["name"], p["state"]) for p in directory.core.participants()] == [
            ("new", "active")
        ]


def test_a_region_that_is_formatted_for_others_is_left_alone(make: Make, region: Path) -> None:
    clock = Clock()
    engine = make(clock=clock)
    store(engine, [1])
    clock.now += 2
    Region.open(region, RegionFormat(BLOCK_BYTES, {**FACTS, "model": "another"}), force=True)
    for _ in range(2):
        assert engine.lookup([chunk_key(1)], engine.request("r")) == [MISS]
        engine.finish(engine.begin_store([chunk_key(1)], gpu_blocks([1]), engine.request("s")))
        clock.now += 2
    assert engine.counts()["blocks_not_stored|unavailable"] == 2


def test_a_device_that_the_pod_does_not_have_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Path("/dev/hymcache-no-such-dax")
    monkeypatch.setenv("CXL_DAX_DEVICE", str(device))
    monkeypatch.setenv("CXL_DAX_SIZE", str(16 << 20))
    with pytest.raises(ConfigError, match="there is no such device") as raised:
        open_store(read_settings({}), FACTS, BLOCK_BYTES)
    assert str(device) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not device.exists()


def test_slots_smaller_than_a_block_are_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="slot_bytes = 4095 is less than a block") as raised:
        make(slot_bytes=BLOCK_BYTES - 1)
    assert str(BLOCK_BYTES) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (RegionStatus.PENDING, "pending"),
        (RegionStatus.LOST, "lost"),
        (RegionStatus.FULL, "device_full"),
        (RegionStatus.STORED_ALREADY, "stored_already"),
    ],
)
def test_each_reason_not_to_store_has_its_name(
    make: Make, monkeypatch: pytest.MonkeyPatch, status: RegionStatus, reason: str
) -> None:
    engine = make()

    def use(_self: Attachment, _call: object) -> bytes:
        return bytes([status])

    job_of = partial(engine.begin_store, [chunk_key(1)], gpu_blocks([1]), engine.request("a"))
    monkeypatch.setattr(engine.manager, "prepare_store", prepared(engine, chunk_key(1)))
    monkeypatch.setattr(Attachment, "use", use)
    engine.finish(job_of())
    assert engine.counts() == {f"blocks_not_stored|{reason}": 1}


def prepared(engine: HalfEngines, chunk: bytes) -> Callable[..., PrepareStoreOutput]:
    """A chunk that the scheduler orders to be stored, whatever the region says of it."""
    output = engine.manager.prepare_store([OffloadKey(chunk)], engine.request("prepared"))
    return lambda *_: output


def test_what_a_region_evicts_is_counted(make: Make) -> None:
    clock = Clock()
    # Room for a few blocks only.
    engine = make(clock=clock, size=SMALL)
    for first in range(0, 640, 16):
        numbers = list(range(first, first + 16))
        store(engine, numbers, seed=first)
    clock.now += 2
    engine.worker.get_finished()
    counts = engine.counts()
    evicted = counts.get("evicted|room", 0) + counts.get("evicted|watermark", 0)
    assert evicted > 0
    assert counts["blocks_stored"] == 640
    # Once, and not again.
    clock.now += 2
    engine.worker.get_finished()
    assert "evicted|room" not in engine.counts()


def test_the_scheduler_tells_how_full_the_region_is(make: Make) -> None:
    clock = Clock()
    engine = make(clock=clock)
    store(engine, [1, 2, 3])
    end = time.monotonic() + 20
    counts: dict[str, float] = {}
    while "slots|valid" not in counts:
        assert time.monotonic() < end
        clock.now += 2
        counts |= engine.counts()
    assert counts["slots|valid"] == 3
    assert counts["slots|writing"] == counts["slots|dying"] == 0
    assert counts["slots|free"] > 0


def test_after_a_change_of_weights_nothing_is_found(make: Make) -> None:
    first, second = make(), make()
    store(first, [1])
    first.manager.reset_cache()
    assert first.lookup([chunk_key(1)], first.request("r")) == [MISS]
    assert second.lookup([chunk_key(1)], second.request("r")) == [HIT]
    contents = store(first, [1], seed=5)
    context = first.request("s")
    assert first.lookup([chunk_key(1)], context) == [HIT]
    first.memory[:] = 0
    first.finish(first.begin_load([chunk_key(1)], gpu_blocks([4]), context))
    assert np.array_equal(first.memory[0, [4]], contents)


def test_a_consumer_waits_for_the_producer(make: Make) -> None:
    clock = Clock()
    producer = make(role="kv_producer")
    consumer = make(role="kv_consumer", handoff_timeout_s=2, clock=clock)
    context = consumer.request("r")
    assert consumer.lookup([chunk_key(1)], context) == [RETRY]
    clock.now += 1.5
    contents = store(producer, [1])
    assert consumer.lookup([chunk_key(1)], context) == [HIT]
    consumer.finish(consumer.begin_load([chunk_key(1)], gpu_blocks([2]), context))
    assert np.array_equal(consumer.memory[0, [2]], contents)
    assert consumer.counts()["handoffs|arrived"] == 1
    # A producer never loads, a consumer never stores.
    assert producer.lookup([chunk_key(1)], producer.request("p")) == [MISS]
    assert consumer.manager.prepare_store([chunk_key(9)], context).keys_to_store == []


def test_a_consumer_computes_what_never_comes(make: Make) -> None:
    clock = Clock()
    consumer = make(role="kv_consumer", handoff_timeout_s=2, clock=clock)
    context = consumer.request("r")
    assert consumer.lookup([chunk_key(1), chunk_key(2)], context) == [RETRY, RETRY]
    clock.now += 2.0
    assert consumer.lookup([chunk_key(1), chunk_key(2)], context) == [MISS, MISS]
    # The wait is over for good: it does not begin anew.
    assert consumer.lookup([chunk_key(1)], context) == [MISS]
    assert consumer.counts()["handoffs|timed_out"] == 1


@pytest.mark.parametrize(
    ("role", "params", "expected"),
    [
        ("kv_both", {}, MISS),
        ("kv_both", {"do_remote_prefill": True}, RETRY),
        ("kv_consumer", {"do_remote_prefill": False}, MISS),
        ("kv_producer", {"do_remote_prefill": True}, MISS),
    ],
)
def test_who_waits(make: Make, role: str, params: dict[str, Any], expected: LookupResult) -> None:
    engine = make(role=role)
    assert engine.lookup([chunk_key(1)], engine.request("r", **params)) == [expected]


def test_a_request_that_leaves_while_it_waits_is_counted(make: Make) -> None:
    engine = make(role="kv_consumer")
    context = engine.request("r")
    assert engine.lookup([chunk_key(1)], context) == [RETRY]
    engine.manager.on_request_finished(context)
    assert engine.counts()["handoffs|abandoned"] == 1
    assert engine.manager._requests == {}
