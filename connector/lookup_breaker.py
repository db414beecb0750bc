"""Keeps a store in trouble from costing every request the time it takes to notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

# A lookup takes well below a millisecond. When one takes this long the store is in trouble, and
# the request is better off computing.
_WAIT_S: Final = 1.0
# After a failure the store has to prove itself: one lookup in each pause, with little patience.
_WAIT_ON_PROBATION_S: Final = 0.05
_PAUSE_S_MIN: Final = 0.5
_PAUSE_S_MAX: Final = 8.0


class LookupBreaker:
    """Whether to look up, and how long to wait for the answer.

    closed --a lookup fails--> open for a pause --> one lookup, short wait
      ^                          ^                       |          |
      |                          +------fails, pause x2--+          |
      +---------------------------------succeeds--------------------+
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pause_s = 0.0
        self._open_until = 0.0

    def wait_s(self) -> float | None:
        """How long a lookup that starts now may take; None not to start one."""
        if self._pause_s == 0.0:
            return _WAIT_S
        now = self._clock()
        if now < self._open_until:
            return None
        self._open_until = now + self._pause_s
        return _WAIT_ON_PROBATION_S

    def succeeded(self) -> None:
        """A lookup was answered."""
        self._pause_s = 0.0

    def failed(self) -> None:
        """A lookup was not answered."""
        self._pause_s = min(max(2 * self._pause_s, _PAUSE_S_MIN), _PAUSE_S_MAX)
        self._open_until = self._clock() + self._pause_s
