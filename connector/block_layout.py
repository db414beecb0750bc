"""Where the bytes of a KV block lie in the engine's memory.

vLLM shows each layer as a view `[B, H, N, C]` (block, head, token, content) of one allocation,
in one of the physical orders LBHNC, LBNHC, LHBNC, BLHNC, BLNHC, BHLNC. A block is therefore one
run of bytes or many, at a fixed distance from the runs of the next block:

    LBHNC, LBNHC   a run for each layer
    LHBNC          a run for each head of each layer
    BLHNC, BLNHC   one run
    BHLNC          one run

An object in the store is these runs one after the other, by address: LBHNC, LHBNC and BLHNC
make the same objects, LBNHC and BLNHC others, BHLNC yet others. The bytes are opaque; an engine
that orders them otherwise has another layout id, and so another namespace.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from vllm.v1.kv_cache_interface import group_kernel_blocks

from hymcache import limits
from hymcache.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from hymcache.connector.cache_groups import CacheGroup

# A block of 128 layers with 64 heads each has 8,192 runs at worst.
_RUNS_MAX: Final = 1 << 16


class Run(NamedTuple):
    """Bytes `[base + b * stride, + size)` of block b."""

    base: int
    stride: int
    size: int


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Where the blocks of one KV cache group lie, and a digest of how they are ordered.

    `runs` are by address. `layout_id` does not depend on the number of blocks or on addresses,
    so equal engines have equal ones.
    """

    group_id: int
    num_blocks: int
    runs: tuple[Run, ...]
    layout_id: str

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: the size of its object."""
        return sum(run.size for run in self.runs)


def group_layout(
    group: CacheGroup,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    backend_facts: Sequence[str],
) -> GroupLayout:
    """The layout of a group from the views that vLLM registered.

    `kv_caches` maps layer names to views `[B, H, N, C]`; layers that share another's cache may be
    absent. `backend_facts` are what the order inside a block depends on beside the views' strides.
    Raises ConfigError for memory that is not laid out as above.
    """
    pieces: list[tuple[Run, int]] = []
    seen: set[tuple[int, tuple[int, ...]]] = set()
    digest = hashlib.sha256()
    _tell(digest, *backend_facts)
    for index, name in enumerate(kv_cache_config.kv_cache_groups[group.group_id].layer_names):
        if name not in kv_caches:
            continue
        view = group_kernel_blocks(kv_caches[name], kv_cache_config.num_blocks)
        place = (view.data_ptr(), view.stride())
        if place in seen:
            # A layer that reads another one's cache has no bytes of its own.
            continue
        seen.add(place)
        pieces += ((run, index) for run in block_runs(view))
        strides = [(-view.stride(dim), dim) for dim in range(1, view.dim())]
        order = [dim for _, dim in sorted(strides)]
        _tell(digest, name, view.dtype, tuple(view.shape[1:]), order)
    if not pieces:
        raise ConfigError(f"KV cache group {group.group_id} has no registered layers")
    pieces.sort()
    runs = [run for run, _ in pieces]
    _check_apart(group.group_id, runs)
    # Which layer's bytes follow which: runs of one layer come in the order told above, so it does
    # not matter in how many of them they are.
    for index, of_layer in itertools.groupby(pieces, key=lambda piece: piece[1]):
        _tell(digest, index, sum(run.size for run, _ in of_layer))
    return GroupLayout(
        group.group_id, kv_cache_config.num_blocks, _joined(runs), digest.hexdigest()[:16]
    )


def block_runs(view: torch.Tensor) -> list[Run]:
    """The runs of contiguous bytes that make a block of `view`, whose dimension 0 is blocks."""
    item = view.element_size()
    dims = sorted((view.stride(d) * item, view.shape[d]) for d in range(1, view.dim()))
    size = item
    outer: list[range] = []
    for stride, length in dims:
        if length == 1:
            continue
        if not outer and stride == size:
            size *= length
        elif stride < size:
            raise ConfigError(f"a KV cache view overlaps itself: {view.shape}, {view.stride()}")
        else:
            outer.append(range(0, stride * length, stride))
    offsets = sorted(sum(steps) for steps in itertools.product(*outer))
    if len(offsets) > _RUNS_MAX:
        raise ConfigError(f"a KV block of {len(offsets)} runs is more than {_RUNS_MAX}")
    base, stride = view.data_ptr(), view.stride(0) * item
    return [Run(base + offset, stride, size) for offset in offsets]


def _joined(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Runs that touch in every block become one. `runs` are by address."""
    joined = [runs[0]]
    for run in runs[1:]:
        last = joined[-1]
        if last.stride == run.stride and last.base + last.size == run.base:
            joined[-1] = last._replace(size=last.size + run.size)
        else:
            joined.append(run)
    if sum(run.size for run in joined) > limits.OBJECT_BYTES_MAX:
        raise ConfigError(f"a KV block is larger than {limits.OBJECT_BYTES_MAX} bytes")
    return tuple(joined)


def _check_apart(group_id: int, runs: Sequence[Run]) -> None:
    # Two layers on the same bytes would be stored twice and loaded over each other.
    for before, after in itertools.pairwise(runs):
        if before.base + before.size > after.base:
            raise ConfigError(f"layers of KV cache group {group_id} overlap")


def _tell(digest: hashlib._Hash, *facts: object) -> None:
    for fact in facts:
        text = str(fact).encode()
        digest.update(b"%d:%b" % (len(text), text))
