"""Retries: how often, how long between, and of what."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hymcache.dra.retry import Backoff, retried
from hymcache.errors import Unavailable


def test_waits_grow_up_to_the_longest() -> None:
    backoff = Backoff(first_s=1, factor=3, longest_s=10, jitter=0, attempts_max=6)
    assert list(backoff.delays_s(random.Random(1))) == [1, 3, 9, 10, 10]


@settings(deadline=None)
@given(failures=st.integers(1, 10_000), jitter=st.floats(0, 1), seed=st.integers())
def test_jitter_only_shortens_a_wait(failures: int, jitter: float, seed: int) -> None:
    plain = Backoff(jitter=0).delay_s(failures, random.Random(seed))
    shaken = Backoff(jitter=jitter).delay_s(failures, random.Random(seed))
    assert plain * (1 - jitter) <= shaken <= plain


class Attempts:
    """Fails so many times, then answers; remembers the waits."""

    def __init__(self, failures: int, error: type[Exception] = Unavailable) -> None:
        self.left = failures
        self.error = error
        self.count = 0
        self.waits: list[float] = []

    async def attempt(self) -> str:
        self.count += 1
        if self.left:
            self.left -= 1
            raise self.error(f"failure {self.count}")
        return "answer"

    async def sleep(self, delay_s: float) -> None:
        self.waits.append(delay_s)

    def run(self, attempts_max: int) -> str:
        backoff = Backoff(first_s=1, jitter=0, attempts_max=attempts_max)
        return asyncio.run(
            retried(self.attempt, retry_on=Unavailable, backoff=backoff, sleep=self.sleep)
        )


def test_an_attempt_that_succeeds_is_the_last() -> None:
    attempts = Attempts(failures=2)
    assert attempts.run(attempts_max=5) == "answer"
    assert (attempts.count, attempts.waits) == (3, [1, 2])


def test_the_last_error_reaches_the_caller() -> None:
    attempts = Attempts(failures=9)
    with pytest.raises(Unavailable, match="failure 3"):
        attempts.run(attempts_max=3)
    assert attempts.count == 3


def test_other_errors_are_not_tried_again() -> None:
    attempts = Attempts(failures=1, error=ValueError)
    with pytest.raises(ValueError, match="failure 1"):
        attempts.run(attempts_max=3)
    assert attempts.waits == []


@pytest.mark.parametrize(
    "wrong", [{"first_s": -1}, {"factor": 0.5}, {"jitter": 2}, {"attempts_max": 0}]
)
def test_a_backoff_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"attempts_max|not a backoff"):
        Backoff(**wrong)  # type: ignore[arg-type]
