"""Bounded retries: exponential backoff with jitter; clock and random numbers come from outside."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

_Result = TypeVar("_Result")


class Random(Protocol):
    """What `random.Random` has."""

    def random(self) -> float:
        """A number from 0 up to, but not, 1."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait between attempts: first_s, then `factor` times longer up to longest_s.

    Each wait is shortened at random by up to `jitter` of itself, so that those who failed
    together do not come back together. `attempts_max` counts the first attempt too.
    """

    first_s: float = 0.1
    factor: float = 2.0
    longest_s: float = 5.0
    jitter: float = 0.5
    attempts_max: int = 4

    def __post_init__(self) -> None:
        if not (0 <= self.first_s <= self.longest_s and self.factor >= 1 and 0 <= self.jitter <= 1):
            raise ValueError(f"not a backoff: {self}")
        if self.attempts_max < 1:
            raise ValueError(f"attempts_max = {self.attempts_max}: should be at least 1")

    def delay_s(self, failures: int, source: Random) -> float:
        """The wait after so many failures in a row, 1 or more."""
        if failures < 1:
            raise ValueError(f"failures = {failures}: should be at least 1")
        # A large exponent would overflow; the longest wait is reached long before.
        delay_s = min(self.longest_s, self.first_s * self.factor ** min(failures - 1, 64))
        return delay_s * (1 - self.jitter * source.random())

    def delays_s(self, source: Random) -> Iterator[float]:
        """The waits between all attempts: one fewer than these."""
        for failures in range(1, self.attempts_max):
            yield self.delay_s(failures, source)


DEFAULT_BACKOFF: Final = Backoff()
# Not a secret: it spreads retries over time.
_RANDOM: Final = random.Random()  # noqa: S311


async def retried(
    attempt: Callable[[], Awaitable[_Result]],
    *,
    retry_on: type[Exception] | tuple[type[Exception], ...],
    backoff: Backoff = DEFAULT_BACKOFF,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    source: Random = _RANDOM,
) -> _Result:
    """What the first successful attempt returns; what the last one raised if all fail.

    Only errors of the kind `retry_on` are tried again. For idempotent calls.
    """
    for delay_s in backoff.delays_s(source):
        try:
            return await attempt()
        except retry_on:
            await sleep(delay_s)
    return await attempt()
