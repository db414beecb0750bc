from __future__ import annotations

from hymcache.connector.lookup_breaker import LookupBreaker
from hymcache.connector.stored_keys import StoredKeys


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def keys(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "big") for number in numbers)


def test_the_leading_known_keys_are_counted() -> None:
    stored = StoredKeys(Clock())
    stored.add(keys(1, 2, 4))
    assert stored.leading(keys(1, 2, 3, 4)) == 2
    assert stored.leading(keys(3)) == 0
    assert stored.leading(b"") == 0
    stored.discard(keys(1, 9))
    assert stored.leading(keys(1, 2)) == 0
    stored.clear()
    assert len(stored) == 0


def test_it_is_bounded_and_keeps_the_latest() -> None:
    stored = StoredKeys(Clock(), keys_max=3)
    stored.add(keys(1, 2, 3))
    stored.add(keys(1))
    stored.add(keys(4))
    assert len(stored) == 3
    assert stored.leading(keys(2)) == 0
    assert stored.leading(keys(3, 1, 4)) == 3


def test_a_belief_ends() -> None:
    clock = Clock()
    stored = StoredKeys(clock, belief_s=10)
    stored.add(keys(1))
    clock.now += 10
    assert stored.leading(keys(1)) == 1
    clock.now += 1
    assert stored.leading(keys(1)) == 0


def test_after_a_failure_one_lookup_in_each_pause_with_little_patience() -> None:
    clock = Clock()
    breaker = LookupBreaker(clock)
    assert breaker.wait_s() == breaker.wait_s() == 1.0
    breaker.failed()
    assert breaker.wait_s() is None
    clock.now += 0.6
    assert breaker.wait_s() == 0.05
    assert breaker.wait_s() is None
    breaker.failed()
    clock.now += 0.6
    assert breaker.wait_s() is None
    clock.now += 0.5
    assert breaker.wait_s() == 0.05
    for _ in range(10):
        breaker.failed()
    clock.now += 8.1
    assert breaker.wait_s() == 0.05
    breaker.succeeded()
    assert breaker.wait_s() == 1.0
