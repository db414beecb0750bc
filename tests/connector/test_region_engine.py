"""A shared region under real vLLM engines: one after another in this process, and two at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from hymcache.bench.engine_process import EngineOptions, EngineProcess
from hymcache.bench.region_reuse.tiers import region_transfer_config
from hymcache.bench.tiny_model import TINY, make_model
from hymcache.chm_device.region import Region
from hymcache.errors import ConfigError
from hymcache.lookup.region_directory import RegionDirectory
from tests.connector.real_engine import BLOCK_TOKENS, Counted, Engine, prompt
from tests.connector.reference_tokens import TOKENS, ReferenceTokens, second_turn
from tests.connector.region_engine import format_anew

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(180)]

BLOCKS = TOKENS // BLOCK_TOKENS
BLOCK_BYTES = BLOCK_TOKENS * TINY.kv_bytes_per_token
SIZE = 64 << 20
Start = Callable[..., Engine]


@pytest.fixture
def region(tmp_path: Path) -> Path:
    return tmp_path / "region"


@pytest.fixture
def start(model: Path, reference: ReferenceTokens) -> Iterator[Start]:
    """Starts an engine and ends the one before."""
    del reference  # The engine that makes it must be gone before these.
    engines: list[Engine] = []

    def start_engine(transfer: dict[str, Any] | None, **options: Any) -> Engine:
        while engines:
            engines.pop().close()
        engines.append(Engine(options.pop("model", model), transfer, **options))
        return engines[-1]

    yield start_engine
    for engine in engines:
        engine.close()


def test_what_one_engine_computed_another_one_loads(
    start: Start, region: Path, reference: ReferenceTokens
) -> None:
    config = region_transfer_config(region, SIZE)
    engine = start(config)
    assert engine.generate(prompt(TOKENS, 0)).tokens == reference(0)
    counts = engine.counts()
    assert counts["region_blocks_stored"] == BLOCKS
    assert counts["region_bytes|store"] == BLOCKS * BLOCK_BYTES
    # Without a prefix cache of its own, as in the paper.
    engine = start(config, enable_prefix_caching=False)
    counted = Counted(engine)
    generated = engine.generate(prompt(TOKENS, 0))
    assert generated.tokens == reference(0)
    assert generated.cached_tokens == TOKENS
    assert counted["region_blocks_loaded"] == BLOCKS
    assert counted["region_bytes|load"] == BLOCKS * BLOCK_BYTES
    assert engine.generate(second_turn(reference(0))).tokens == reference.second_turn
    # Requests that come together, some of them the same.
    seeds = (0, 1, 0, 2)
    for _ in range(2):
        assert engine.generate_all([prompt(TOKENS, seed) for seed in seeds]) == [
            reference(seed) for seed in seeds
        ]
        engine.drain()
    assert counted["region_blocks_load_failed|miss"] == 0


def test_flipped_bits_are_never_read(
    start: Start, region: Path, reference: ReferenceTokens
) -> None:
    engine = start(region_transfer_config(region, SIZE))
    engine.generate(prompt(TOKENS, 3))
    flip_every_object(region)
    engine.forget_local()
    counted = Counted(engine)
    assert engine.generate(prompt(TOKENS, 3)).tokens == reference(3)
    assert counted["region_blocks_load_failed|corrupt"] == BLOCKS
    # What was computed instead is stored again, and right.
    engine.forget_local()
    counted = Counted(engine)
    assert engine.generate(prompt(TOKENS, 3)).tokens == reference(3)
    assert counted["region_blocks_loaded"] == BLOCKS


@pytest.mark.parametrize("chunk_blocks", [2, 4])
def test_chunks_of_several_blocks(
    start: Start, region: Path, reference: ReferenceTokens, chunk_blocks: int
) -> None:
    engine = start(region_transfer_config(region, SIZE, blocks_per_chunk=chunk_blocks))
    assert engine.generate(prompt(TOKENS, 1)).tokens == reference(1)
    engine.forget_local()
    generated = engine.generate(prompt(TOKENS, 1))
    assert generated.tokens == reference(1)
    assert generated.cached_tokens == BLOCKS // chunk_blocks * chunk_blocks * BLOCK_TOKENS


def test_layers_with_a_sliding_window(start: Start, region: Path, hybrid_model: Path) -> None:
    expected = start(None, model=hybrid_model).generate(prompt(600, 0)).tokens
    engine = start(region_transfer_config(region, SIZE), model=hybrid_model)
    assert engine.generate(prompt(600, 0)).tokens == expected
    engine.forget_local()
    counted = Counted(engine)
    generated = engine.generate(prompt(600, 0))
    assert generated.tokens == expected
    assert generated.cached_tokens >= 512
    assert counted["region_blocks_loaded"] > 16
    # Blocks cannot be named where groups overlay each other: the whole request is taken back.
    flip_every_object(region)
    engine.forget_local()
    assert engine.generate(prompt(600, 0)).tokens == expected
    assert counted["region_blocks_load_failed|corrupt"] > 0


def test_chunks_of_layers_with_a_sliding_window(
    start: Start, region: Path, hybrid_model: Path
) -> None:
    """Chunks longer than the window; requests at once, in a cache with little room."""
    prompts = [prompt(600, seed) for seed in range(2)]
    expected = start(None, model=hybrid_model).generate_all(prompts)
    config = region_transfer_config(region, SIZE, blocks_per_chunk=8)
    engine = start(config, model=hybrid_model, num_gpu_blocks_override=56, max_model_len=1024)
    counted = Counted(engine)
    assert engine.generate_all(prompts) == expected
    engine.drain()
    assert counted["region_blocks_stored"] > 0
    # Another engine stores what is missing and loads what is there.
    engine = start(config, model=hybrid_model)
    assert engine.generate_all(prompts) == expected
    engine.forget_local()
    generated = engine.generate(prompts[0])
    assert generated.tokens == expected[0]
    assert generated.cached_tokens == 512


def test_a_region_that_is_formatted_anew_under_an_engine(
    start: Start, region: Path, reference: ReferenceTokens
) -> None:
    engine = start(region_transfer_config(region, SIZE))
    assert engine.generate(prompt(TOKENS, 8)).tokens == reference(8)
    engine.forget_local()
    # One that is lost within a second after it was attached is tried again when that is over.
    time.sleep(1.1)
    format_anew(region)
    generated = engine.generate(prompt(TOKENS, 8))
    assert generated.tokens == reference(8)
    assert generated.cached_tokens == 0
    # It goes on with the new one.
    engine.forget_local()
    generated = engine.generate(prompt(TOKENS, 8))
    assert generated.tokens == reference(8)
    assert generated.cached_tokens == TOKENS


def test_a_decode_engine_computes_what_a_prefill_engine_did_not_live_to_store(
    start: Start, region: Path, reference: ReferenceTokens
) -> None:
    def config(role: str) -> dict[str, Any]:
        extra = {"role": role, "handoff_timeout_s": "1s"}
        return region_transfer_config(region, SIZE, **extra) | {"kv_role": role}

    half = TOKENS // 2
    start(config("kv_producer")).generate(prompt(TOKENS, 9)[:half], 1)
    engine = start(config("kv_consumer"))
    counted = Counted(engine)
    began = time.monotonic()
    generated = engine.generate(prompt(TOKENS, 9))
    assert time.monotonic() - began >= 1
    assert generated.tokens == reference(9)
    assert generated.cached_tokens == half
    assert counted["region_handoffs|timed_out"] == 1


def test_tensor_parallel_workers_have_a_shard_each(
    start: Start, region: Path, reference: ReferenceTokens
) -> None:
    engine = start(
        region_transfer_config(region, SIZE),
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    )
    assert engine.generate(prompt(TOKENS, 6)).tokens == reference(6)
    engine.forget_local()
    counted = Counted(engine)
    generated = engine.generate(prompt(TOKENS, 6))
    assert generated.tokens == reference(6)
    assert generated.cached_tokens == TOKENS
    assert counted["region_blocks_loaded"] == 2 * BLOCKS


def test_it_is_one_of_several_connectors(
    start: Start, region: Path, reference: ReferenceTokens
) -> None:
    children = [region_transfer_config(region, SIZE)]
    engine = start(
        {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": children},
        }
    )
    assert engine.generate(prompt(TOKENS, 5)).tokens == reference(5)
    flip_every_object(region)
    engine.forget_local()
    assert engine.generate(prompt(TOKENS, 5)).tokens == reference(5)
    engine.forget_local()
    assert engine.generate(prompt(TOKENS, 5)).cached_tokens == TOKENS


def test_another_model_is_refused_with_both_named(
    start: Start, region: Path, tmp_path: Path
) -> None:
    start(region_transfer_config(region, SIZE))
    other = make_model(replace(TINY, name="other", intermediate=512), tmp_path)
    with pytest.raises(ConfigError) as caught:
        start(region_transfer_config(region, SIZE), model=other)
    assert "was formatted for" in str(caught.value)
    assert "model=tiny-" in str(caught.value)
    assert "model=other-" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"devic": "/x"}, "devic: unknown key; did you mean device?"),
        ({"role": "kv_consumer"}, "role is kv_consumer and kv_role is kv_both"),
        ({"size": "4KiB"}, "4096 bytes have no room for a slot"),
    ],
)
def test_a_wrong_configuration_stops_the_start_in_one_line(
    model: Path, region: Path, reference: ReferenceTokens, change: dict[str, Any], line: str
) -> None:
    del reference
    with pytest.raises(ConfigError) as caught:
        Engine(model, region_transfer_config(region, SIZE, **change))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_engines_that_hash_their_own_way_are_refused(
    model: Path, region: Path, reference: ReferenceTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    del reference
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match="without PYTHONHASHSEED every process hashes"):
        Engine(model, region_transfer_config(region, SIZE), prefix_caching_hash_algo="xxhash_cbor")


def flip_every_object(region: Path) -> None:
    """Flips a bit of each object that the region holds."""
    with RegionDirectory(Region.attach(region), name="test") as directory:
        geometry = directory.region.geometry
        slots = [entry["slot"] for entry in directory.core.entries(0, geometry["slots"])]
    assert slots
    with region.open("r+b") as file:
        for slot in slots:
            place = geometry["data_offset"] + slot * geometry["slot_bytes"] + 100
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1]))


@pytest.mark.timeout(300)
def test_a_prefill_engine_hands_off_to_a_decode_engine(
    model: Path, region: Path, tmp_path: Path, reference: ReferenceTokens
) -> None:
    """Both at once, in processes of their own; the decode engine is asked first."""

    def engine(role: str) -> EngineProcess:
        config = region_transfer_config(region, SIZE, role=role, handoff_timeout_s="20s")
        config["kv_role"] = role
        options = EngineOptions(
            name=role,
            model=model,
            kv_transfer_config=config,
            tokens_max=2048,
            kv_cache_bytes=64 << 20,
            threads=1,
        )
        return EngineProcess(options, tmp_path)

    with engine("kv_producer") as prefill, engine("kv_consumer") as decode:
        prefill.open()
        decode.open()
        prefill.wait_open()
        decode.wait_open()
        decode.begin_generate(prompt(TOKENS, 7))
        prefill.generate(prompt(TOKENS, 7), tokens_max=1)
        handed_off = decode.wait_generated()
        assert list(handed_off.tokens) == reference(7)
        assert handed_off.cached_tokens == TOKENS
        metrics = decode.metrics("hymcache_region")
        assert metrics["vllm:hymcache_region_blocks_loaded_total"] == BLOCKS
        assert "vllm:hymcache_region_blocks_stored_total" not in metrics
        assert "vllm:hymcache_region_blocks_loaded_total" not in prefill.metrics("hymcache_region")
