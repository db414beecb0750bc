"""Regions whose making was refused, not answered, or answered too late; and those of strangers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hymcache.dra.controller.composer import NotYet
from hymcache.dra.controller.region_record import RecordState
from hymcache.dra.fabric import Attachment, FabricConflict, MemoryId, PortId
from hymcache.errors import Unavailable
from tests.dra.controller.memory_fabric import BLOCK_MIB
from tests.dra.controller.parts import HOSTS, Parts, asynchronous

ATTACHED = Attachment(HOSTS[0], PortId("port-0"), False)


async def _fail_to_compose(parts: Parts, error: Exception) -> None:
    await parts.housekeeping.look()
    parts.fabric.fails = error
    with pytest.raises(type(error)):
        await parts.composer.compose(parts.record())
    parts.fabric.fails = None


async def _free(parts: Parts) -> None:
    (record,) = parts.ledger
    freed = await parts.composer.free(record)
    assert freed.state is RecordState.FREED
    await parts.ledger.remove(freed)


@asynchronous
async def test_a_strangers_region_is_not_freed_for_an_attempt_that_made_none() -> None:
    parts = Parts(knows_owners=True)
    await _fail_to_compose(parts, Unavailable("no answer"))
    parts.put_region("strangers")
    await _free(parts)
    assert set(parts.fabric.regions) == {MemoryId("strangers")}


@asynchronous
async def test_nothing_is_looked_for_where_composing_was_refused() -> None:
    parts = Parts(knows_owners=False)
    await _fail_to_compose(parts, FabricConflict("no room"))
    parts.put_region("strangers")
    await _free(parts)
    assert set(parts.fabric.regions) == {MemoryId("strangers")}


@asynchronous
async def test_a_region_that_comes_late_is_freed_with_its_claim() -> None:
    parts = Parts(knows_owners=False, late_compose_s=100.0)
    await _fail_to_compose(parts, Unavailable("no answer"))
    (record,) = parts.ledger
    with pytest.raises(NotYet):
        await parts.composer.free(record)
    parts.now += 99.0
    (record,) = parts.ledger
    with pytest.raises(NotYet):
        await parts.composer.free(record)
    parts.put_region("late")
    await _free(parts)
    assert not parts.fabric.regions


@asynchronous
async def test_an_attempt_that_made_nothing_is_forgotten_in_the_end() -> None:
    parts = Parts(knows_owners=False, late_compose_s=100.0)
    await _fail_to_compose(parts, Unavailable("no answer"))
    (record,) = parts.ledger
    with pytest.raises(NotYet):
        await parts.composer.free(record)
    assert parts.book.leaking_mib(parts.book.states[0]) == BLOCK_MIB
    parts.now += 101.0
    await _free(parts)
    assert not len(parts.ledger)


@asynchronous
@pytest.mark.parametrize("change", [{"size_mib": 2 * BLOCK_MIB}, {"attachments": (ATTACHED,)}])
async def test_a_name_that_came_back_is_not_freed_for_the_last_who_had_it(
    change: dict[str, Any],
) -> None:
    parts = Parts(knows_owners=False)
    await parts.housekeeping.look()
    record = await parts.composer.compose(parts.record())
    # Freed, but the ledger was not told; then somebody else composed.
    await parts.ledger.put(record.moved(RecordState.DETACHED, parts.now))
    assert record.memory_id is not None
    region = parts.fabric.regions[record.memory_id]
    parts.fabric.regions[record.memory_id] = replace(region, **change)
    await _free(parts)
    assert set(parts.fabric.regions) == {record.memory_id}


@asynchronous
@pytest.mark.parametrize("wanted", [True, False])
async def test_a_region_with_the_name_of_one_that_was_freed_is_not_forgotten(wanted: bool) -> None:
    parts = Parts(knows_owners=False)
    await parts.housekeeping.look()
    first = await parts.composer.compose(parts.record("uid-1", 2 * BLOCK_MIB))
    # It is freed, and the name used again, but neither answer comes.
    first = await parts.ledger.put(first.moved(RecordState.DETACHED, parts.now))
    parts.fabric.regions.clear()
    parts.fabric.fails = Unavailable("no answer")
    with pytest.raises(Unavailable):
        await parts.composer.compose(parts.record("uid-2"))
    parts.fabric.fails = None
    assert first.memory_id is not None
    parts.put_region(first.memory_id)
    (second,) = [record for record in parts.ledger if record.key != first.key]
    step = parts.composer.compose if wanted else parts.composer.free
    with pytest.raises(NotYet, match="is being freed"):
        await step(second)
    assert (await parts.composer.free(first)).state is RecordState.FREED
    (second,) = [record for record in parts.ledger if record.key != first.key]
    settled = await step(second)
    assert parts.fabric.composed == 1
    assert (set(parts.fabric.regions) == {settled.memory_id}) == wanted
    assert bool(parts.fabric.regions) == wanted
