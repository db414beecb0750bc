"""The search for the longest prefix of one request that the store holds.

    start --> prefix tickets (full groups, every shard) --all answered--> hit of n tokens
                                                                             |
                          no sliding groups, or nothing hit <----------------+
                                      |                                      v
                                    done <--all of the window hit-- window tickets
                                      ^                              (sliding groups)
                                      |                                      |
                                      +----- a shorter n, a few times <------+

The shards and groups of an engine must agree, so the shortest run counts. Nodes start to
prefetch as the tickets find blocks; `release` ends that, `hand_over` leaves it to the loads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from hymcache.connector.cache_groups import CacheGroups, GroupKind
from hymcache.connector.ports import Match, Matcher
from hymcache.connector.request_keys import RequestKeys

# A window that is not complete gives a shorter prefix whose window may not be complete either.
_WINDOW_ROUNDS_MAX: Final = 4


class GroupPlan(NamedTuple):
    """How to load one group: row 0 of each shard's plan is block `first_block`."""

    group: int
    first_block: int
    plans: tuple[bytes, ...]


class Hit(NamedTuple):
    """What was found: the prefix of `tokens` can be loaded from `base_tokens` on.

    `tokens` is `base_tokens` when nothing was found. `blocks_asked` and `blocks_hit` count blocks
    of the first group in one shard. `failure` says what kept the lookup from an answer, "" if
    nothing did.
    """

    tokens: int
    plans: tuple[GroupPlan, ...]
    blocks_asked: int
    blocks_hit: int
    failure: str


class _Ticket(NamedTuple):
    group: int
    shard: int
    first_block: int
    end_block: int
    number: int


class PrefixLookup:
    """One search. `poll` until it gives a Hit, then `hand_over` or `release` it."""

    def __init__(
        self,
        matcher: Matcher,
        groups: CacheGroups,
        shard_count: int,
        keys: RequestKeys,
        *,
        base_tokens: int,
        limit_tokens: int,
        clock: Callable[[], float],
        wait_s_max: float,
    ) -> None:
        """Starts the search between two prefixes, both in whole blocks of all groups."""
        self._matcher = matcher
        self._groups = groups
        self._shard_count = shard_count
        self._keys = keys
        self.base_tokens = base_tokens
        self.limit_tokens = limit_tokens
        self._clock = clock
        self._wait_s_max = wait_s_max
        self.started_at = clock()
        self.counted = False
        kinds = [group.kind for group in groups.groups]
        # With sliding groups alone their blocks are looked for as if all were needed.
        self._prefix_groups = [g for g, kind in enumerate(kinds) if kind is GroupKind.FULL] or list(
            range(len(kinds))
        )
        self._window_groups = [g for g in range(len(kinds)) if g not in self._prefix_groups]
        self._rounds = 0
        self._hit: Hit | None = None
        self._hit_tokens = limit_tokens
        self._asked, self._found, self._failure = 0, 0, ""
        self._open: list[_Ticket] = []
        self._answered: dict[_Ticket, Match] = {}
        for g in self._prefix_groups:
            self._start(g, base_tokens // self._tokens(g), limit_tokens)

    def poll(self) -> Hit | None:
        """The result; None while it is not there. Never blocks."""
        while self._hit is None and self._collect():
            self._advance()
        if self._hit is None and self._clock() - self.started_at > self._wait_s_max:
            self._failure = f"no answer within {self._wait_s_max:g} s"
            self._miss()
        return self._hit

    def release(self) -> None:
        """Ends the search, and the prefetch of what was found."""
        for ticket in (*self._open, *self._answered):
            self._matcher.cancel(ticket.number)
        self._open.clear()
        self._answered.clear()

    def hand_over(self) -> None:
        """Leaves the prefetch to the loads that are made by the hit's plans."""
        for ticket in self._answered:
            self._matcher.take(ticket.number)
        self._answered.clear()

    def _tokens(self, group: int) -> int:
        return self._groups.groups[group].block_tokens

    def _start(self, group: int, first_block: int, end_tokens: int) -> None:
        end_block = end_tokens // self._tokens(group)
        for shard in range(self._shard_count):
            keys = self._keys.span(shard, group, first_block, end_block)
            number = self._matcher.start(keys)
            self._open.append(_Ticket(group, shard, first_block, end_block, number))

    def _collect(self) -> bool:
        """Takes the answers that are there; whether all are."""
        still_open = []
        for ticket in self._open:
            match = self._matcher.poll(ticket.number)
            if match is None:
                still_open.append(ticket)
                continue
            self._answered[ticket] = match
            self._failure = self._failure or match.reason
        self._open = still_open
        return not still_open

    def _advance(self) -> None:
        """All tickets are answered: settles the result, or asks for the windows."""
        first_round = self._rounds == 0
        tokens = min(
            (ticket.first_block + match.hits) * self._tokens(ticket.group)
            for ticket, match in self._answered.items()
        )
        tokens -= tokens % self._groups.align_tokens
        tokens = min(tokens, self._hit_tokens)
        if first_round:
            lead = self._tokens(self._prefix_groups[0])
            self._asked = (self.limit_tokens - self.base_tokens) // lead
            self._found = max(0, tokens - self.base_tokens) // lead
        complete = tokens == self._hit_tokens and not first_round
        self._hit_tokens = tokens
        if tokens <= self.base_tokens or self._rounds == _WINDOW_ROUNDS_MAX:
            self._miss()
        elif complete or not self._window_groups:
            self._settle()
        else:
            self._ask_windows()

    def _ask_windows(self) -> None:
        self._rounds += 1
        for ticket in [t for t in self._answered if t.group in self._window_groups]:
            self._matcher.cancel(ticket.number)
            del self._answered[ticket]
        for g in self._window_groups:
            group = self._groups.groups[g]
            first = max(
                self.base_tokens // group.block_tokens, group.first_needed_block(self._hit_tokens)
            )
            self._start(g, first, self._hit_tokens)

    def _settle(self) -> None:
        plans = []
        for g in range(len(self._groups.groups)):
            of_group = sorted(
                (t.shard, t.first_block, m.plan) for t, m in self._answered.items() if t.group == g
            )
            plans.append(GroupPlan(g, of_group[0][1], tuple(plan for _, _, plan in of_group)))
        self._hit = Hit(self._hit_tokens, tuple(plans), self._asked, self._found, self._failure)

    def _miss(self) -> None:
        self.release()
        self._hit = Hit(self.base_tokens, (), self._asked, 0, self._failure)
