"""Regions that are nobody's: counted, collected, and never the end of the controller."""

from __future__ import annotations

import asyncio

import pytest

from hymcache.dra.cluster import ClusterUnavailable, ObjectConflict, Rejected
from hymcache.dra.fabric import MemoryId
from tests.dra.controller.memory_fabric import BLOCK_MIB
from tests.dra.controller.parts import CLUSTER, Parts, asynchronous


async def _look_twice(parts: Parts) -> None:
    await parts.housekeeping.look()
    parts.now += parts.settings.orphan_grace_s + 1
    await parts.housekeeping.look()


@asynchronous
async def test_a_region_beside_that_of_a_claim_is_counted_and_collected() -> None:
    parts = Parts(knows_owners=True)
    await parts.housekeeping.look()
    record = await parts.composer.compose(parts.record())
    # The first request was answered after its time, when the second had made another.
    parts.put_region("surplus", owner=record.key.owner(CLUSTER))
    await parts.housekeeping.look()
    (state,) = parts.book.states
    assert state.foreign_mib == BLOCK_MIB
    await _look_twice(parts)
    (orphan,) = parts.orphans
    assert orphan.memory_id == "surplus"
    assert orphan.key.claim_uid != record.key.claim_uid
    await parts.composer.free(orphan)
    assert record.memory_id is not None
    assert set(parts.fabric.regions) == {record.memory_id}


@asynchronous
async def test_an_orphan_whose_record_got_no_answer_is_collected_all_the_same() -> None:
    parts = Parts(knows_owners=True)
    parts.put_region("orphan", owner=f"uid-9/share-1@{CLUSTER}")
    await parts.housekeeping.look()
    parts.now += parts.settings.orphan_grace_s + 1
    # The request is carried out; its answer is lost.
    parts.lose_answers = 1
    await parts.housekeeping.look()
    assert not parts.orphans
    await parts.housekeeping.look()
    assert [orphan.memory_id for orphan in parts.orphans] == [MemoryId("orphan")]


@asynchronous
@pytest.mark.parametrize(
    "error",
    [ClusterUnavailable("away"), Rejected("forbidden (403)", 403), ObjectConflict("other", 409)],
    ids=["unavailable", "forbidden", "conflict"],
)
async def test_what_the_api_server_refuses_does_not_end_the_looks(error: Exception) -> None:
    parts = Parts(knows_owners=True)
    parts.put_region("orphan", owner=f"uid-9/share-1@{CLUSTER}")
    await parts.housekeeping.look()
    parts.now += parts.settings.orphan_grace_s + 1
    parts.trouble.append(error)
    await parts.housekeeping.look()
    assert parts.housekeeping.counters.failures == 1
    await parts.housekeeping.look()
    assert len(parts.orphans) == 1


@asynchronous
async def test_a_region_with_an_odd_name_is_collected() -> None:
    parts = Parts(knows_owners=False, exclusive=True)
    parts.put_region("Region_7")
    parts.put_region("region-7")
    await _look_twice(parts)
    assert {orphan.memory_id for orphan in parts.orphans} == {"Region_7", "region-7"}
    names = [item["metadata"]["name"] for item in parts.store.items("ConfigMap")]
    assert len(set(names)) == 2


@asynchronous
async def test_looks_that_are_asked_for_all_the_time_come_seldom() -> None:
    parts = Parts(knows_owners=True)
    running = asyncio.create_task(parts.housekeeping.run())
    for _ in range(100):
        parts.housekeeping.look_again()
        await asyncio.sleep(0.01)
    running.cancel()
    assert parts.housekeeping.counters.looks == 1
