"""The scheduler's half: finds prefixes, orders loads and saves, keeps the books.

    on_new_request ............ lookup starts, nodes begin to prefetch
    get_num_new_matched_tokens  None while it runs, then the tokens beyond the local hit
    update_state_after_alloc .. a load is ordered into the blocks that vLLM chose
    build_connector_meta ...... loads and new full blocks go to the workers
    update_connector_output ... their reports come back
    request_finished .......... last full blocks are saved, the lookup is dropped

Nothing here waits: what takes time runs on the matcher's thread or at the workers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from hymcache.connector.cache_groups import CacheGroups
from hymcache.connector.load_order import make_load
from hymcache.connector.loads_in_flight import Load, LoadsInFlight
from hymcache.connector.lookup_breaker import LookupBreaker
from hymcache.connector.metadata import StepMetadata, StepReport
from hymcache.connector.metrics import StoreStats
from hymcache.connector.ports import Matcher
from hymcache.connector.prefix_lookup import Hit, PrefixLookup
from hymcache.connector.request_keys import RequestKeys
from hymcache.connector.request_state import RequestState
from hymcache.connector.save_planner import SavePlanner
from hymcache.connector.shard_namespaces import ShardNamespaces, Shards

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

# vLLM sets up handlers for the loggers below its own name only.
logger = init_logger("vllm.hymcache.scheduler")

# How long the first request of an engine waits for the workers' first output.
_LAYOUTS_WAIT_S_MAX: Final = 1.0
# A load takes the request at least two further steps. Where fewer tokens than these blocks are to
# be gained, computing them is quicker.
_WORTH_BLOCKS: Final = 2
# Local hits may shrink between the lookup and the admission (blocks get evicted); each time the
# lookup starts again from there.
_LOOKUPS_MAX: Final = 4


@dataclass(frozen=True, slots=True)
class Roles:
    """What an engine does with the store; `kv_both` does both."""

    loads: bool
    saves: bool


class SchedulerSide:
    """The half of the connector that lives in vLLM's scheduler."""

    def __init__(
        self,
        matcher: Matcher,
        groups: CacheGroups,
        shards: Shards,
        namespaces: ShardNamespaces,
        *,
        roles: Roles,
        prefix_caching: bool,
        clock: Callable[[], float],
    ) -> None:
        self._matcher = matcher
        self._groups = groups
        self._shards = shards
        self._namespaces = namespaces
        self._roles = roles
        self._prefix_caching = prefix_caching
        self._clock = clock
        self._manager: KVCacheManager | None = None
        self._states: dict[str, RequestState] = {}
        self._saves = SavePlanner(groups, shards, namespaces, clock)
        self._loads = LoadsInFlight()
        self._breaker = LookupBreaker(clock)
        self._worth_tokens = _WORTH_BLOCKS * max((g.block_tokens for g in groups.groups), default=1)
        self._unsupported = ""
        self._not_admitted: str | None = None
        self._stats = StoreStats()

    def bind(self, manager: KVCacheManager) -> None:
        """Takes vLLM's cache manager, once, at the start."""
        self._manager = manager
        self._saves.bind(manager.block_pool)

    # Loads

    def on_new_request(self, request: Request) -> None:
        """Starts the lookup while the request still queues."""
        keys = RequestKeys(request, self._groups.groups, self._namespaces)
        state = RequestState(request, keys, [0] * len(self._groups.groups), self._clock())
        self._states[request.request_id] = state
        if self._namespaces.complete and self._may_load(state):
            self._look_up(state, self._local_hit(request))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens beyond the local hit that can be loaded; None to be asked again."""
        state = self._states.get(request.request_id)
        tokens: int | None = 0
        if state is not None and self._may_load(state):
            tokens = self._loadable(state, num_computed_tokens)
        # Until vLLM has allocated its blocks.
        self._not_admitted = request.request_id if tokens is not None else None
        return tokens, bool(tokens)

    def _loadable(self, state: RequestState, base_tokens: int) -> int | None:
        if not self._namespaces.complete:
            # The workers tell their layouts with the output of the first step, which the first
            # request of an engine precedes.
            waited_s = self._clock() - state.arrived_at
            return None if waited_s < _LAYOUTS_WAIT_S_MAX else 0
        if state.lookup is None or base_tokens < state.lookup.base_tokens:
            self._look_up(state, base_tokens)
        if state.lookup is None:
            return 0
        hit = state.lookup.poll()
        if hit is None:
            return None
        self._count(state, state.lookup, hit)
        if hit.tokens - base_tokens < self._worth_tokens:
            return 0
        next_key = self._lead_keys(state, base_tokens, hit.tokens, blocks_max=1)
        if self._prefix_caching and self._loads.of_other(state.request.request_id, next_key):
            # Another request is loading the same prefix: once it has it, this one hits locally.
            return None
        state.offered_from = base_tokens
        return hit.tokens - base_tokens

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Orders the load of `num_external_tokens` into the blocks allocated for it."""
        req_id = request.request_id
        self._not_admitted = None
        state = self._states.get(req_id)
        if state is None or req_id in self._loads:
            return
        if num_external_tokens == 0:
            state.drop_lookup()
            return
        lookup = state.lookup
        hit = lookup.poll() if lookup is not None else None
        if lookup is None or hit is None:
            raise RuntimeError(f"request {req_id} is to load what was never offered")
        base, end = state.offered_from, state.offered_from + num_external_tokens
        parts = make_load(self._groups, hit, blocks.get_block_ids(), base, end)
        keys = self._lead_keys(state, base, end)
        load = Load(
            keys,
            first_block=base // self._groups.groups[0].block_tokens,
            outside=len(keys) - len(parts[0].block_ids),
            end_blocks=tuple(end // group.block_tokens for group in self._groups.groups),
            good_blocks=len(keys),
        )
        self._loads.add(req_id, parts, load)
        lookup.hand_over()
        state.lookup = None

    def _look_up(self, state: RequestState, base_tokens: int) -> None:
        state.drop_lookup()
        limit_tokens = self._limit_tokens(state)
        if limit_tokens - base_tokens < self._worth_tokens or state.lookups == _LOOKUPS_MAX:
            return
        wait_s_max = self._breaker.wait_s()
        state.lookups = _LOOKUPS_MAX if wait_s_max is None else state.lookups + 1
        if wait_s_max is None:
            return
        state.lookup = PrefixLookup(
            self._matcher,
            self._groups,
            self._shards.count,
            state.keys,
            base_tokens=base_tokens,
            limit_tokens=limit_tokens,
            clock=self._clock,
            wait_s_max=wait_s_max,
        )

    def _limit_tokens(self, state: RequestState) -> int:
        """The longest prefix that a load may claim."""
        tokens = min(
            state.keys.blocks(g) * group.block_tokens for g, group in enumerate(self._groups.groups)
        )
        if self._groups.has_sliding:
            # vLLM computes the last token anew, and its window begins one token earlier than the
            # one after the prompt: that block would be missing.
            tokens = min(tokens, state.request.num_tokens - 1)
        return tokens - tokens % self._groups.align_tokens

    def _local_hit(self, request: Request) -> int:
        """The tokens that vLLM will find in its own cache, as of now."""
        manager = self._manager
        if manager is None or not self._prefix_caching or manager.enable_kv_cache_events:
            # With events on, the question itself would be published as a hit.
            return 0
        tokens = int(manager.get_computed_blocks(request)[1])
        return tokens - tokens % self._groups.align_tokens

    def _lead_keys(
        self,
        state: RequestState,
        base_tokens: int,
        end_tokens: int,
        *,
        blocks_max: int = sys.maxsize,
    ) -> list[bytes]:
        """The keys of a span in the first group and shard."""
        block_tokens = self._groups.groups[0].block_tokens
        first = base_tokens // block_tokens
        end = min(end_tokens // block_tokens, first + blocks_max)
        return state.keys.each(0, 0, first, end)

    def _may_load(self, state: RequestState) -> bool:
        return (
            self._roles.loads
            and not self._unsupported
            and not state.loads_failed
            and not state.request.skip_reading_prefix_cache
        )

    def _count(self, state: RequestState, lookup: PrefixLookup, hit: Hit) -> None:
        if lookup.counted:
            return
        lookup.counted = True
        self._stats.add("blocks_asked", hit.blocks_asked)
        self._stats.add("blocks_hit", hit.blocks_hit)
        self._stats.observe("lookup_seconds", self._clock() - lookup.started_at)
        if hit.failure:
            self._stats.add("lookups_failed", 1)
            self._breaker.failed()
            logger.debug("HyMCache lookup failed: %s", hit.failure)
            return
        self._breaker.succeeded()
        # What is missing may have been stored once: evicted, or lost with its node.
        for g, group in enumerate(self._groups.groups):
            first, end = (n // group.block_tokens for n in (hit.tokens, lookup.limit_tokens))
            self._saves.stored_keys.discard(state.keys.span(0, g, first, end))

    # Steps

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """What the workers are to start in this step."""
        for req_id in scheduler_output.preempted_req_ids or ():
            if (preempted := self._states.get(req_id)) is not None:
                preempted.restart()
        if self._saves_on():
            block_state = scheduler_output.kv_connector_block_state
            for req_id, new_tokens in scheduler_output.num_scheduled_tokens.items():
                state = self._states.get(req_id)
                if state is None or block_state is None:
                    continue
                request = state.request
                # Draft tokens may still be rejected: only those of the request count.
                computed = min(request.num_computed_tokens + new_tokens, request.num_tokens)
                if computed >= state.due_tokens:
                    self._saves.plan(state, computed, partial(block_state.get_block_ids, req_id))
            # A request that was asked about and got no blocks waits for some.
            waiting = self._not_admitted is not None
            self._saves.relieve_if_short(self._is_running, certainly=waiting)
        self._not_admitted = None
        return StepMetadata(
            self._loads.take_orders(), self._saves.take_planned(), self._saves.take_dropped()
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Takes the workers' reports of this step."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            self._learn(report)
            self._loads.report(report.loads)
            self._saves.report(report.saves, self._states.get)
        for req_id in connector_output.finished_recving or ():
            self._finish_load(req_id)

    def _learn(self, report: StepReport) -> None:
        if report.unsupported and not self._unsupported:
            self._unsupported = report.unsupported
            logger.warning("HyMCache is off for this engine: %s", report.unsupported)
        if report.layouts:
            self._namespaces.learn(report.layouts)
            for name in self._namespaces.names():
                logger.info("HyMCache namespace %s", name)

    def _finish_load(self, req_id: str) -> None:
        load = self._loads.finish(req_id)
        if load is None:
            return
        good = b"".join(load.keys[: load.good_blocks])
        self._saves.stored_keys.add(good)
        failed = load.good_blocks < len(load.keys)
        if failed:
            self._saves.stored_keys.discard(b"".join(load.keys[load.good_blocks :]))
        state = self._states.get(req_id)
        if state is None:
            return
        state.loads_failed = state.loads_failed or failed
        if len(self._groups.groups) > 1:
            # After a failure all groups are computed again from the start.
            state.mark_saved([0] * len(load.end_blocks) if failed else list(load.end_blocks))
        else:
            state.mark_saved([load.first_block + load.good_blocks])

    # Ends

    def request_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> None:
        """Saves the last full blocks; vLLM may free all of them right away."""
        state = self._states.pop(request.request_id, None)
        if state is None:
            return
        state.drop_lookup()
        if (
            self._saves_on()
            # Blocks that are being loaded hold nothing yet.
            and request.request_id not in self._loads
            and request.status != RequestStatus.FINISHED_ERROR
        ):
            # A step that is still in flight has not written its tokens.
            computed = min(
                request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens
            )
            self._saves.plan(state, computed, lambda: block_ids, last_chance=True)

    def has_pending_push_work(self) -> bool:
        """Whether the engine must go on stepping: blocks are held for saves."""
        return self._saves.pending

    def has_pending_block_frees(self) -> bool:
        """Called when a running request finds no block: whether some come back soon."""
        return self._saves.relieve(self._is_running)

    def reset_cache(self) -> bool:
        """Leaves all that was stored behind, as after a change of weights."""
        self._namespaces.renew()
        self._saves.forget(self._states.values())
        for state in self._states.values():
            state.restart()
            state.keys.clear()
        return True

    def take_stats(self) -> StoreStats | None:
        """What was counted since the last call."""
        self._stats.add("blocks_skipped", self._saves.lost_blocks, "engine_backlog")
        self._saves.lost_blocks = 0
        return self._stats.take()

    def _saves_on(self) -> bool:
        return self._roles.saves and self._namespaces.complete and not self._unsupported

    def _is_running(self, req_id: str) -> bool:
        state = self._states.get(req_id)
        return state is not None and state.request.status == RequestStatus.RUNNING
