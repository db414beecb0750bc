"""The runs of a block, against vLLM's own views in each of its physical layouts."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

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

from hymcache.connector.block_layout import GroupLayout, block_runs, group_layout
from hymcache.connector.cache_groups import CacheGroup, GroupKind
from hymcache.errors import ConfigError

pytestmark = pytest.mark.vllm

BLOCKS, LAYERS, HEADS, TOKENS, HEAD_SIZE = 6, 3, 2, 4, 8
BLOCK_BYTES = LAYERS * HEADS * TOKENS * 2 * HEAD_SIZE * 2
GROUP = CacheGroup(0, GroupKind.FULL, TOKENS, 1)


@dataclass
class Cache:
    raw: torch.Tensor
    views: list[torch.Tensor]
    config: KVCacheConfig

    def layout(self, *facts: str) -> GroupLayout:
        return group_layout(GROUP, self.config, self.by_name(), facts)

    def by_name(self) -> dict[str, torch.Tensor]:
        return {f"layers.{i}": view for i, view in enumerate(self.views)}

    def block(self, layout: GroupLayout, b: int) -> bytes:
        return b"".join(ctypes.string_at(r.base + b * r.stride, r.size) for r in layout.runs)


def make_cache(
    order: KVCacheLayout, blocks: int = BLOCKS, kernel_block_size: int | None = None
) -> Cache:
    spec = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16
    )
    names = [f"layers.{i}" for i in range(LAYERS)]
    strides = compute_layout_strides(spec, blocks, LAYERS, order)
    size = blocks * BLOCK_BYTES
    placed = KVCacheTensor(size, names, layer_stride=strides[0], block_stride=strides[1])
    raw = torch.zeros(size, dtype=torch.int8)
    views = create_kv_cache_views(raw, spec, blocks, order, placed, kernel_block_size)
    config = KVCacheConfig(blocks, [placed], [KVCacheGroupSpec(names, spec)])
    return Cache(raw, views, config)


@pytest.mark.parametrize("order", list(KVCacheLayout), ids=lambda order: order.name)
def test_the_runs_of_a_block_are_exactly_its_bytes(order: KVCacheLayout) -> None:
    cache = make_cache(order)
    layout = cache.layout()
    assert layout.block_bytes == BLOCK_BYTES
    expected = {"LBHNC": 3, "LBNHC": 3, "LHBNC": 6, "BLHNC": 1, "BLNHC": 1, "BHLNC": 1}
    assert len(layout.runs) == expected[order.name]
    for b in range(BLOCKS):
        for view in cache.views:
            view[b] = b + 1
    for b in range(BLOCKS):
        value = torch.full((1,), b + 1, dtype=torch.bfloat16).view(torch.int8).numpy().tobytes()
        assert cache.block(layout, b) == value * (BLOCK_BYTES // 2)


@pytest.mark.parametrize("order", list(KVCacheLayout), ids=lambda order: order.name)
def test_the_layout_id_is_that_of_the_order_not_of_the_place(order: KVCacheLayout) -> None:
    layout_id = make_cache(order).layout("CPU_ATTN").layout_id
    assert make_cache(order).layout("CPU_ATTN").layout_id == layout_id
    assert make_cache(order, blocks=9).layout("CPU_ATTN").layout_id == layout_id
    assert make_cache(order).layout("FLASH_ATTN").layout_id != layout_id


def test_orders_have_one_layout_id_where_their_objects_are_the_same_bytes() -> None:
    objects: dict[str, bytes] = {}
    for order in KVCacheLayout:
        cache = make_cache(order)
        generator = torch.Generator().manual_seed(0)
        for view in cache.views:
            view.copy_(torch.rand(view.shape, generator=generator))
        layout = cache.layout()
        contents = cache.block(layout, 2)
        assert objects.setdefault(layout.layout_id, contents) == contents
    assert len(objects) == len(set(objects.values())) == 3


def test_small_kernel_blocks_are_seen_as_the_blocks_they_divide() -> None:
    cache = make_cache(KVCacheLayout.LBNHC, kernel_block_size=TOKENS // 2)
    assert cache.views[0].shape[0] == 2 * BLOCKS
    layout = cache.layout()
    assert layout.block_bytes == BLOCK_BYTES
    assert layout.num_blocks == BLOCKS
    assert len(layout.runs) == LAYERS


def test_a_layer_that_reads_anothers_cache_is_not_stored_twice() -> None:
    cache = make_cache(KVCacheLayout.LBHNC)
    plain = cache.layout()
    cache.config.kv_cache_groups[0].layer_names.append("layers.shared")
    caches = cache.by_name() | {"layers.shared": cache.views[0]}
    assert group_layout(GROUP, cache.config, caches, ()).runs == plain.runs


def test_layers_that_overlap_are_refused() -> None:
    cache = make_cache(KVCacheLayout.LBHNC)
    caches = cache.by_name()
    caches["layers.1"] = caches["layers.0"][:, 1:]
    with pytest.raises(ConfigError, match="overlap"):
        group_layout(GROUP, cache.config, caches, ())


def test_a_view_over_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="overlaps itself"):
        block_runs(torch.zeros(64).as_strided((4, 4, 4), (16, 2, 1)))


def test_a_group_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="no registered layers"):
        group_layout(GROUP, make_cache(KVCacheLayout.LBHNC).config, {}, ())
