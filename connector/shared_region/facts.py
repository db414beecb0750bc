"""What the bytes of an engine's blocks depend on beside tokens: the configuration of its region.

The first worker that comes formats the region with these facts as its configuration; every other
one must have the same ones, or is refused with the facts that differ. So a region is of one model
in one geometry, and what an engine finds there fits. The facts also seed the keys, so that bytes
left over from another configuration could not be found even so.

A worker alone can know all of them: the order inside a block is its attention backend's choice,
and OffloadingConnector shows vLLM's configuration to no spec (a worker is registered while it is
vLLM's current one). The scheduler, which vLLM makes after its workers, reads them in the region.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.config import get_current_vllm_config

from hymcache.connector.cache_groups import CacheGroup, CacheGroups, GroupKind
from hymcache.connector.engine_memory import backend_facts
from hymcache.connector.model_identity import named_identity
from hymcache.connector.shard_namespaces import engine_facts
from hymcache.connector.shared_region.settings import ORIGIN, RegionSettings
from hymcache.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

Facts = Mapping[str, str | int]


def worker_facts(
    config: OffloadingConfig, settings: RegionSettings, group_pages: Sequence[Sequence[int]]
) -> dict[str, str]:
    """The facts of the engine that this worker is of.

    `group_pages` has, for each group, the bytes of a block in each of its layers. Raises
    ConfigError for an engine that could not share anything.
    """
    vllm_config = get_current_vllm_config()
    _check_hashes(vllm_config)
    _check_role(vllm_config, settings)
    facts = engine_facts(vllm_config, _groups(config))
    backend = backend_facts(vllm_config)
    facts |= {
        "backend": "; ".join(backend),
        "kv_layout": config.kv_cache_layout or "",
        "ranks": config.parallel.world_size,
        "replicated": int(config.replicated_layout),
        "pp_partition": os.environ.get("VLLM_PP_LAYER_PARTITION", ""),
        "variant": settings.variant,
    }
    if config.parallel.pp_size == 1:
        # Stages have different layers; there the partition above says which.
        facts |= {
            "layers": _digest(*(name for group in config.groups for name in group.layer_names)),
            "pages": _digest(*(page for pages in group_pages for page in pages)),
        }
    return {name: str(value) for name, value in facts.items()}


def tier_facts(
    config: OffloadingConfig, settings: RegionSettings, chunk_bytes: int
) -> dict[str, str]:
    """The facts of a tier below vLLM's CPU memory, as far as they can be known there."""
    parallel = config.parallel
    facts = {
        "kind": "chunks of all ranks",
        "model": named_identity(config.model.name),
        "kv_dtype": config.model.dtype,
        "block_tokens": ",".join(str(group.tokens_per_block) for group in config.groups),
        "hash_tokens": config.cache.tokens_per_hash,
        "hash_seed": os.environ.get("PYTHONHASHSEED", ""),
        "chunk_blocks": config.cache.blocks_per_chunk,
        "chunk_bytes": chunk_bytes,
        "layers": _digest(*(name for group in config.groups for name in group.layer_names)),
        "kv_layout": config.kv_cache_layout or "",
        "tp": parallel.tp_size,
        "pp": parallel.pp_size,
        "pcp": parallel.pcp_size,
        "dcp": parallel.dcp_size,
        "replicated": int(config.replicated_layout),
        "canonical": int(config.canonical_layout),
        "variant": settings.variant,
    }
    return {name: str(value) for name, value in facts.items()}


def check_geometry(config: OffloadingConfig, facts: Mapping[str, str | int]) -> None:
    """Whether a region's facts can be those of this engine, as far as its scheduler knows.

    Its workers have checked all of them; this is for a scheduler that sees another device under
    the same path. Raises ConfigError.
    """
    own = {
        "block_tokens": ",".join(str(group.tokens_per_block) for group in config.groups),
        "ranks": str(config.parallel.world_size),
    }
    differing = [name for name, value in own.items() if facts.get(name) != value]
    if differing:
        named = " ".join(f"{name}={facts.get(name, '(none)')}" for name in differing)
        raise ConfigError(
            f"the region has {named}, this engine "
            + " ".join(f"{name}={own[name]}" for name in differing)
            + "; name the region that the engine's workers have"
        )


def _groups(config: OffloadingConfig) -> CacheGroups:
    hash_tokens = config.cache.tokens_per_hash
    return CacheGroups(
        tuple(
            CacheGroup(
                group.group_id,
                GroupKind.FULL,
                group.tokens_per_block,
                group.tokens_per_block // hash_tokens,
            )
            for group in config.groups
        ),
        hash_tokens,
    )


def _check_hashes(vllm_config: VllmConfig) -> None:
    """Engines that hash blocks their own way would miss everything, and nothing would say so."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in os.environ:
        raise ConfigError(
            f"prefix_caching_hash_algo {algorithm}: without PYTHONHASHSEED every process hashes "
            "blocks its own way; set it to the same value on all engines of the region, or use "
            "sha256"
        )


def _check_role(vllm_config: VllmConfig, settings: RegionSettings) -> None:
    """The scheduler's half never sees kv_role, so it is written twice and must agree."""
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_role != settings.role:
        raise ConfigError(
            f"{ORIGIN}: role is {settings.role} and kv_role is {transfer.kv_role}; write "
            f'"role": "{transfer.kv_role}" there, because OffloadingConnector tells no spec its '
            "kv_role"
        )


def _digest(*parts: object) -> str:
    digest = hashlib.sha256()
    for part in parts:
        text = str(part).encode()
        digest.update(b"%d:%b" % (len(text), text))
    return digest.hexdigest()[:16]
