"""How much of the time for a claim passes at the fabric manager, and how much is the driver's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_spent: ContextVar[float] = ContextVar("fabric_spent_s", default=0.0)


class FabricTimer:
    """Adds up seconds, in all and for the task that runs."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.total_s = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Counts the time within as the fabric manager's."""
        started = self._clock()
        try:
            yield
        finally:
            spent = self._clock() - started
            self.total_s += spent
            _spent.set(_spent.get() + spent)

    @staticmethod
    def reset() -> None:
        """Begins anew for the task that runs."""
        _spent.set(0.0)

    @staticmethod
    def spent_s() -> float:
        """What the task that runs has spent since `reset`."""
        return _spent.get()
