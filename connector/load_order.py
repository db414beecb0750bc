"""Turns a hit and the blocks that vLLM allocated for it into the order of a load."""

from __future__ import annotations

from collections.abc import Sequence

from hymcache.connector.cache_groups import CacheGroups
from hymcache.connector.metadata import LoadPart
from hymcache.connector.prefix_lookup import Hit


def make_load(
    groups: CacheGroups,
    hit: Hit,
    block_ids: Sequence[Sequence[int]],
    base_tokens: int,
    end_tokens: int,
) -> tuple[LoadPart, ...]:
    """The parts of a load of tokens `base_tokens...end_tokens-1`, one for each group.

    `block_ids` are the request's, by vLLM's group index; id 0 stands for a block outside a
    window. A part whose plan does not cover its blocks has empty plans: it fails, and is computed.
    """
    parts = []
    for plan in hit.plans:
        group = groups.groups[plan.group]
        first = base_tokens // group.block_tokens
        end = -(-end_tokens // group.block_tokens)
        ids = list(block_ids[group.group_id][first:end])
        outside = next((i for i, block_id in enumerate(ids) if block_id), len(ids))
        row = first + outside - plan.first_block
        plans = plan.plans if row >= 0 else (b"",) * len(plan.plans)
        parts.append(LoadPart(plan.group, plans, max(row, 0), ids[outside:]))
    return tuple(parts)
