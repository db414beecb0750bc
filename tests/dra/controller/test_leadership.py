"""Who leads, and that those who do not, do not ask all the time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from hymcache.bench.fake_cluster.feature_gates import FeatureGates
from hymcache.bench.fake_cluster.object_store import ObjectStore
from hymcache.dra.cluster import ClusterUnavailable
from hymcache.dra.controller import LeaseTimes
from hymcache.dra.controller.leadership import Leadership
from tests.dra.controller.driver import until
from tests.dra.controller.parts import asynchronous
from tests.dra.controller.store_client import StoreClient

TIMES = LeaseTimes(duration_s=2.0, renew_deadline_s=1.0, retry_s=0.05)


def candidate(
    store: ObjectStore, identity: str, count: Callable[[], None] = lambda: None
) -> Leadership:
    return Leadership(
        StoreClient(store, count),
        namespace="driver",
        name="lease",
        identity=identity,
        times=TIMES,
        clock=time.monotonic,
    )


@asynchronous
async def test_who_stands_by_watches_the_lease_instead_of_asking_for_it() -> None:
    store, requests = ObjectStore(FeatureGates()), [0]

    def count() -> None:
        requests[0] += 1

    leader, other = candidate(store, "a"), candidate(store, "b", count)
    await leader.acquire()
    keeping = asyncio.create_task(leader.keep())
    standing_by = asyncio.create_task(other.acquire())
    # Longer than the lease: its renewals are seen.
    await asyncio.sleep(2 * TIMES.duration_s)
    assert leader.leading
    assert not other.leading
    assert requests[0] <= 4
    keeping.cancel()
    await leader.release()
    await until(lambda: other.leading, "the other leads at once")
    await standing_by


@asynchronous
async def test_an_api_server_that_is_away_is_not_asked_all_the_time() -> None:
    store, requests = ObjectStore(FeatureGates()), [0]

    def refuse() -> None:
        requests[0] += 1
        if requests[0] > 1:
            raise ClusterUnavailable("away")

    leader, other = candidate(store, "a"), candidate(store, "b", refuse)
    await leader.acquire()
    standing_by = asyncio.create_task(other.acquire())
    # The lease ends meanwhile.
    await asyncio.sleep(2 * TIMES.duration_s)
    assert 2 <= requests[0] <= 8
    standing_by.cancel()


@asynchronous
async def test_a_lease_of_a_life_before_is_not_waited_for() -> None:
    store, requests = ObjectStore(FeatureGates()), [0]

    def lose_one() -> None:
        requests[0] += 1
        if requests[0] == 2:
            raise ClusterUnavailable("lost")

    await candidate(store, "a").acquire()
    again = candidate(store, "a", lose_one)
    begun = time.monotonic()
    await again.acquire()
    assert requests[0] >= 4
    assert time.monotonic() - begun < TIMES.duration_s * 0.8


@asynchronous
async def test_who_stands_by_leads_when_the_lease_has_ended() -> None:
    store = ObjectStore(FeatureGates())
    leader, other = candidate(store, "a"), candidate(store, "b")
    await leader.acquire()
    # It renews the lease no more.
    begun = time.monotonic()
    await other.acquire()
    assert time.monotonic() - begun >= TIMES.duration_s * 0.9
    assert not leader.leading
