"""A blade gives each byte to one region at most, and all of them back."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hymcache.dra.simulator.hardware import Credentials, SimulatedBlade, make_blade
from hymcache.dra.simulator.refusal import Refusal

BLOCK_MIB = 64
CHANNELS = 8
BLOCKS_A_CHANNEL = 4


def new_blade(base_mib: int = 0) -> SimulatedBlade:
    return make_blade(
        "blade-0",
        Credentials(username="u", password="p", ip_address="127.0.0.1", port=1),
        base_mib=base_mib,
        block_mib=BLOCK_MIB,
        channels=CHANNELS,
        blocks_a_channel=BLOCKS_A_CHANNEL,
        hosts=("node-1",),
        ports=2,
    )


def require_sound(blade: SimulatedBlade) -> None:
    owned = Counter(name for region in blade.regions.values() for name in region.block_ids)
    assert all(count == 1 for count in owned.values())
    for block in blade.blocks.values():
        assert (block.region_id is not None) == (block.id in owned)
    ranges = sorted((r.offset_mib, r.offset_mib + r.size_mib) for r in blade.regions.values())
    end = blade.base_mib
    for start, stop in ranges:
        assert start >= end
        end = stop
    assert end <= blade.base_mib + blade.total_mib
    assert blade.allocated_mib == BLOCK_MIB * len(owned)


# No deadline: a busy machine is no fault of the blade's.
@settings(deadline=None)
@given(
    base_mib=st.sampled_from([0, 4096]),
    steps=st.lists(
        st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 900), st.booleans()), max_size=40
    ),
)
def test_no_two_regions_share_a_block_or_an_address(
    base_mib: int, steps: list[tuple[int, int, bool]]
) -> None:
    blade = new_blade(base_mib)
    for qos, size_mib, free in steps:
        if free and blade.regions:
            blade.free(next(iter(blade.regions)))
        else:
            with contextlib.suppress(Refusal):
                region = blade.compose(size_mib, qos, None)
                assert size_mib <= region.size_mib < size_mib + qos * BLOCK_MIB
                channels = Counter(blade.blocks[name].channel for name in region.block_ids)
                assert len(channels) == qos
                assert len(set(channels.values())) == 1
        require_sound(blade)
    for name in list(blade.regions):
        blade.free(name)
    assert blade.compose(blade.total_mib, CHANNELS, None).size_mib == blade.total_mib


def test_a_region_of_named_blocks_has_them() -> None:
    blade = new_blade()
    names = ["channel-0-block-1", "channel-3-block-0"]
    region = blade.compose_blocks(names)
    assert list(region.block_ids) == names
    require_sound(blade)


@pytest.mark.parametrize(
    ("names", "status"),
    [
        (["channel-0-block-0", "channel-0-block-0"], 400),
        (["channel-9-block-0"], 404),
        (["channel-1-block-0"], 409),
    ],
)
def test_blocks_that_cannot_be_had_are_refused(names: list[str], status: int) -> None:
    blade = new_blade()
    blade.compose_blocks(["channel-1-block-0"])
    with pytest.raises(Refusal) as raised:
        blade.compose_blocks(names)
    assert raised.value.status == status
    require_sound(blade)


def test_a_blade_with_fewer_channels_than_the_qos_is_a_conflict() -> None:
    credentials = Credentials(username="u", password="p", ip_address="h", port=1)
    blade = make_blade("b", credentials, base_mib=0, block_mib=64, channels=2, blocks_a_channel=8)
    with pytest.raises(Refusal, match="has 2 channels: QoS 4 needs more"):
        blade.compose(64, 4, None)


def test_a_power_cycle_is_over_when_the_blade_is_read_anew() -> None:
    blade = new_blade()
    region = blade.compose(64, 1, "claim-1")
    blade.power_cycle()
    # The service still believes in the region, and cannot do anything with the blade.
    assert blade.regions == {region.id: region}
    with pytest.raises(Refusal, match="resync"):
        blade.compose(64, 1, None)
    assert [lost.id for lost in blade.resync()] == [region.id]
    assert blade.allocated_mib == 0
    assert blade.resync() == []
