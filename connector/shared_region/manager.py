"""The scheduler's half: answers lookups from the region's directory, and nothing else.

It keeps no list of what is stored. Whether a block is there is asked of the directory each time,
with plain loads from mapped memory, so what another engine stored a moment ago is found, and what
was evicted is not. Data slots are never mapped here.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadPolicy,
    PrepareStoreOutput,
    RequestOffloadingContext,
)

from hymcache.connector.shared_region.handoff import Handoff, Handoffs
from hymcache.connector.shared_region.load_store_spec import RegionLoadStoreSpec
from hymcache.connector.shared_region.metrics import RegionStats
from hymcache.connector.shared_region.region_counts import RegionCounts
from hymcache.connector.shared_region.settings import RegionSettings, Role

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import LoadStoreSpec, OffloadKey, ReqContext

    from hymcache.connector.shared_region.directory import Directory

# A request that loaded a block this often and comes back for it has met a failure that the
# directory does not show: it computes.
_LOADS_PER_BLOCK_MAX: Final = 3


@dataclass(slots=True)
class _Request:
    handoff: Handoff
    loads: Counter[bytes] = field(default_factory=Counter)


class SharedRegionManager(OffloadingManager):
    """What OffloadingConnector's scheduler asks."""

    def __init__(
        self,
        directory: Directory,
        settings: RegionSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._role = settings.role
        self._stats = RegionStats()
        self._handoffs = Handoffs(
            always=settings.role is Role.CONSUMER,
            timeout_s=settings.handoff_timeout_s,
            clock=clock,
            stats=self._stats,
        )
        self._requests: dict[str, _Request] = {}
        self._counts = RegionCounts(directory.attachment, self._stats, slots=True, clock=clock)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Begins to follow a request."""
        self._requests[req_context.req_id] = _Request(
            self._handoffs.of(req_context.kv_transfer_params)
        )
        # With the other policy, what a load was ordered for would count as stored for good, also
        # where it failed and was computed. What is there is not copied again in any case.
        return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether a chunk can be loaded. RETRY while it is on its way from another engine."""
        if not self._role.loads:
            return LookupResult.MISS
        request = self._requests[req_context.req_id]
        if self._directory.holds(key):
            if request.loads[key] < _LOADS_PER_BLOCK_MAX:
                return LookupResult.HIT
            return LookupResult.MISS
        return LookupResult.RETRY if self._handoffs.waits(request.handoff) else LookupResult.MISS

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Names the chunks to load. What is gone when a worker comes for it fails there."""
        request = self._requests[req_context.req_id]
        request.loads.update(keys)
        self._handoffs.found(request.handoff)
        return self._spec(keys, req_context)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Marks chunks as used, so that CLOCK passes them by once."""
        for key in keys:
            self._directory.touch(key)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput:
        """Names the chunks that the region does not hold; it makes room when they are stored."""
        missing = (
            [key for key in keys if not self._directory.holds(key)] if self._role.stores else []
        )
        return PrepareStoreOutput(
            keys_to_store=missing,
            store_spec=self._spec(missing, req_context),
            evicted_keys=[],
        )

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forgets a request."""
        request = self._requests.pop(req_context.req_id, None)
        if request is not None:
            self._handoffs.finished(request.handoff)

    def take_events(self) -> Iterable[object]:
        """None: what leaves a region that others share is not this engine's to tell."""
        return ()

    def reset_cache(self) -> None:
        """Leaves all that was stored behind, as after a change of weights."""
        self._directory.renew()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What was counted since the last call."""
        self._counts.report()
        return self._stats.take()

    def shutdown(self) -> None:
        """Unmaps the directory."""
        self._counts.close()
        self._directory.close()

    def _spec(self, keys: Collection[OffloadKey], req_context: ReqContext) -> RegionLoadStoreSpec:
        named = tuple(self._directory.name_of(key) for key in keys)
        return RegionLoadStoreSpec(req_context.req_id, named)
