"""A region below the CPU tier of vLLM's own TieringOffloadingManager."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from numpy.typing import NDArray
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from hymcache.chm_device.region import Region
from hymcache.errors import ConfigError
from hymcache.lookup.region_directory import RegionDirectory
from tests.connector.region_engine import chunk_key, format_anew

pytestmark = pytest.mark.vllm

CHUNK_BYTES = 8192
CHUNKS = 8
WAIT_S = 20.0
SLOTS = "vllm:hymcache_region_slots"
HIT, MISS = LookupResult.HIT, LookupResult.MISS


class TieredEngine:
    """The scheduler's side of an engine with a CPU tier and a region below it."""

    def __init__(self, region: Path, engine_id: str, model: str = "made-up", **extra: Any) -> None:
        tier = {
            "type": "SharedRegionTier",
            "module_path": "hymcache.connector.shared_region",
            "device": str(region),
            "size": 16 << 20,
            **extra,
        }
        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(32, ("layer.0", "layer.1"), 0),),
            worker_kv_bytes_per_block=CHUNK_BYTES,
            enable_kv_cache_events=False,
            extra_config={"cpu_bytes_to_use": CHUNKS * CHUNK_BYTES, "secondary_tiers": [tier]},
            engine_id=engine_id,
            model=OffloadingModelConfig(model, "float32"),
            cache=OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=1),
            parallel=OffloadingParallelConfig(
                rank=0,
                world_size=1,
                tp_size=1,
                pp_size=1,
                pcp_size=1,
                dcp_size=1,
                data_parallel_index=0,
                data_parallel_size=1,
                data_parallel_rank_local=None,
                is_parallelism_agnostic=False,
            ),
        )
        self.manager = TieringOffloadingSpec(config).get_manager()
        self.memory = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)

    def request(self, req_id: str, **params: Any) -> ReqContext:
        context = ReqContext(req_id, kv_transfer_params=params or None)
        self.manager.on_new_request(context)
        return context

    def store(self, numbers: list[int], context: ReqContext, seed: int) -> NDArray[np.uint8]:
        """Stores chunks as a worker would, and waits until the region has them."""
        keys = [OffloadKey(chunk_key(number)) for number in numbers]
        output = self.manager.prepare_store(keys, context)
        assert output is not None
        places = output.store_spec.block_ids
        rng = np.random.default_rng(seed)
        self.memory[places] = rng.integers(0, 256, (len(places), CHUNK_BYTES), np.uint8)
        contents: NDArray[np.uint8] = self.memory[places].copy()
        self.manager.complete_store(keys, context)
        self.step_until(lambda: not self.manager.has_pending_work())
        return contents

    def lookup(self, number: int, context: ReqContext) -> LookupResult:
        """The answer to a lookup once it is one."""
        found: list[LookupResult] = []

        def answered() -> bool:
            found.append(self.manager.lookup(OffloadKey(chunk_key(number)), context))
            return found[-1] in {HIT, MISS}

        self.step_until(answered)
        return found[-1]

    def load(self, number: int, context: ReqContext) -> NDArray[np.uint8]:
        keys = [OffloadKey(chunk_key(number))]
        spec = self.manager.prepare_load(keys, context)
        contents: NDArray[np.uint8] = self.memory[spec.block_ids].copy()
        self.manager.complete_load(keys, context)
        return contents

    def step_until(self, condition: Any) -> None:
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, "it never comes"
            self.manager.on_schedule_end(ScheduleEndContext((), ()))
            time.sleep(0.001)

    def close(self) -> None:
        del self.memory
        self.manager.shutdown()


@pytest.fixture
def region(tmp_path: Path) -> Path:
    return tmp_path / "region"


@pytest.fixture
def pair(region: Path) -> Iterator[tuple[TieredEngine, TieredEngine]]:
    with contextlib.ExitStack() as stack:
        engines = []
        for name in ("first", "second"):
            engines.append(TieredEngine(region, f"hymcache-test-{region.parent.name}-{name}"))
            stack.callback(engines[-1].close)
        yield engines[0], engines[1]


def test_what_one_engine_stored_another_one_promotes(
    pair: tuple[TieredEngine, TieredEngine],
) -> None:
    first, second = pair
    contents = first.store([1, 2, 3], first.request("a"), seed=1)
    context = second.request("b")
    assert [second.lookup(number, context) for number in (1, 2, 3, 4)] == [HIT, HIT, HIT, MISS]
    for index, number in enumerate((1, 2, 3)):
        assert np.array_equal(second.load(number, context)[0], contents[index])


def test_a_load_that_fails_is_a_miss_until_it_is_stored_again(
    pair: tuple[TieredEngine, TieredEngine], region: Path
) -> None:
    first, second = pair
    contents = first.store([1], first.request("a"), seed=1)
    with RegionDirectory(Region.attach(region), name="test") as directory:
        geometry = directory.region.geometry
        (entry,) = directory.core.entries(0, geometry["slots"])
    with region.open("r+b") as file:
        file.seek(geometry["data_offset"] + entry["slot"] * geometry["slot_bytes"] + 9)
        file.write(bytes([contents[0, 9] ^ 1]))
    context = second.request("b")
    assert second.lookup(1, context) is MISS
    right = second.store([1], context, seed=2)
    assert np.array_equal(second.load(1, context), right)
    third = first.request("c")
    # Its own CPU tier still has what it stored.
    assert first.lookup(1, third) is HIT


def test_a_consumer_waits_for_what_is_on_its_way(
    region: Path, pair: tuple[TieredEngine, TieredEngine]
) -> None:
    first, second = pair
    context = second.request("b", do_remote_prefill=True)
    assert second.manager.lookup(OffloadKey(chunk_key(1)), context) is LookupResult.RETRY
    contents = first.store([1], first.request("a"), seed=1)
    assert second.lookup(1, context) is HIT
    assert np.array_equal(second.load(1, context), contents)
    # What nobody stores is computed after the timeout (2 s).
    assert second.lookup(2, second.request("c", do_remote_prefill=True)) is MISS


def test_a_region_that_is_formatted_anew_is_used_again(
    pair: tuple[TieredEngine, TieredEngine], region: Path
) -> None:
    first, second = pair
    first.store([1], first.request("a"), seed=1)
    assert second.lookup(1, second.request("b")) is HIT
    first.store([2], first.request("c"), seed=2)
    # Longer than a lost region is left alone after it was attached.
    time.sleep(1.1)
    format_anew(region)
    context = second.request("d")
    assert second.lookup(2, context) is MISS
    second.manager.touch([OffloadKey(chunk_key(2))], context)
    contents = first.store([3], first.request("e"), seed=3)
    assert second.lookup(3, context) is HIT
    assert np.array_equal(second.load(3, context), contents)


def test_a_tier_tells_how_full_the_region_is(pair: tuple[TieredEngine, TieredEngine]) -> None:
    first, _ = pair
    first.store([1, 2], first.request("a"), seed=1)
    gauges: dict[tuple[str, ...], int] = {}

    def told() -> bool:
        stats = first.manager.get_stats()
        gauges.update({} if stats is None else stats.data["data"].get(SLOTS, {}))
        return bool(gauges)

    first.step_until(told)
    assert gauges["valid",] == 2


def test_another_model_is_refused(region: Path, pair: tuple[TieredEngine, TieredEngine]) -> None:
    del pair
    with pytest.raises(ConfigError, match="model=another@main"):
        TieredEngine(region, f"hymcache-test-{region.parent.name}-third", model="another")


def test_settings_are_checked(region: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean prefault"):
        TieredEngine(region, f"hymcache-test-{region.parent.name}-fourth", prefalt=True)
