"""What both dialects have in common, against a simulated fabric manager and its hosts' agents."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import pairwise

import pytest

from hymcache.dra.fabric import Blade, FabricConflict, FabricManager, Region
from hymcache.errors import Unavailable
from hymcache.limits import MIB
from tests.dra.fabric.conftest import BLADE_MIB, BLADES, BLOCK_MIB, HOSTS, Fabric

# The first test starts a process, which takes long on a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


async def made(manager: FabricManager, fabric: Fabric, **changes: str | int) -> Region:
    """A region on both hosts."""
    request = fabric.request(**changes)  # type: ignore[arg-type]
    region = await manager.compose(request)
    for host in HOSTS:
        region = await manager.attach(region, host)
    return region


async def blade_of(manager: FabricManager, fabric: Fabric) -> Blade:
    blade = await manager.get_blade(fabric.blade)
    assert blade is not None
    return blade


def test_a_blade_tells_its_memory_and_its_hosts(fabric: Fabric) -> None:
    blade = fabric.run(lambda manager: blade_of(manager, fabric))
    assert blade.online
    assert (blade.total_mib, blade.allocated_mib, blade.free_mib) == (BLADE_MIB, 0, BLADE_MIB)
    assert (blade.block_mib, blade.channels) == (BLOCK_MIB, 8)
    assert blade.hosts == HOSTS


def test_all_blades_are_listed_in_order(fabric: Fabric) -> None:
    blades = fabric.run(lambda manager: manager.list_blades())
    assert len(blades) == BLADES
    assert [blade.key for blade in blades] == sorted(blade.key for blade in blades)
    assert fabric.blade in [blade.key for blade in blades]


def test_a_region_is_the_same_memory_on_all_its_hosts(fabric: Fabric) -> None:
    region = fabric.run(lambda manager: made(manager, fabric))
    assert region.size_mib == 512
    assert region.ready_hosts == HOSTS
    starts = {attachment.physical_start for attachment in region.attachments}
    assert len(starts) == 1
    first, second = (fabric.simulator.device(host, region.allocation_id) for host in HOSTS)
    assert first.stat().st_size == region.size_mib * MIB
    with first.open("r+b") as device:
        device.seek(300 * MIB)
        device.write(b"written on node-1")
    with second.open("rb") as same:
        same.seek(300 * MIB)
        assert same.read(17) == b"written on node-1"


def test_hosts_get_the_same_cdi_device_name(fabric: Fabric) -> None:
    region = fabric.run(lambda manager: made(manager, fabric))
    for host in HOSTS:
        spec = json.loads(fabric.simulator.cdi_spec(host, region.allocation_id).read_text())
        assert spec["kind"] == "cxl.seagate.com/dax"
        assert [device["name"] for device in spec["devices"]] == [region.allocation_id]


def test_regions_of_two_owners_share_no_byte(fabric: Fabric) -> None:
    async def scenario(manager: FabricManager) -> list[Region]:
        return list(
            await asyncio.gather(*(made(manager, fabric, owner=f"claim-{n}") for n in range(4)))
        )

    regions = fabric.run(scenario)
    assert len({region.memory_id for region in regions}) == 4
    assert len({region.allocation_id for region in regions}) == 4
    starts = sorted(region.attachments[0].physical_start or 0 for region in regions)
    for start, following in pairwise(starts):
        assert following - start >= 512 * MIB


def test_a_compose_whose_answer_was_lost_is_found_again(fabric: Fabric) -> None:
    async def scenario(manager: FabricManager) -> Region:
        taken = await manager.list_memory_ids(fabric.blade)
        request = replace(fabric.request(), taken=taken)
        fabric.fault("POST", drop=True, after=True)
        with pytest.raises(Unavailable):
            await manager.compose(request)
        return await manager.compose(replace(request, resumed=True))

    region = fabric.run(scenario)
    assert fabric.simulator.regions(fabric.blade.blade_id) == [region.memory_id]


def test_a_resumed_compose_without_an_earlier_region_makes_one(fabric: Fabric) -> None:
    async def scenario(manager: FabricManager) -> tuple[Region, Region]:
        other = await made(manager, fabric, owner="somebody-else")
        request = replace(fabric.request(), resumed=True, taken=frozenset({other.memory_id}))
        return other, await manager.compose(request)

    other, region = fabric.run(scenario)
    assert region.memory_id != other.memory_id
    assert len(fabric.simulator.regions(fabric.blade.blade_id)) == 2


def test_a_compose_resumed_by_another_process_finds_the_region(fabric: Fabric) -> None:
    first = fabric.run(lambda manager: manager.compose(fabric.request()))
    resumed = replace(fabric.request(), resumed=True)
    region = fabric.run(lambda manager: manager.compose(resumed))
    assert region.memory_id == first.memory_id
    assert region.allocation_id == first.allocation_id


def test_attaching_again_changes_nothing(fabric: Fabric) -> None:
    async def scenario(manager: FabricManager) -> tuple[Region, Region]:
        region = await made(manager, fabric)
        again = region
        for host in (*HOSTS, *HOSTS):
            again = await manager.attach(again, host)
        return region, again

    region, again = fabric.run(scenario)
    assert again == region


def test_detaching_takes_the_device_from_one_host_only(fabric: Fabric) -> None:
    async def scenario(manager: FabricManager) -> Region:
        region = await made(manager, fabric)
        region = await manager.detach(region, HOSTS[0])
        # Once more, as after a lost answer.
        return await manager.detach(region, HOSTS[0])

    region = fabric.run(scenario)
    assert region.ready_hosts == HOSTS[1:]
    assert not fabric.simulator.device(HOSTS[0], region.allocation_id).exists()
    assert not fabric.simulator.cdi_spec(HOSTS[0], region.allocation_id).exists()
    assert fabric.simulator.device(HOSTS[1], region.allocation_id).exists()


def test_freeing_gives_everything_back_and_may_be_repeated(fabric: Fabric) -> None:
    async def scenario(manager: FabricManager) -> tuple[Region, Blade]:
        region = await made(manager, fabric)
        await manager.free(region.ref, HOSTS)
        await manager.free(region.ref, HOSTS)
        return region, await blade_of(manager, fabric)

    region, blade = fabric.run(scenario)
    assert blade.allocated_mib == 0
    for host in HOSTS:
        assert not fabric.simulator.device(host, region.allocation_id).exists()
        assert not fabric.simulator.cdi_spec(host, region.allocation_id).exists()


def test_a_freed_region_has_left_no_bytes_for_the_next(fabric: Fabric) -> None:
    async def first(manager: FabricManager) -> Region:
        return await made(manager, fabric)

    async def second(manager: FabricManager) -> Region:
        await manager.free(region.ref, HOSTS)
        return await made(manager, fabric, owner="claim-2")

    region = fabric.run(first)
    with fabric.simulator.device(HOSTS[0], region.allocation_id).open("r+b") as device:
        device.write(b"secret")
    following = fabric.run(second)
    assert following.attachments[0].physical_start == region.attachments[0].physical_start
    with fabric.simulator.device(HOSTS[1], following.allocation_id).open("rb") as following_device:
        assert following_device.read(6) == bytes(6)


def test_a_device_in_use_is_not_taken_away(fabric: Fabric) -> None:
    async def free(manager: FabricManager) -> None:
        await manager.free(region.ref, HOSTS)

    region = fabric.run(lambda manager: made(manager, fabric))
    with (
        fabric.simulator.device(HOSTS[1], region.allocation_id).open("rb"),
        pytest.raises(FabricConflict, match=r"node-2.*\(pid \d+"),
    ):
        fabric.run(free)
    assert region.memory_id in fabric.simulator.regions(fabric.blade.blade_id)
    fabric.run(free)
    assert fabric.simulator.regions(fabric.blade.blade_id) == []


def test_a_full_blade_is_a_conflict(fabric: Fabric) -> None:
    async def scenario(manager: FabricManager) -> None:
        await manager.compose(fabric.request(size_mib=BLADE_MIB, qos=8))
        with pytest.raises(FabricConflict, match="no 1 unused resource blocks"):
            await manager.compose(fabric.request(owner="claim-2", size_mib=8, qos=1))

    fabric.run(scenario)


def test_a_host_without_a_link_is_a_conflict_until_the_cable_is_back(fabric: Fabric) -> None:
    async def scenario(manager: FabricManager) -> Region:
        region = await manager.compose(replace(fabric.request(), hosts=HOSTS[:1]))
        region = await manager.attach(region, HOSTS[0])
        with (
            fabric.simulator.link_down(fabric.blade.blade_id, "port-1"),
            pytest.raises(FabricConflict, match="no port with a working link to node-2"),
        ):
            await manager.attach(region, HOSTS[1])
        return await manager.attach(region, HOSTS[1])

    assert fabric.run(scenario).ready_hosts == HOSTS


def test_a_power_cycled_blade_is_offline_until_it_is_resynced(fabric: Fabric) -> None:
    async def scenario(manager: FabricManager) -> Region:
        region = await made(manager, fabric)
        fabric.simulator.power_cycle(fabric.blade.blade_id)
        assert not (await blade_of(manager, fabric)).online
        with pytest.raises(Unavailable, match="resync"):
            await manager.compose(fabric.request(owner="claim-2"))
        await manager.resync(fabric.blade)
        assert (await blade_of(manager, fabric)).online
        assert await manager.get_region(region.ref) is None
        await manager.free(region.ref, HOSTS)
        return region

    region = fabric.run(scenario)
    for host in HOSTS:
        assert not fabric.simulator.device(host, region.allocation_id).exists()


def test_regions_are_listed_without_those_that_are_known(fabric: Fabric) -> None:
    async def scenario(manager: FabricManager) -> tuple[Region, tuple[Region, ...]]:
        known = await made(manager, fabric, owner="known")
        orphan = await made(manager, fabric, owner="orphan")
        return orphan, await manager.list_regions(fabric.blade, skip={known.memory_id})

    orphan, listed = fabric.run(scenario)
    assert [region.memory_id for region in listed] == [orphan.memory_id]
    assert listed[0].allocation_id == orphan.allocation_id
