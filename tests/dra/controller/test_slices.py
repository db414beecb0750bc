"""What a blade looks like in its slice."""

from __future__ import annotations

import copy
from dataclasses import replace

from hymcache.dra import names
from hymcache.dra.controller.slices import Features, make_slice, same
from tests.dra.controller.memory_fabric import BLOCK_MIB
from tests.dra.controller.parts import Parts, asynchronous


@asynchronous
async def test_quantities_are_the_same_however_the_server_writes_them() -> None:
    parts = Parts(knows_owners=True)
    await parts.housekeeping.look()
    (state,) = parts.book.states
    state.blade = replace(state.blade, total_mib=512_000)
    wanted = make_slice(state, parts.book, parts.settings, Features(), None)
    assert wanted is not None
    stored = copy.deepcopy(wanted)
    capacity = stored["spec"]["devices"][0]["capacity"][names.CAPACITY]
    assert capacity["value"] == "512000"
    capacity["value"] = "512k"
    assert same(wanted, stored)
    capacity["value"] = "511k"
    assert not same(wanted, stored)


@asynchronous
async def test_what_a_blade_refused_is_not_offered_until_memory_comes_back() -> None:
    parts = Parts(knows_owners=True)
    await parts.housekeeping.look()
    (state,) = parts.book.states

    def most() -> str | None:
        made = make_slice(state, parts.book, parts.settings, Features(), None)
        assert made is not None
        devices = made["spec"]["devices"]
        if not devices:
            return "0"
        policy = devices[0]["capacity"][names.CAPACITY]["requestPolicy"]
        text: str | None = policy["validRange"].get("max")
        assert int(policy["default"]) <= int(text or policy["default"])
        return text

    assert most() is None
    parts.book.refuse(state.blade.key, 4 * BLOCK_MIB, 10.0)
    assert most() == str(3 * BLOCK_MIB)
    parts.book.refuse(state.blade.key, BLOCK_MIB, 10.0)
    assert most() == "0"
    parts.now += 11.0
    assert parts.book.expire_quarantines()
    assert most() is None
    parts.book.refuse(state.blade.key, 2 * BLOCK_MIB, 10.0)
    parts.book.accept(state.blade.key)
    assert most() is None
