"""The host agent on real device-dax memory: in two guests that share it, under two kernels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testbed.dax_bytes import move_dax_bytes
from tests.testbed.guest import PYTHON, Guest
from tests.testbed.testbed import Testbed

_HERE = Path(__file__).resolve()
_CLIENT = "tests.dra.host_agent.guest_client"
_HOLDER = f"{PYTHON} {_HERE.with_name('guest_holder.py')}"
_SPLIT = _HERE.parents[2] / "testbed" / "split_dax.sh"
_PORT = 8443
_START_DEADLINE_S = 240
# As long as all tests of the module may take.
_DEADLINE_S = 2400
_FOLDER = "/run/host-agent"

# The first test waits for two guests and two agents to start.
pytestmark = pytest.mark.timeout(600)

MIB = 1 << 20


class GuestAgent:
    """The agent's process in a guest."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest
        self.base = int(guest.run("cat /sys/bus/dax/devices/dax0.0/resource").stdout, 16)
        guest.run(
            f"mkdir -p {_FOLDER}/credentials; printf driver >{_FOLDER}/credentials/username; "
            f"printf secret >{_FOLDER}/credentials/password"
        )

    def begin(self) -> None:
        """Starts it; `wait_ready` waits, so that two guests start at the same time."""
        self.process = self.guest.start_python(
            *("hymcache", "dra", "host-agent", "--verbose", "--listen", f"127.0.0.1:{_PORT}"),
            *("--credentials", f"{_FOLDER}/credentials", "--state", f"{_FOLDER}/state"),
            *("--cdi-root", f"{_FOLDER}/cdi"),
            deadline_s=_DEADLINE_S,
            outlives_test=True,
        )

    def wait_ready(self) -> None:
        self.process.wait_for_output("hymcache: ready", deadline_s=_START_DEADLINE_S)

    def kill(self) -> None:
        self.guest.end_command(self.process)
        self.process.wait(check=False)

    def materialize(self, name: str, offset: int, size: int) -> dict[str, Any]:
        answer = self._ask("materialize", name, str(self.base + offset), str(size))
        assert answer["status"] in {200, 201}, answer
        found: dict[str, Any] = answer["Oem"]["CxlHost"]
        return found

    def unmaterialize(self, name: str, wait_s: float = 0, *, fence: bool = False) -> list[int]:
        """The holders' process ids; none when the device is gone."""
        answer = self._ask("unmaterialize", name, str(wait_s), *(["fence"] if fence else []))
        if answer["status"] == 200:
            return []
        assert answer["status"] == 409, answer
        information = answer["error"]["@Message.ExtendedInfo"][0]
        return [holder["Pid"] for holder in information["Oem"]["CxlHost"]["Holders"]]

    def phases(self) -> dict[str, str]:
        members = self._ask("list")["Members"]
        return {chunk["Id"]: chunk["Oem"]["CxlHost"]["Phase"] for chunk in members}

    def cdi_edits(self, name: str) -> dict[str, Any]:
        spec = json.loads(self.guest.run(f"cat {_FOLDER}/cdi/{name}.json").stdout)
        edits: dict[str, Any] = spec["devices"][0]["containerEdits"]
        return edits

    def hold(self, device: str, how: str, prefix: str = "") -> int:
        """The process id of one that holds the device."""
        command = self.guest.start_command(f"exec {prefix} {_HOLDER} {device} {how}")
        return int(command.wait_for_output("holding").split()[0])

    def lives(self, pid: int) -> bool:
        return self.guest.run(f"[[ -d /proc/{pid} ]]", check=False).status == 0

    def remove_all(self) -> None:
        for name in self.phases():
            assert self.unmaterialize(name, fence=True) == []

    def close(self) -> None:
        """Leaves the guest as it was: dax0.0 over all of the region."""
        self.kill()
        self.guest.run(f"bash {_SPLIT} whole; rm -rf {_FOLDER}")

    def _ask(self, *arguments: str) -> dict[str, Any]:
        printed = self.guest.run_python(_CLIENT, str(_PORT), *arguments, deadline_s=150).stdout
        answer: dict[str, Any] = json.loads(printed)
        return answer


@pytest.fixture(scope="module")
def running_agents(booted_testbed: Testbed) -> Iterator[tuple[GuestAgent, ...]]:
    """An agent in each guest: it takes long to start on an emulated processor."""
    booted_testbed.ensure_ready()
    made = tuple(GuestAgent(guest) for guest in booted_testbed.guests)
    for agent in made:
        agent.begin()
    for agent in made:
        agent.wait_ready()
    yield made
    for agent in made:
        agent.close()
        assert "Oops" not in agent.guest.run("dmesg").stdout


@pytest.fixture
def agents(
    testbed: Testbed, running_agents: tuple[GuestAgent, ...]
) -> Iterator[tuple[GuestAgent, ...]]:
    """The agents of both guests, without allocations."""
    yield running_agents
    for agent in running_agents:
        agent.remove_all()


@pytest.mark.testbed("hmem")
def test_a_region_is_the_same_bytes_on_both_hosts(agents: tuple[GuestAgent, ...]) -> None:
    first, second = agents
    # Another device first: numbers are each host's own, addresses are not.
    first.materialize("other", 0, 4 * MIB)
    devices = [agent.materialize("region", 64 * MIB, 8 * MIB) for agent in agents]
    assert [device["DaxDevice"] for device in devices] == ["/dev/dax0.2", "/dev/dax0.1"]
    for agent, device in zip(agents, devices, strict=True):
        path = device["DaxDevice"]
        assert device["CdiDevice"] == "cxl.seagate.com/dax=region"
        edits = agent.cdi_edits("region")
        assert edits["env"] == [f"CXL_DAX_DEVICE={path}", f"CXL_DAX_SIZE={8 * MIB}"]
        assert edits["deviceNodes"][0]["path"] == path
        start = agent.base + 64 * MIB
        shown = agent.guest.run(
            f"cat /sys/bus/dax/devices/{Path(path).name}/mapping0/{{start,end}}"
        )
        assert shown.stdout.split() == [f"{start:#x}", f"{start + 8 * MIB - 1:#x}"]
    move_dax_bytes(first.guest, "write", "/dev/dax0.2", 4 * MIB, 65536, 7)
    move_dax_bytes(second.guest, "verify", "/dev/dax0.1", 4 * MIB, 65536, 7)
    move_dax_bytes(second.guest, "write", "/dev/dax0.1", 0, 65536, 8)
    move_dax_bytes(first.guest, "verify", "/dev/dax0.2", 0, 65536, 8)
    assert first.unmaterialize("region") == []
    first.guest.run(f"[[ ! -e /dev/dax0.2 && ! -e {_FOLDER}/cdi/region.json ]]")
    # What one host lets go of, the other keeps.
    move_dax_bytes(second.guest, "verify", "/dev/dax0.1", 0, 65536, 8)


@pytest.mark.testbed("hmem")
def test_a_held_device_is_not_unbound(agents: tuple[GuestAgent, ...]) -> None:
    agent = agents[0]
    path = agent.materialize("held", 0, 4 * MIB)["DaxDevice"]
    holder = agent.hold(path, "map")
    assert agent.unmaterialize("held") == [holder]
    agent.guest.run(f"[[ -c {path} && ! -e {_FOLDER}/cdi/held.json ]]")
    assert agent.phases() == {"held": "Draining"}
    assert agent.lives(holder)
    # It waits for the end of the holder, and then the device goes.
    agent.guest.start_command(f"sleep 3; kill {holder}")
    assert agent.unmaterialize("held", 60) == []
    agent.guest.run(f"[[ ! -e {path} ]]")
    # On request, the holder is ended.
    path = agent.materialize("held", 0, 4 * MIB)["DaxDevice"]
    holder = agent.hold(path, "map")
    assert agent.unmaterialize("held", fence=True) == []
    assert not agent.lives(holder)
    agent.guest.run(f"[[ ! -e {path} ]]")


@pytest.mark.testbed("hmem")
def test_memory_that_is_registered_for_rdma_is_held(agents: tuple[GuestAgent, ...]) -> None:
    pytest.importorskip("pyverbs", reason="no pyverbs for this Python: see docs/testbed.md")
    agent = agents[0]
    agent.guest.run(
        "modprobe rdma_rxe; modprobe ib_uverbs; cd /sys/class/net; "
        "rdma link show rxe0/1 >/dev/null 2>&1 || rdma link add rxe0 type rxe netdev e*"
    )
    path = agent.materialize("registered", 0, 4 * MIB)["DaxDevice"]
    # In a mount namespace, as a container is: neither open nor mapped any more, but registered.
    holder = agent.hold(path, "rdma", "unshare --mount")
    maps = agent.guest.run(f"cat /proc/{holder}/maps; ls -l /proc/{holder}/fd").stdout
    assert "dax" not in maps
    assert agent.unmaterialize("registered") == [holder]
    agent.guest.run(f"[[ -c {path} ]]")
    # The kernel gives the memory back before the device goes: it would crash otherwise.
    assert agent.unmaterialize("registered", fence=True) == []
    assert not agent.lives(holder)
    agent.guest.run(f"[[ ! -e {path} ]]; rdma link delete rxe0")


@pytest.mark.testbed("hmem")
def test_devices_are_found_again_by_an_agent_that_was_killed(
    agents: tuple[GuestAgent, ...],
) -> None:
    agent = agents[1]
    before = agent.materialize("kept", 32 * MIB, 4 * MIB)
    move_dax_bytes(agent.guest, "write", before["DaxDevice"], 0, 4096, 9)
    agent.kill()
    agent.guest.run(f"rm {_FOLDER}/cdi/kept.json")
    agent.begin()
    agent.wait_ready()
    assert agent.phases() == {"kept": "Ready"}
    assert agent.cdi_edits("kept")["deviceNodes"][0]["path"] == before["DaxDevice"]
    move_dax_bytes(agent.guest, "verify", before["DaxDevice"], 0, 4096, 9)
    # The whole region's own device is split again after a restart of the host: so it looks then.
    agent.kill()
    name = Path(before["DaxDevice"]).name
    agent.guest.run(f"bash {_SPLIT} remove {name}; bash {_SPLIT} whole; rm {_FOLDER}/cdi/kept.json")
    agent.begin()
    agent.wait_ready()
    assert agent.phases() == {"kept": "Ready"}
    move_dax_bytes(agent.guest, "verify", before["DaxDevice"], 0, 4096, 9)
