"""A fabric manager and agents that fail, with the real processes."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hymcache.address import Address
from hymcache.dra.fabric import (
    ApplianceId,
    BladeId,
    BladeKey,
    FabricDialect,
    FabricManager,
    FabricRejected,
    FabricSettings,
    FabricTimeouts,
    HostAgentSettings,
    HostId,
    Region,
)
from hymcache.dra.host_agent.backend import MemoryRegion, PhysicalRange
from hymcache.dra.host_agent.file_backend import DEFAULT_RANGE, FileBackend
from hymcache.dra.host_agent.service import HostAgentOptions, HostAgentService
from hymcache.dra.host_agent.sessions import Credentials
from hymcache.errors import Unavailable
from hymcache.limits import GIB
from tests.dra.fabric.conftest import HOSTS, Fabric, make_fabric
from tests.dra.simulator_process import APPLIANCE, SimulatorProcess

FIRST_BLADE = BladeKey(ApplianceId(APPLIANCE), BladeId("blade-0"))

# Each process takes a second to start, and many on a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_a_slow_answer_is_unavailable_in_time(fabric: Fabric) -> None:
    hasty = fabric.with_timeouts(FabricTimeouts(connect_s=1, answer_s=0.3, compose_s=0.3))
    fabric.fault("POST", delayS=5)
    begun = time.monotonic()
    with pytest.raises(Unavailable, match=r"no answer within 0\.3 s"):
        hasty.run(lambda manager: manager.compose(fabric.request()))
    assert time.monotonic() - begun < 4


def test_a_blade_that_cannot_be_read_does_not_hide_the_others(fabric: Fabric) -> None:
    fabric.fault("GET", status=500, times=1000)
    try:
        blades = fabric.run(lambda manager: manager.list_blades())
    finally:
        fabric.simulator.clear_faults()
    online = {blade.key: blade.online for blade in blades}
    assert online[fabric.blade] is False
    assert any(online.values())


def test_a_compose_whose_answer_was_late_is_found_when_it_is_resumed(fabric: Fabric) -> None:
    hasty = fabric.with_timeouts(FabricTimeouts(connect_s=1, compose_s=0.3))
    fabric.fault("POST", delayS=1.5, after=True)
    with pytest.raises(Unavailable):
        hasty.run(lambda manager: manager.compose(fabric.request()))
    resumed = replace(fabric.request(), resumed=True)
    region = fabric.run(lambda manager: manager.compose(resumed))
    assert fabric.simulator.regions(fabric.blade.blade_id) == [region.memory_id]


def test_assigning_freeing_and_reading_survive_single_failures(fabric: Fabric) -> None:
    async def scenario(manager: FabricManager) -> Region:
        region = await manager.compose(replace(fabric.request(), hosts=HOSTS[:1]))
        fabric.fault("PATCH", status=500)
        # The answer is lost once, after the port was assigned.
        fabric.fault("PATCH", drop=True, after=True)
        for host in HOSTS:
            region = await manager.attach(region, host)
        fabric.fault("GET", status=503)
        found = await manager.get_region(region.ref)
        assert found is not None
        fabric.fault("DELETE", drop=True, after=True)
        await manager.free(region.ref, HOSTS)
        return region

    region = fabric.run(scenario)
    assert region.ready_hosts == HOSTS
    assert fabric.simulator.regions(fabric.blade.blade_id) == []
    for host in HOSTS:
        assert not fabric.simulator.device(host, region.allocation_id).exists()


def test_partial_content_says_which_hosts_are_still_to_come(paper_fabric: Fabric) -> None:
    async def scenario(manager: FabricManager) -> tuple[Region, Region]:
        with paper_fabric.simulator.agent_cut_off("node-2"):
            partial = await manager.compose(paper_fabric.request())
            with pytest.raises(Unavailable, match=r"node-2.*cut off"):
                await manager.attach(partial, HOSTS[1])
        return partial, await manager.attach(partial, HOSTS[1])

    partial, complete = paper_fabric.run(scenario)
    assert partial.ready_hosts == HOSTS[:1]
    missing = partial.attachment(HOSTS[1])
    assert missing is not None
    assert "cut off" in missing.details
    assert complete.ready_hosts == HOSTS


def test_a_region_is_not_freed_while_a_host_cannot_be_asked(paper_fabric: Fabric) -> None:
    async def scenario(manager: FabricManager) -> None:
        region = await manager.compose(paper_fabric.request())
        with paper_fabric.simulator.agent_cut_off("node-1"), pytest.raises(Unavailable):
            await manager.free(region.ref, HOSTS)
        assert await manager.get_region(region.ref) is not None
        await manager.free(region.ref, HOSTS)
        assert await manager.get_region(region.ref) is None

    paper_fabric.run(scenario)


def test_a_region_of_another_allocation_is_not_freed(paper_fabric: Fabric) -> None:
    async def scenario(manager: FabricManager) -> None:
        first = await manager.compose(paper_fabric.request(owner="claim-1"))
        await manager.free(first.ref)
        second = await manager.compose(paper_fabric.request(owner="claim-2"))
        # Its name is used again: freeing the first once more must not take the second.
        assert second.memory_id == first.memory_id
        await manager.free(first.ref)
        assert await manager.get_region(first.ref) is None
        assert await manager.get_region(second.ref) is not None

    paper_fabric.run(scenario)


def test_a_surplus_region_of_the_same_owner_goes(paper_fabric: Fabric) -> None:
    async def scenario(manager: FabricManager) -> Region:
        await manager.compose(paper_fabric.request())
        await manager.compose(paper_fabric.request())
        return await manager.compose(replace(paper_fabric.request(), resumed=True))

    region = paper_fabric.run(scenario)
    assert paper_fabric.simulator.regions(paper_fabric.blade.blade_id) == [region.memory_id]


def test_shares_go_to_as_many_of_the_candidates(paper_fabric: Fabric) -> None:
    async def scenario(manager: FabricManager) -> tuple[Region, Region]:
        one = await manager.compose(replace(paper_fabric.request(owner="a"), share_count=1))
        with pytest.raises(FabricRejected, match="shareCount 3 is more than"):
            await manager.compose(replace(paper_fabric.request(owner="b"), share_count=3))
        return one, await manager.compose(paper_fabric.request(owner="c"))

    one, two = paper_fabric.run(scenario)
    assert (len(one.ready_hosts), len(two.ready_hosts)) == (1, 2)


def test_fencing_ends_who_holds_a_device(paper_fabric: Fabric) -> None:
    region = paper_fabric.run(lambda manager: manager.compose(paper_fabric.request()))
    device = paper_fabric.simulator.device(HOSTS[0], region.allocation_id)
    code = f"import time; f = open({str(device)!r}); print('open', flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        paper_fabric.run(lambda manager: manager.free(region.ref, HOSTS, fence=True))
        assert holder.wait(timeout=10) != 0
    assert paper_fabric.simulator.regions(paper_fabric.blade.blade_id) == []


def test_the_public_service_of_today_serves_one_region_a_blade(tmp_path: Path) -> None:
    with SimulatorProcess(
        tmp_path, "--dialect", "public", "--no-offsets", "--capacity", "4GiB", "--block", "512MiB"
    ) as simulator:
        fabric = make_fabric(simulator, FabricDialect.PUBLIC)
        fabric = replace(fabric, blade=FIRST_BLADE)

        async def scenario(manager: FabricManager) -> None:
            first = await manager.compose(fabric.request(owner="a"))
            with pytest.raises(FabricRejected, match=r"addressRangeOffsetMiB.*free memory-0"):
                await manager.compose(fabric.request(owner="b"))
            assert simulator.regions("blade-0") == [first.memory_id]
            first = await manager.attach(first, HOSTS[0])
            await manager.free(first.ref, HOSTS[:1])
            second = await manager.compose(fabric.request(owner="b"))
            second = await manager.attach(second, HOSTS[0])
            starts = {region.attachments[0].physical_start for region in (first, second)}
            assert len(starts) == 1

        fabric.run(scenario)


def test_an_agent_that_is_not_there_makes_its_host_unavailable(public_fabric: Fabric) -> None:
    agents = public_fabric.settings.agents
    assert agents is not None
    node_1 = public_fabric.simulator.addresses["agent of node-1"]
    # The address of node-1 with a host's name in it: only there does somebody listen.
    url = node_1.replace("127.0.0.1", "{host}")
    lost = HostAgentSettings(user_name=agents.user_name, password=agents.password, url=url)
    fabric = replace(public_fabric, settings=replace(public_fabric.settings, agents=lost))

    async def scenario(manager: FabricManager) -> None:
        region = await manager.compose(fabric.request())
        with pytest.raises(Unavailable, match="node-2"):
            await manager.attach(region, HOSTS[1])

    fabric.run(scenario)


class HostOfTwoBlades(FileBackend):
    """Memory of two blades, each at a place of its own."""

    def regions(self) -> tuple[MemoryRegion, ...]:
        (whole,) = super().regions()
        sizes = (2 * GIB, 4 * GIB)
        starts = (DEFAULT_RANGE.start, DEFAULT_RANGE.start + 64 * GIB)
        return tuple(
            replace(
                whole, name=f"region{number}", range=PhysicalRange(start, size), size_bytes=size
            )
            for number, (start, size) in enumerate(zip(starts, sizes, strict=True))
        )


def test_a_host_of_several_blades_has_each_where_its_size_says(tmp_path: Path) -> None:
    host = HostId("localhost")
    options = HostAgentOptions(
        listen=Address("127.0.0.1", 0),
        credentials=Credentials("user", "password"),
        state_folder=tmp_path / "state",
        cdi_root=tmp_path / "cdi",
    )
    with (
        HostAgentService(options, HostOfTwoBlades(tmp_path / "memory", host)) as agent,
        SimulatorProcess(
            tmp_path / "simulator",
            *("--dialect", "public", "--host", host, "--capacity", "4GiB", "--block", "512MiB"),
        ) as simulator,
    ):
        port = Address.parse(agent.endpoints["host agent"]).port
        settings = HostAgentSettings("user", "password", url=f"http://{{host}}:{port}")
        fabric = Fabric(
            simulator,
            FabricSettings(simulator.url, FabricDialect.PUBLIC, agents=settings),
            FIRST_BLADE,
        )

        async def scenario(manager: FabricManager) -> Region:
            region = await manager.compose(replace(fabric.request(), hosts=(host,)))
            return await manager.attach(region, host)

        region = fabric.run(scenario)
    (attachment,) = region.attachments
    assert attachment.physical_start == DEFAULT_RANGE.start + 64 * GIB


@pytest.mark.parametrize("dialect", list(FabricDialect))
def test_a_killed_fabric_manager_comes_back_with_its_regions(
    tmp_path: Path, dialect: FabricDialect
) -> None:
    options = ("--dialect", dialect, "--capacity", "4GiB", "--block", "512MiB")

    async def make(manager: FabricManager) -> Region:
        region = await manager.compose(fabric.request())
        for host in HOSTS:
            region = await manager.attach(region, host)
        return region

    async def free(manager: FabricManager) -> None:
        assert await manager.get_region(region.ref) is not None
        await manager.free(region.ref, HOSTS)

    with SimulatorProcess(tmp_path, *options) as simulator:
        fabric = replace(make_fabric(simulator, dialect), blade=FIRST_BLADE)
        region = fabric.run(make)
        simulator.kill()
    with SimulatorProcess(tmp_path, *options) as simulator:
        assert simulator.device(HOSTS[0], region.allocation_id).exists()
        fabric = replace(fabric, settings=replace(fabric.settings, url=simulator.url))
        fabric.run(free)
        assert simulator.regions("blade-0") == []
        assert not simulator.device(HOSTS[0], region.allocation_id).exists()
