"""The KV cache groups of a model that a hash-addressed store can hold.

vLLM divides the layers of a model into groups, each with a block table of its own. Every group
that takes part in prefix caching must come back for a prefix to count as computed, so a model
with one group of a kind that is not known here gets no remote hits at all, and says so once.

| kind | what must be there for a hit of n tokens |
|---|---|
| full | all blocks up to n |
| sliding | the blocks that hold the last `window_tokens` tokens before n |
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpecKind,
    RSWASpec,
    SlidingWindowSpec,
    get_kv_cache_spec_kind,
    iter_layer_specs,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


class GroupKind(Enum):
    """What a token's attention reads."""

    FULL = "full"
    SLIDING = "sliding"


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One KV cache group.

    `group_id` is its index in vLLM's block tables; `block_tokens` the tokens of a block, those of
    all ranks of a context-parallel group together; `hashes_per_block` how many of the request's
    block hashes make one block.
    """

    group_id: int
    kind: GroupKind
    block_tokens: int
    hashes_per_block: int
    window_tokens: int = 0

    def first_needed_block(self, prefix_tokens: int) -> int:
        """The first block that must be present for a hit of `prefix_tokens`."""
        if self.kind is GroupKind.FULL:
            return 0
        return max(0, prefix_tokens - self.window_tokens) // self.block_tokens


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """The groups to store; `unsupported` says why there are none.

    `align_tokens` is what the length of a hit must be a multiple of.
    """

    groups: tuple[CacheGroup, ...]
    align_tokens: int
    unsupported: str = ""

    @property
    def has_sliding(self) -> bool:
        """Whether some group keeps a window only."""
        return any(group.kind is GroupKind.SLIDING for group in self.groups)


def cache_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> CacheGroups:
    """The groups of a model, or the reason why it cannot be served."""
    align_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    parallel = vllm_config.parallel_config
    reason = ""
    if parallel.prefill_context_parallel_size > 1:
        reason = "prefill context parallelism is not supported"
    elif kv_cache_config.hisparse_host_num_blocks is not None:
        reason = "HiSparse caches are not supported"
    elif not kv_cache_config.prefix_cacheable_group_ids:
        reason = "the model has no KV cache that could be kept"
    groups = []
    for group_id in kv_cache_config.prefix_cacheable_group_ids:
        spec = kv_cache_config.kv_cache_groups[group_id].kv_cache_spec
        block_tokens = resolve_dcp_kv_block_size(spec, parallel.decode_context_parallel_size)
        kind = _kind(spec)
        if kind is None:
            reason = reason or (
                f"KV cache group {group_id} is of kind "
                f"{get_kv_cache_spec_kind(spec).value} ({type(spec).__name__})"
            )
        elif block_tokens % hash_tokens:
            reason = reason or (
                f"KV cache group {group_id} has blocks of {block_tokens} tokens, "
                f"which hashes of {hash_tokens} tokens do not divide"
            )
        else:
            groups.append(
                CacheGroup(
                    group_id,
                    kind,
                    block_tokens,
                    block_tokens // hash_tokens,
                    _window_tokens(spec) if kind is GroupKind.SLIDING else 0,
                )
            )
    return (
        CacheGroups((), align_tokens, reason)
        if reason
        else CacheGroups(tuple(groups), align_tokens)
    )


def _kind(spec: KVCacheSpec) -> GroupKind | None:
    specs = tuple(iter_layer_specs(spec))
    if all(isinstance(one, FullAttentionSpec) and not isinstance(one, RSWASpec) for one in specs):
        return GroupKind.FULL
    # Not the subclass for MLA: what it replays after a hit is not kept in blocks.
    if all(type(one) is SlidingWindowSpec for one in specs) and (
        get_kv_cache_spec_kind(spec) is KVCacheSpecKind.SLIDING_WINDOW
    ):
        return GroupKind.SLIDING
    return None


def _window_tokens(spec: KVCacheSpec) -> int:
    # The token after the hit reads window - 1 tokens before itself, and vLLM keeps a few more
    # where a drafter lags behind. At least one: a hit without a block would be none.
    reach = (one.sliding_window - 1 + one.extra_retained_tokens for one in iter_layer_specs(spec))
    return int(max(1, *reach))
