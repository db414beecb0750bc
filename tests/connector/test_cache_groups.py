"""Which KV cache groups can be kept, and what of them a hit needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    UniformTypeKVCacheSpecs,
)

from hymcache.connector import vllm as connector_module
from hymcache.connector.cache_groups import CacheGroup, CacheGroups, GroupKind, cache_groups
from hymcache.connector.load_order import make_load
from hymcache.connector.prefix_lookup import GroupPlan, Hit
from hymcache.errors import ConfigError
from tests.connector.memory_store import MemoryStore
from tests.connector.simulated_engine import (
    BLOCK_TOKENS,
    HEAD_SIZE,
    HEADS,
    SimulatedEngine,
    full_spec,
    make_model,
    sliding_spec,
)

pytestmark = pytest.mark.vllm

SHAPE: dict[str, Any] = {
    "block_size": BLOCK_TOKENS,
    "num_kv_heads": HEADS,
    "head_size": HEAD_SIZE,
    "dtype": torch.bfloat16,
}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedEngine:
    return SimulatedEngine(make_model(tmp_path), MemoryStore(), monkeypatch)


def groups_of(engine: SimulatedEngine, *specs: KVCacheSpec) -> CacheGroups:
    template = engine.kv_cache_config.kv_cache_groups[0]
    groups = [replace(template, kv_cache_spec=spec) for spec in specs]
    return cache_groups(engine.vllm_config, replace(engine.kv_cache_config, kv_cache_groups=groups))


def test_full_attention_and_windows_are_kept(engine: SimulatedEngine) -> None:
    found = groups_of(engine, full_spec(), sliding_spec(10))
    assert found.groups == (
        CacheGroup(0, GroupKind.FULL, BLOCK_TOKENS, 1),
        CacheGroup(1, GroupKind.SLIDING, BLOCK_TOKENS, 1, window_tokens=9),
    )
    assert found.has_sliding
    assert found.align_tokens == BLOCK_TOKENS
    assert not found.unsupported


def test_mla_and_mixed_pages_are_full_attention(engine: SimulatedEngine) -> None:
    mla = MLAAttentionSpec(**SHAPE | {"num_kv_heads": 1})
    mixed = UniformTypeKVCacheSpecs(BLOCK_TOKENS, {"a": full_spec(), "b": mla})
    for spec in (mla, mixed):
        (group,) = groups_of(engine, spec).groups
        assert group.kind is GroupKind.FULL


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        (MambaSpec(block_size=BLOCK_TOKENS, shapes=((2, 2),), dtypes=(torch.float32,)), "mamba"),
        (ChunkedLocalAttentionSpec(attention_chunk_size=8, **SHAPE), "chunked_local_attention"),
        (RSWASpec(rswa_window=8, **SHAPE), "RSWASpec"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_kept_is_named(
    engine: SimulatedEngine, spec: KVCacheSpec, word: str
) -> None:
    found = groups_of(engine, full_spec(), spec)
    assert not found.groups
    assert word in found.unsupported


def test_a_window_needs_its_last_blocks() -> None:
    window = CacheGroup(0, GroupKind.SLIDING, 4, 1, window_tokens=9)
    assert [window.first_needed_block(tokens) for tokens in (4, 8, 12, 16, 40)] == [
        *(0, 0, 0, 1, 7),
    ]
    assert CacheGroup(0, GroupKind.FULL, 4, 1).first_needed_block(40) == 0


def test_a_load_goes_into_the_blocks_that_were_allocated() -> None:
    full = CacheGroup(0, GroupKind.FULL, 4, 1)
    window = CacheGroup(2, GroupKind.SLIDING, 8, 2, window_tokens=9)
    groups = CacheGroups((full, window), 8)
    hit = Hit(40, (GroupPlan(0, 2, (b"f",)), GroupPlan(1, 3, (b"w",))), 8, 8, "")
    tables = [list(range(10, 20)), [], [0, 0, 0, 31, 32]]
    whole, last = make_load(groups, hit, tables, 16, 40)
    assert whole == (0, (b"f",), 2, [14, 15, 16, 17, 18, 19])
    assert last == (1, (b"w",), 0, [31, 32])
    # A plan that begins too late can load nothing.
    late = hit._replace(plans=(GroupPlan(0, 6, (b"f",)),))
    (part,) = make_load(groups, late, tables, 16, 40)
    assert part.plans == (b"",)


def test_memory_that_cannot_be_laid_out_turns_the_connector_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ConfigError("layers overlap")

    monkeypatch.setattr(connector_module, "group_layout", refuse)
    engine = SimulatedEngine(make_model(tmp_path), MemoryStore(), monkeypatch)
    tokens = list(range(40))
    (result,) = engine.run(engine.add(tokens))
    assert result.tokens == engine.expected(tokens, 4)
    assert engine.scheduler.connector._scheduler._unsupported == "layers overlap"
    engine.step()
    assert not engine.scheduler.has_requests()
    assert not engine.counts
