"""A host's allocations: their records, CDI specs and devices agree, whenever the agent dies."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from hymcache.dra.cdi import read_cdi_spec
from hymcache.dra.host_agent.allocations import HostAllocations, HostState
from hymcache.dra.host_agent.backend import PhysicalRange
from hymcache.dra.host_agent.dax_bus import DaxBus
from hymcache.dra.host_agent.holders import DeviceIdentity, find_holders
from hymcache.dra.host_agent.resources import AllocationPhase, DaxConflict, DaxDevice, Holder
from hymcache.dra.host_agent.revocation import FindHolders
from hymcache.dra.host_agent.sysfs_backend import SysfsBackend
from hymcache.dra.state_file import StateFile
from hymcache.errors import ConfigError, DeviceError, Unavailable
from tests.dra.host_agent.conftest import Hold
from tests.dra.host_agent.emulated_sysfs import GIB, MIB, Crashed, EmulatedSysfs

_START = 4 * GIB


class Host:
    """An agent without its REST side; `restart` makes a new one of what is on disk."""

    def __init__(
        self, kernel: EmulatedSysfs, folder: Path, find: FindHolders = find_holders
    ) -> None:
        self.kernel = kernel
        self._folder = folder
        self._find = find
        self.cdi_root = folder / "cdi"
        self.restart()

    def restart(self) -> None:
        self.allocations = HostAllocations(
            SysfsBackend(self.kernel, self._folder / "dev", self._find),
            StateFile(self._folder / "state.json", HostState),
            self.cdi_root,
            find=self._find,
        )
        self.allocations.recover()

    def materialize(self, name: str, offset: int, size: int) -> DaxDevice:
        return asyncio.run(self.allocations.materialize(name, _START + offset, size))[0]

    def unmaterialize(
        self, name: str, *, fence: bool = False, wait_s: float = 0
    ) -> tuple[Holder, ...]:
        return asyncio.run(self.allocations.unmaterialize(name, fence=fence, wait_s=wait_s))

    def phases(self) -> dict[str, AllocationPhase]:
        return {device.allocation_id: device.phase for device in self.allocations.list_all()}

    def check(self) -> None:
        """Records, specs and the kernel's devices say the same."""
        ready = {
            device.allocation_id: device
            for device in self.allocations.list_all()
            if device.phase is AllocationPhase.READY
        }
        assert {path.stem for path in self.cdi_root.glob("*.json")} == set(ready)
        devices = {
            device.ranges[0]: name
            for name, device in self.kernel.devices.items()
            if device.ranges and device.driver == "device_dax"
        }
        for name, device in ready.items():
            last = device.physical_start + device.size_bytes - 1
            kernel_name = devices[device.physical_start, last]
            spec = read_cdi_spec(self.cdi_root, name)
            assert spec is not None
            assert spec.container_path == device.path == f"/dev/{kernel_name}"
            assert spec.size_bytes == device.size_bytes


def _nobody(_identity: DeviceIdentity, **_arguments: object) -> tuple[Holder, ...]:
    """For tests without holders: looking for them takes most of the time."""
    return ()


@pytest.fixture
def host(kernel: EmulatedSysfs, tmp_path: Path) -> Host:
    return Host(kernel, tmp_path)


def test_an_allocation_is_recorded_made_and_offered(host: Host) -> None:
    device = host.materialize("a", 256 * MIB, 4 * MIB)
    assert device == DaxDevice(
        allocation_id="a",
        path="/dev/dax0.1",
        size_bytes=4 * MIB,
        physical_start=_START + 256 * MIB,
        cdi_name="cxl.seagate.com/dax=a",
    )
    host.check()
    assert host.unmaterialize("a") == ()
    assert host.phases() == {}
    host.check()
    assert host.unmaterialize("a") == ()


def test_asking_again_changes_nothing(host: Host) -> None:
    first = asyncio.run(host.allocations.materialize("a", _START, 2 * MIB))
    second = asyncio.run(host.allocations.materialize("a", _START, 2 * MIB))
    assert (first[0], first[1], second[1]) == (second[0], True, False)
    assert host.allocations.counts.materialized == 1


@pytest.mark.parametrize(
    ("name", "offset", "size", "told"),
    [
        ("a", 4 * MIB, 4 * MIB, "is materialised as 0x100000000-0x1003fffff"),
        ("a", 0, 2 * MIB, "is materialised as"),
        ("b", 2 * MIB, 4 * MIB, "has bytes of the allocation a"),
        ("b", 0, GIB, "has bytes of the allocation a"),
    ],
)
def test_bytes_are_given_once(host: Host, name: str, offset: int, size: int, told: str) -> None:
    host.materialize("a", 0, 4 * MIB)
    with pytest.raises(DaxConflict) as caught:
        host.materialize(name, offset, size)
    assert told in str(caught.value)
    assert host.phases() == {"a": AllocationPhase.READY}
    host.check()


def test_what_cannot_be_made_is_not_remembered(host: Host) -> None:
    with pytest.raises(ConfigError):
        host.materialize("a", 2 * GIB, 2 * MIB)
    with pytest.raises(ConfigError, match="not a range"):
        host.materialize("a", (1 << 64) - _START - MIB, 2 * MIB)
    assert host.phases() == {}
    assert host.allocations.counts.failed == 1


def test_a_held_device_stays_and_is_offered_to_no_new_container(
    host: Host, hold: Hold, tmp_path: Path
) -> None:
    host.materialize("a", 0, 2 * MIB)
    holder = hold(tmp_path / "dev/dax0.1")
    (found,) = host.unmaterialize("a")
    assert found.pid == holder.pid
    assert host.phases() == {"a": AllocationPhase.DRAINING}
    assert read_cdi_spec(host.cdi_root, "a") is None
    assert host.kernel.devices["dax0.1"].driver == "device_dax"
    holder.close_device()
    assert host.unmaterialize("a") == ()
    assert host.phases() == {}


def test_a_drained_allocation_may_be_offered_again(host: Host, hold: Hold, tmp_path: Path) -> None:
    host.materialize("a", 0, 2 * MIB)
    hold(tmp_path / "dev/dax0.1")
    assert host.unmaterialize("a")
    assert host.materialize("a", 0, 2 * MIB).path == "/dev/dax0.1"
    host.check()


def test_a_fence_ends_the_holder_and_the_device_goes(
    host: Host, hold: Hold, tmp_path: Path
) -> None:
    host.materialize("a", 0, 2 * MIB)
    holder = hold(tmp_path / "dev/dax0.1")
    assert host.unmaterialize("a", fence=True) == ()
    assert holder.process.wait(10) == -9
    assert host.allocations.counts.fenced == 1
    host.check()


def test_somebody_who_comes_after_the_look_is_seen(
    kernel: EmulatedSysfs, tmp_path: Path, hold: Hold
) -> None:
    def find(identity: DeviceIdentity, **_arguments: object) -> tuple[Holder, ...]:
        found = find_holders(identity)
        if not found and identity.container_path == "/dev/dax0.1":
            hold(tmp_path / "dev/dax0.1")
        return found

    host = Host(kernel, tmp_path, find)
    host.materialize("a", 0, 2 * MIB)
    assert len(host.unmaterialize("a")) == 1
    assert host.kernel.devices["dax0.1"].driver == "device_dax"


def test_one_call_at_a_time_for_an_allocation(
    host: Host, hold: Hold, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hymcache.dra.host_agent.allocations._TURN_TIMEOUT_S", 0.2)
    host.materialize("a", 0, 2 * MIB)
    holder = hold(tmp_path / "dev/dax0.1")

    async def both() -> None:
        allocations = host.allocations
        going = asyncio.create_task(allocations.unmaterialize("a", fence=False, wait_s=30))
        await asyncio.sleep(0.2)
        with pytest.raises(Unavailable, match="an earlier request for it is under way"):
            await allocations.materialize("a", _START, 2 * MIB)
        # Others are not held up.
        await allocations.materialize("b", _START + 2 * MIB, 2 * MIB)
        await asyncio.to_thread(holder.end)
        assert await going == ()

    asyncio.run(both())
    assert host.phases() == {"b": AllocationPhase.READY}
    host.check()


# --- restarts ----------------------------------------------------------------------------------


def test_after_a_restart_of_the_agent_all_is_as_it_was(host: Host) -> None:
    device = host.materialize("a", 0, 2 * MIB)
    writes = len(host.kernel.writes)
    (host.cdi_root / "a.json").unlink()
    host.restart()
    assert len(host.kernel.writes) == writes
    assert host.allocations.list_all() == (device,)
    host.check()


def test_after_a_restart_of_the_host_the_devices_are_made_again(host: Host) -> None:
    host.materialize("a", 256 * MIB, 2 * MIB)
    host.materialize("b", 0, 2 * MIB)
    host.unmaterialize("a")
    host.materialize("c", 8 * MIB, 2 * MIB)
    host.kernel.reboot()
    host.restart()
    assert host.phases() == {"b": AllocationPhase.READY, "c": AllocationPhase.READY}
    assert host.allocations.counts.recovered == 2
    host.check()


def test_what_cannot_be_made_again_is_told_and_holds_up_nothing(host: Host) -> None:
    host.materialize("a", 0, 2 * MIB)
    host.materialize("b", 4 * MIB, 2 * MIB)
    host.kernel.reboot()

    def refuse(path: str, value: str) -> None:
        if path.endswith("mapping") and value.startswith(f"{_START:x}"):
            raise DeviceError(f"/sys/{path}: Cannot allocate memory", 12)

    host.kernel.before_write = refuse
    host.restart()
    assert host.phases() == {"a": AllocationPhase.FAILED, "b": AllocationPhase.READY}
    assert "Cannot allocate memory" in host.allocations.list_all()[0].message
    host.check()
    host.kernel.before_write = lambda _path, _value: None
    assert host.materialize("a", 0, 2 * MIB).phase is AllocationPhase.READY
    host.check()


def test_a_drained_allocation_is_not_offered_again_by_a_restart(
    host: Host, hold: Hold, tmp_path: Path
) -> None:
    host.materialize("a", 0, 2 * MIB)
    hold(tmp_path / "dev/dax0.1")
    host.unmaterialize("a")
    host.restart()
    assert host.phases() == {"a": AllocationPhase.DRAINING}
    assert read_cdi_spec(host.cdi_root, "a") is None
    assert host.unmaterialize("a", fence=True) == ()


@pytest.mark.parametrize("is_rebooted", [False, True])
def test_a_crash_at_any_write_of_either_is_taken_up(tmp_path: Path, is_rebooted: bool) -> None:
    for crash_at in range(12):
        folder = tmp_path / str(crash_at)
        kernel = EmulatedSysfs(folder / "dev", find=_nobody)
        host = Host(kernel, folder, _nobody)
        kernel.crash_at_write = crash_at
        crashes = 0
        steps: tuple[Callable[[], object], ...] = (
            partial(host.materialize, "a", 8 * MIB, 4 * MIB),
            partial(host.unmaterialize, "a"),
            partial(host.materialize, "b", 10 * MIB, 2 * MIB),
        )
        for step in steps:
            try:
                step()
            except Crashed:
                crashes += 1
                kernel.crash_at_write = None
                if is_rebooted:
                    kernel.reboot()
                host.restart()
                host.check()
                step()
            host.check()
        # 5 writes of the first step, 4 of the second, 3 of the third.
        assert crashes == 1, crash_at
        assert host.phases() == {"b": AllocationPhase.READY}
        assert not any(device.is_idle for device in DaxBus(kernel).devices())
        kernel.close()


@pytest.mark.parametrize("seed", range(3))
def test_records_and_kernel_agree_after_anything(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    kernel = EmulatedSysfs(tmp_path / "dev", size=64 * MIB, find=_nobody)
    host = Host(kernel, tmp_path, _nobody)
    expected: dict[str, PhysicalRange] = {}
    for _ in range(40):
        name = f"r{chance.randrange(6)}"
        match chance.randrange(4):
            case 0 | 1:
                size = chance.randint(1, 8) * 2 * MIB
                wanted = PhysicalRange(_START + chance.randrange(28) * 2 * MIB, size)
                others = [taken for other, taken in expected.items() if other != name]
                may = (
                    expected.get(name, wanted) == wanted
                    and not any(taken.overlaps(wanted) for taken in others)
                    and wanted.end <= _START + 64 * MIB
                )
                try:
                    host.materialize(name, wanted.start - _START, size)
                    assert may
                    expected[name] = wanted
                except (DaxConflict, ConfigError):
                    assert not may
            case 2:
                assert host.unmaterialize(name) == ()
                expected.pop(name, None)
            case 3:
                if chance.random() < 0.3:
                    kernel.reboot()
                host.restart()
        host.check()
        assert {
            device.allocation_id: PhysicalRange(device.physical_start, device.size_bytes)
            for device in host.allocations.list_all()
        } == expected
    kernel.close()
