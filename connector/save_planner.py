"""Which blocks to save, and the hold on them until that is done.

A block is saved once it is full, in the order of its prefix. From the moment a save is planned
until all ranks have reported it, the planner holds a reference on the block in vLLM's pool. So
vLLM is free to finish, preempt or abort the request, or to let a window slide on: the block
cannot get other contents under a save. What that may cost is bounded:

- at most `_HELD_SHARE_MAX` of the pool is held; what comes above that is tried again later;
- when the pool runs short, saves of requests that are gone are dropped (`relieve`).

    planned --next step--> running at the ranks --all reported--> released
                                 |                                   ^
                                 +--dropped, ranks asked to end it---+
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hymcache.connector.cache_groups import CacheGroups
from hymcache.connector.metadata import SaveJob, SaveReport
from hymcache.connector.request_state import RequestState
from hymcache.connector.shard_namespaces import ShardNamespaces, Shards
from hymcache.connector.stored_keys import StoredKeys

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

_HELD_SHARE_MAX: Final = 0.25
# Below this share of free blocks, saves of requests that are gone give their blocks back.
_FREE_SHARE_MIN: Final = 1 / 16
# After a refusal (buffer full, node gone) a request's next offer waits this long.
_RETRY_S: Final = 1.0
# How long a running request may wait for the blocks of dropped saves before vLLM preempts.
_DROP_WAIT_S: Final = 0.5


@dataclass(slots=True)
class _Saving:
    req_id: str
    group: int
    first_block: int
    block_ids: list[int]
    keys: bytes
    ranks_left: int
    stored: int
    dropped_at: float | None = None


class SavePlanner:
    """Plans the saves of one engine."""

    def __init__(
        self,
        groups: CacheGroups,
        shards: Shards,
        namespaces: ShardNamespaces,
        clock: Callable[[], float],
    ) -> None:
        self._groups = groups.groups
        self._shards = shards
        self._namespaces = namespaces
        self._clock = clock
        self._pool: BlockPool | None = None
        self._jobs: dict[int, _Saving] = {}
        self._next_job = 0
        self._held_blocks = 0
        self._dropped: list[int] = []
        self._planned: list[SaveJob] = []
        self.stored_keys = StoredKeys(clock)
        self.lost_blocks = 0

    def bind(self, pool: BlockPool) -> None:
        """Takes the pool that block ids refer to."""
        self._pool = pool

    @property
    def pending(self) -> bool:
        """Whether blocks are held: the engine must go on stepping until they are not."""
        return bool(self._jobs)

    def plan(
        self,
        state: RequestState,
        computed_tokens: int,
        resolve_block_ids: Callable[[], tuple[list[int], ...] | None],
        *,
        last_chance: bool = False,
    ) -> None:
        """Plans what of a request's first `computed_tokens` tokens is full and not yet saved.

        Before `state.due_tokens` are computed there is nothing to plan. `resolve_block_ids` gives
        the block ids by group; it is called only if there is something to save, because it copies
        them.
        """
        if state.barred_from_saving or (not last_chance and self._clock() < state.retry_at):
            return
        block_ids: tuple[list[int], ...] | None = None
        for g, group in enumerate(self._groups):
            end = min(computed_tokens // group.block_tokens, state.keys.blocks(g))
            first = state.saved_blocks[g]
            if first >= end:
                continue
            first += self.stored_keys.leading(state.keys.span(0, g, first, end))
            state.saved_blocks[g] = first
            if first >= end:
                continue
            if block_ids is None:
                block_ids = resolve_block_ids()
                if block_ids is None:
                    return
            ids = block_ids[group.group_id][first:end]
            lost = self._plan_group(state, g, first, ids)
            if last_chance:
                self.lost_blocks += lost
        state.due_tokens = min(
            (saved + 1) * group.block_tokens
            for group, saved in zip(self._groups, state.saved_blocks, strict=True)
        )

    def _plan_group(self, state: RequestState, g: int, first: int, ids: list[int]) -> int:
        """Plans as many of these blocks as may be held; returns how many could not."""
        # Of a window's blocks the oldest may be gone: id 0 stands for none.
        gone = next((i for i, block_id in enumerate(ids) if block_id), len(ids))
        state.saved_blocks[g] = first = first + gone
        pool = self._bound_pool()
        room = max(0, int(pool.num_gpu_blocks * _HELD_SHARE_MAX) - self._held_blocks)
        excess = max(0, len(ids) - gone - room)
        ids = ids[gone : gone + room]
        if not ids:
            return excess
        shards = range(self._shards.count)
        end = first + len(ids)
        keys = tuple(state.keys.span(shard, g, first, end) for shard in shards)
        spaces = tuple(int(self._namespaces.of(shard, g).fingerprint) for shard in shards)
        pool.touch([pool.blocks[block_id] for block_id in ids])
        self._held_blocks += len(ids)
        job, self._next_job = self._next_job, self._next_job + 1
        ranks = self._shards.count
        self._jobs[job] = _Saving(state.request.request_id, g, first, ids, keys[0], ranks, len(ids))
        self._planned.append(SaveJob(job, g, keys, spaces, ids))
        state.saved_blocks[g] = end
        return excess

    def take_planned(self) -> list[SaveJob]:
        """The saves to start in this step."""
        planned, self._planned = self._planned, []
        return planned

    def take_dropped(self) -> list[int]:
        """The running saves to end in this step."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def report(
        self, reports: dict[int, SaveReport], find: Callable[[str], RequestState | None]
    ) -> None:
        """Takes what ranks say of saves; gives the blocks of those that are done back."""
        for job, report in reports.items():
            saving = self._jobs.get(job)
            if saving is None:
                continue
            saving.ranks_left -= report.ranks
            saving.stored = min(saving.stored, report.stored)
            if saving.ranks_left <= 0:
                del self._jobs[job]
                self._finish(saving, find(saving.req_id))

    def _finish(self, saving: _Saving, state: RequestState | None) -> None:
        pool = self._bound_pool()
        # In reverse, as vLLM frees: of a prefix the end should be evicted first.
        pool.free_blocks(pool.blocks[block_id] for block_id in reversed(saving.block_ids))
        self._held_blocks -= len(saving.block_ids)
        key_bytes = len(saving.keys) // len(saving.block_ids)
        self.stored_keys.add(saving.keys[: saving.stored * key_bytes])
        if state is not None and saving.stored < len(saving.block_ids):
            # Offered again from the first block that was not taken: later ones without it
            # could never be hit.
            resume = saving.first_block + saving.stored
            saved = list(state.saved_blocks)
            saved[saving.group] = min(saved[saving.group], resume)
            state.mark_saved(saved)
            state.retry_at = self._clock() + _RETRY_S

    def relieve(self, alive: Callable[[str], bool]) -> bool:
        """Drops the saves of requests that are gone, to have their blocks back.

        Returns whether blocks will come back that soon that waiting for them is worth it.
        """
        now = self._clock()
        soon = False
        for job, saving in self._jobs.items():
            if saving.dropped_at is None:
                if alive(saving.req_id):
                    continue
                saving.dropped_at = now
                self._dropped.append(job)
            soon = soon or now - saving.dropped_at < _DROP_WAIT_S
        return soon

    def relieve_if_short(self, alive: Callable[[str], bool], *, certainly: bool) -> None:
        """The same when the pool has few free blocks left, or too few for a waiting request."""
        if self._jobs:
            pool = self._bound_pool()
            few = pool.num_gpu_blocks * _FREE_SHARE_MIN
            if certainly or pool.get_num_free_blocks() < few:
                self.relieve(alive)

    def forget(self, states: Iterable[RequestState]) -> None:
        """The namespaces have changed: nothing that was stored counts any more.

        What these requests have computed so far is not saved under the new ones.
        """
        self.stored_keys.clear()
        for state in states:
            state.barred_from_saving = True

    def _bound_pool(self) -> BlockPool:
        if self._pool is None:
            raise RuntimeError("the block pool was never bound")
        return self._pool
