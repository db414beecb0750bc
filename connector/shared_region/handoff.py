"""Which requests wait for another engine to store their KV, and for how long.

    not expected ----------------------------> a miss is a miss
    expected --miss--> waiting --all found--> arrived
                          |
                          +----timeout------> given up: misses are misses, the engine computes

A request is expected to find its prompt where another engine prefills it: on an engine that only
loads (`kv_consumer`), or where its `kv_transfer_params` say `do_remote_prefill`, as the proxies of
vLLM's disaggregated serving write it. What is waited for is on its way: a prefill engine answers
before its last blocks are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from hymcache.connector.shared_region.metrics import RegionStats

_REMOTE_PREFILL: Final = "do_remote_prefill"


class Outcome(StrEnum):
    """How a wait ended."""

    ARRIVED = "arrived"
    TIMED_OUT = "timed_out"
    ABANDONED = "abandoned"


@dataclass(slots=True)
class Handoff:
    """The wait of one request."""

    expected: bool
    since: float | None = None
    over: bool = False


class Handoffs:
    """Begins, bounds and counts the waits of one engine's requests."""

    def __init__(
        self,
        *,
        always: bool,
        timeout_s: float,
        clock: Callable[[], float],
        stats: RegionStats,
    ) -> None:
        """`always`: every request is expected to find its prompt, unless it says otherwise."""
        self._always = always
        self._timeout_s = timeout_s
        self._clock = clock
        self._stats = stats

    def of(self, kv_transfer_params: Mapping[str, Any] | None) -> Handoff:
        """The wait of a new request."""
        said = (kv_transfer_params or {}).get(_REMOTE_PREFILL)
        return Handoff(self._always if said is None else said is True)

    def waits(self, handoff: Handoff) -> bool:
        """Whether to ask again for what is missing now."""
        if not handoff.expected or handoff.over:
            return False
        if handoff.since is None:
            handoff.since = self._clock()
        if self._clock() - handoff.since < self._timeout_s:
            return True
        self._end(handoff, Outcome.TIMED_OUT)
        return False

    def found(self, handoff: Handoff) -> None:
        """The request loads: all that it waited for is there."""
        self._end(handoff, Outcome.ARRIVED)

    def finished(self, handoff: Handoff) -> None:
        """The request is gone."""
        self._end(handoff, Outcome.ABANDONED)

    def _end(self, handoff: Handoff, outcome: Outcome) -> None:
        if handoff.since is not None and not handoff.over:
            self._stats.add("region_handoffs", 1, outcome)
            self._stats.observe("region_handoff_seconds", self._clock() - handoff.since)
        handoff.over = True
