"""The namespaces of an engine: one for each shard of its KV and each KV cache group.

A shard is what one rank holds: a pipeline stage's layers, a tensor-parallel rank's heads. Ranks
whose KV is the same (all of them with MLA, some with few KV heads) are one shard: one of them
saves it, each loads it.

    scheduler                          workers
    ShardNamespaces  <--layout ids--   each rank tells once, in its first output
         |
         v
    keys(shard, group) for lookups, loads and saves

The scheduler alone makes namespaces and keys. It cannot see the tensors, whose order depends on
what each worker chose (attention backend, instruction set), so it waits for their layout ids.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hymcache.connector.cache_groups import CacheGroups
from hymcache.connector.model_identity import config_digest, draft_identity, weights_identity
from hymcache.lookup.namespace import Namespace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class Rank(NamedTuple):
    """A worker's place: pipeline stage and tensor-parallel rank."""

    pp: int
    tp: int


class WorkerLayout(NamedTuple):
    """What a worker tells of one group: its layout id and the bytes of a block."""

    layout_id: str
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Shards:
    """How an engine's KV is divided between its ranks."""

    pp_size: int
    tp_size: int
    tp_replicas: int

    @classmethod
    def of(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Shards:
        """The division of an engine."""
        parallel = vllm_config.parallel_config
        return cls(
            parallel.pipeline_parallel_size,
            parallel.tensor_parallel_size,
            kv_cache_config.kv_tp_replicas,
        )

    @property
    def count(self) -> int:
        """How many shards there are; each has `tp_replicas` ranks."""
        return self.pp_size * (self.tp_size // self.tp_replicas)

    def shard_of(self, rank: Rank) -> int:
        """The index of the shard that a rank holds."""
        return rank.pp * (self.tp_size // self.tp_replicas) + rank.tp // self.tp_replicas

    def saves(self, rank: Rank) -> bool:
        """Whether this rank is the one that saves its shard."""
        return rank.tp % self.tp_replicas == 0


def engine_facts(vllm_config: VllmConfig, groups: CacheGroups) -> dict[str, str | int]:
    """What all shards' bytes and keys depend on."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    return {
        "model": weights_identity(vllm_config),
        "config": config_digest(model),
        "revision": model.revision or "",
        "draft": draft_identity(vllm_config),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_dtype": cache.cache_dtype,
        "quantization": str(model.quantization or ""),
        "block_tokens": ",".join(str(group.block_tokens) for group in groups.groups),
        "hash_tokens": ",".join(
            str(group.block_tokens // group.hashes_per_block) for group in groups.groups
        ),
        "hash": cache.prefix_caching_hash_algo,
        # The seed of the block hashes. Without it sha256 has a fixed one; engines whose xxhash
        # has a random one never share, and their fingerprints may as well be equal.
        "hash_seed": os.environ.get("PYTHONHASHSEED", ""),
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "dcp": parallel.decode_context_parallel_size,
    }


class ShardNamespaces:
    """Namespaces by shard and group, complete once all workers have told their layouts."""

    def __init__(self, facts: Mapping[str, str | int], groups: CacheGroups, shards: Shards) -> None:
        self._facts = dict(facts)
        self._groups = groups
        self._shards = shards
        self._layouts: dict[Rank, tuple[WorkerLayout, ...]] = {}
        self._by_shard: list[tuple[Namespace, ...]] = []

    @property
    def complete(self) -> bool:
        """Whether all shards have their namespaces."""
        return bool(self._by_shard)

    def of(self, shard: int, group: int) -> Namespace:
        """The namespace of a shard's blocks of the group at index `group` of the groups kept."""
        return self._by_shard[shard][group]

    def names(self) -> list[str]:
        """Each namespace in words, with its fingerprint."""
        return [
            f"{space.fingerprint:016x}: {space.name}"
            for spaces in self._by_shard
            for space in spaces
        ]

    def learn(self, layouts: Mapping[Rank, tuple[WorkerLayout, ...]]) -> None:
        """Takes what workers tell, in any order and any number of parts."""
        self._layouts.update(layouts)
        if len(self._layouts) == self._shards.pp_size * self._shards.tp_size:
            self._make()

    def renew(self) -> None:
        """Leaves everything stored so far behind.

        After a change of weights no namespace made before is right, and no other engine can know
        whether its weights are the same: the new ones are this engine's alone.
        """
        self._facts["reset"] = secrets.token_hex(8)
        if self.complete:
            self._make()

    def _make(self) -> None:
        by_shard: dict[int, tuple[Namespace, ...]] = {}
        for rank, layouts in sorted(self._layouts.items()):
            shard = self._shards.shard_of(rank)
            by_shard.setdefault(
                shard,
                tuple(
                    Namespace.of(
                        self._facts
                        | {
                            "shard": shard,
                            "shards": self._shards.count,
                            "group": group.group_id,
                            "kind": f"{group.kind.value}{group.window_tokens or ''}",
                            "layout": layout.layout_id,
                            "block_bytes": layout.block_bytes,
                        }
                    )
                    for group, layout in zip(self._groups.groups, layouts, strict=True)
                ),
            )
        self._by_shard = [by_shard[shard] for shard in range(self._shards.count)]
