"""What the scheduler's half remembers of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hymcache.connector.prefix_lookup import PrefixLookup
from hymcache.connector.request_keys import RequestKeys

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True)
class RequestState:
    """A request from its arrival to its end.

    `saved_blocks` is, by group, how many leading blocks are stored or on their way there;
    `due_tokens` how many computed tokens it takes for another one to be full, and `retry_at` the
    time before which nothing is offered again. `offered_from` is the local hit
    that the last offer of remote tokens went on from. `loads_failed` bars it from further
    lookups: what failed once would be found and fail again.
    """

    request: Request
    keys: RequestKeys
    saved_blocks: list[int]
    arrived_at: float
    lookup: PrefixLookup | None = None
    lookups: int = 0
    offered_from: int = 0
    due_tokens: int = 0
    retry_at: float = 0.0
    loads_failed: bool = False
    barred_from_saving: bool = False

    def restart(self) -> None:
        """The request was preempted: its blocks are gone, and it will be scheduled anew."""
        self.drop_lookup()
        self.lookups = 0
        self.mark_saved([0] * len(self.saved_blocks))

    def mark_saved(self, blocks: list[int]) -> None:
        """Sets `saved_blocks`; what is due is found anew."""
        self.saved_blocks = blocks
        self.due_tokens = 0

    def drop_lookup(self) -> None:
        """Ends the lookup, and the prefetch of what it found."""
        if self.lookup is not None:
            self.lookup.release()
            self.lookup = None
