"""Where an engine's blocks lie, as OffloadingConnector hands its KV caches to a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hymcache.connector.block_layout import GroupLayout, Run
from hymcache.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches


def group_layouts(kv_caches: CanonicalKVCaches) -> list[GroupLayout]:
    """The layout of each group: the pages of its layers one after the other, in their order.

    Layers that share a page are one. Raises ConfigError for a group without layers.
    """
    layouts = []
    for index, refs in enumerate(kv_caches.group_data_refs):
        runs: dict[tuple[int, int], Run] = {}
        num_blocks = 0
        for ref in refs:
            tensor = kv_caches.tensors[ref.tensor_idx].tensor
            num_blocks = tensor.shape[0]
            run = Run(
                tensor.data_ptr(), tensor.stride(0) * tensor.element_size(), ref.page_size_bytes
            )
            runs.setdefault((run.base, run.stride), run)
        if not runs:
            raise ConfigError(f"KV cache group {index} has no layers to offload")
        layouts.append(GroupLayout(index, num_blocks, tuple(runs.values()), ""))
    return layouts
