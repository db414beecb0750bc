"""The simulated fabric manager: what its API does, with state on disk where that is asked for."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from enum import StrEnum
from itertools import count
from pathlib import Path

from hymcache.dra.fabric.models import (
    AssignBody,
    ComposeBlocksBody,
    ComposeBody,
    CredentialsBody,
    PortOperation,
)
from hymcache.dra.simulator.hardware import (
    Assignment,
    Credentials,
    Fabric,
    SimulatedAppliance,
    SimulatedBlade,
    SimulatedHost,
    SimulatedPort,
    SimulatedRegion,
    make_blade,
)
from hymcache.dra.simulator.host_agents import HostAgents
from hymcache.dra.simulator.refusal import bad_request, conflict
from hymcache.dra.state_file import StateFile, write_atomically

# What a blade that is registered by its credentials turns out to have.
_NEW_BLADE_BLOCK_MIB = 1024
_NEW_BLADE_CHANNELS = 8
_NEW_BLADE_BLOCKS_A_CHANNEL = 8
_NEW_BLADE_PORTS = 2
_PARTS_MAX = 1024


class Dialect(StrEnum):
    """Which service is simulated."""

    PAPER = "paper"
    PUBLIC = "public"


class FabricService:
    """The service behind the API. Everything that refuses raises `Refusal`.

    `tells_offsets`: regions say where they begin; the public service of today does not.
    With `state_path` every change is on disk before it is answered.
    """

    def __init__(
        self,
        fabric: Fabric | None = None,
        *,
        dialect: Dialect = Dialect.PAPER,
        tells_offsets: bool = True,
        state_path: Path | None = None,
        agents: HostAgents | None = None,
    ) -> None:
        self.dialect = dialect
        self.tells_offsets = tells_offsets
        self.agents = agents or HostAgents()
        self._state_path = state_path
        if state_path is not None and state_path.exists():
            self.fabric = StateFile(state_path, Fabric).load()
        else:
            self.fabric = fabric or Fabric()
        # How many changes there were, and how many of them are on disk.
        self._changes = 0
        self._saved = 0
        self._saving = asyncio.Lock()
        # One change of a region at a time: two could materialise and remove its devices at once.
        self._region_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def save_at_once(self) -> None:
        """Writes the state, where it has a place; for before it serves."""
        if self._state_path is not None:
            write_atomically(self._state_path, self._state())

    async def save(self) -> None:
        """Returns when the state, where it has a place, is on disk; others are served meanwhile."""
        if self._state_path is not None:
            self._changes += 1
            # Carried out whatever becomes of who asked: an older state must not come after.
            await asyncio.shield(self._save(self._state_path, self._changes))

    async def _save(self, path: Path, change: int) -> None:
        async with self._saving:
            if self._saved < change:
                # With this one all others that there are by now.
                changes, state = self._changes, self._state()
                await asyncio.to_thread(write_atomically, path, state)
                self._saved = changes

    def _state(self) -> bytes:
        return self.fabric.model_dump_json().encode()

    async def aclose(self) -> None:
        """Closes the connections to the hosts' agents."""
        await self.agents.aclose()

    def blade(self, appliance_id: str, blade_id: str) -> SimulatedBlade:
        """A blade of an appliance."""
        return self.fabric.appliance(appliance_id).blade(blade_id)

    # -- what there is ---------------------------------------------------------------------------

    async def add_appliance(self, body: CredentialsBody) -> SimulatedAppliance:
        """Registers an appliance without blades."""
        name = _new_name("appliance", body.custom_id, self.fabric.appliances)
        appliance = SimulatedAppliance(id=name, credentials=_credentials(body))
        self.fabric.appliances[name] = appliance
        await self.save()
        return appliance

    async def add_blade(self, appliance_id: str, body: CredentialsBody) -> SimulatedBlade:
        """Registers a blade, of 64 GiB and with cables to the first hosts."""
        appliance = self.fabric.appliance(appliance_id)
        name = _new_name("blade", body.custom_id, appliance.blades)
        blade = make_blade(
            name,
            _credentials(body),
            base_mib=self.fabric.end_mib,
            block_mib=_NEW_BLADE_BLOCK_MIB,
            channels=_NEW_BLADE_CHANNELS,
            blocks_a_channel=_NEW_BLADE_BLOCKS_A_CHANNEL,
            hosts=tuple(sorted(self.fabric.hosts))[:_NEW_BLADE_PORTS],
            ports=_NEW_BLADE_PORTS,
        )
        appliance.blades[name] = blade
        await self.save()
        return blade

    async def add_host(self, body: CredentialsBody) -> SimulatedHost:
        """Registers a host by its agent."""
        name = _new_name("host", body.custom_id, self.fabric.hosts)
        host = SimulatedHost(id=name, credentials=_credentials(body))
        self.fabric.hosts[name] = host
        await self.save()
        return host

    async def remove_appliance(self, appliance_id: str) -> SimulatedAppliance:
        """Ends managing an appliance; its blades have no regions."""
        appliance = self.fabric.appliance(appliance_id)
        for blade in appliance.blades.values():
            _require_empty(blade)
        del self.fabric.appliances[appliance_id]
        await self.save()
        return appliance

    async def remove_blade(self, appliance_id: str, blade_id: str) -> SimulatedBlade:
        """Ends managing a blade; it has no regions."""
        blade = self.blade(appliance_id, blade_id)
        _require_empty(blade)
        del self.fabric.appliance(appliance_id).blades[blade_id]
        await self.save()
        return blade

    async def remove_host(self, host_id: str) -> SimulatedHost:
        """Ends managing a host that no region is assigned to; its cables are pulled."""
        host = self.fabric.host(host_id)
        cables = list(self.fabric.cables_of(host_id))
        for _, blade, port in cables:
            if any(region.assignment(port.id) for region in blade.regions.values()):
                raise conflict(f"host [{host_id}] has memory of blade [{blade.id}]")
        for _, _, port in cables:
            port.host_id, port.host_port_id, port.link_up = None, None, False
        del self.fabric.hosts[host_id]
        await self.agents.forget(host_id)
        await self.save()
        return host

    async def rename_appliance(self, appliance_id: str, new_id: str) -> SimulatedAppliance:
        """Gives an appliance another name."""
        appliance = self.fabric.appliance(appliance_id)
        if new_id != appliance_id:
            appliance.id = _new_name("appliance", new_id, self.fabric.appliances)
            self.fabric.appliances[new_id] = self.fabric.appliances.pop(appliance_id)
            await self.save()
        return appliance

    async def rename_blade(self, appliance_id: str, blade_id: str, new_id: str) -> SimulatedBlade:
        """Gives a blade another name."""
        blades, blade = (
            self.fabric.appliance(appliance_id).blades,
            self.blade(appliance_id, blade_id),
        )
        if new_id != blade_id:
            blade.id = _new_name("blade", new_id, blades)
            blades[new_id] = blades.pop(blade_id)
            await self.save()
        return blade

    async def rename_host(self, host_id: str, new_id: str) -> SimulatedHost:
        """Gives a host another name; cables and assignments follow."""
        host = self.fabric.host(host_id)
        if new_id == host_id:
            return host
        host.id = _new_name("host", new_id, self.fabric.hosts)
        for _, blade, port in list(self.fabric.cables_of(host_id)):
            port.host_id = new_id
            for region in blade.regions.values():
                assignment = region.assignment(port.id)
                if assignment is not None:
                    assignment.host_id = new_id
        self.fabric.hosts[new_id] = self.fabric.hosts.pop(host_id)
        await self.agents.forget(host_id)
        await self.save()
        return host

    # -- regions ---------------------------------------------------------------------------------

    async def compose(
        self, appliance_id: str, blade_id: str, body: ComposeBody
    ) -> tuple[SimulatedRegion, bool]:
        """A region by size, and whether all hosts that were asked for have it."""
        blade = self.blade(appliance_id, blade_id)
        ports = [] if body.port is None else [blade.port(body.port)]
        for port in ports:
            _require_link(port)
        claim_uid = None
        if self.dialect is Dialect.PAPER:
            claim_uid = body.claim_uid
            ports += self._candidates(blade, body)
        region = blade.compose(body.memory_size_mib, int(body.qos), claim_uid)
        return await self._assign_all(blade, region, ports)

    async def compose_blocks(
        self, appliance_id: str, blade_id: str, body: ComposeBlocksBody
    ) -> tuple[SimulatedRegion, bool]:
        """A region of named resource blocks, and whether the port that was asked for has it."""
        blade = self.blade(appliance_id, blade_id)
        ports = [] if body.port is None else [blade.port(body.port)]
        for port in ports:
            _require_link(port)
        region = blade.compose_blocks(list(body.memory_resources))
        return await self._assign_all(blade, region, ports)

    async def change(
        self,
        appliance_id: str,
        blade_id: str,
        region_id: str,
        body: AssignBody,
        *,
        fence: bool = False,
    ) -> tuple[SimulatedRegion, bool]:
        """Assigns or unassigns a port; whether its host has the region as was asked for."""
        blade = self.blade(appliance_id, blade_id)
        region = blade.region(region_id)
        port = blade.port(body.port)
        blade.require_online()
        async with self._region_locks[region.allocation_id]:
            if body.operation is PortOperation.ASSIGN:
                done = await self._assign(region, port)
                await self.save()
                return region, done
            await self._unassign(region, port, fence)
            return region, True

    async def free(
        self, appliance_id: str, blade_id: str, region_id: str, *, fence: bool = False
    ) -> SimulatedRegion:
        """Takes a region back. In the public dialect its ports are unassigned before."""
        blade = self.blade(appliance_id, blade_id)
        region = blade.region(region_id)
        blade.require_online()
        async with self._region_locks[region.allocation_id]:
            if self.dialect is Dialect.PUBLIC and region.assignments:
                ports = ", ".join(a.port_id for a in region.assignments)
                raise conflict(f"memory [{region_id}] is assigned to {ports}: unassign it first")
            for assignment in list(region.assignments):
                await self._unassign(region, blade.port(assignment.port_id), fence)
            if blade.regions.get(region_id) is region:
                blade.free(region_id)
                await self.save()
        self._region_locks.pop(region.allocation_id, None)
        return region

    async def resync(self, blade: SimulatedBlade) -> None:
        """Reads the blade anew; hosts lose the devices of regions that are no more."""
        lost = blade.resync()
        await self.save()
        if self.dialect is Dialect.PAPER:
            for region in lost:
                for assignment in region.assignments:
                    host = self.fabric.hosts.get(assignment.host_id)
                    if host is not None:
                        await self.agents.try_unmaterialise(host, region.allocation_id)

    async def power_cycle(self, appliance_id: str, blade_id: str) -> SimulatedBlade:
        """A fault: the blade forgets its regions."""
        blade = self.blade(appliance_id, blade_id)
        blade.power_cycle()
        await self.save()
        return blade

    async def set_link(
        self, appliance_id: str, blade_id: str, port_id: str, link_up: bool
    ) -> SimulatedPort:
        """A fault: the link of a cabled port goes down, or comes back."""
        port = self.blade(appliance_id, blade_id).port(port_id)
        if port.host_id is None and link_up:
            raise conflict(f"port [{port_id}] has no cable")
        port.link_up = link_up
        await self.save()
        return port

    def _candidates(self, blade: SimulatedBlade, body: ComposeBody) -> list[SimulatedPort]:
        if body.share_count is None and body.candidate_hosts is None:
            return []
        if body.share_count is None or body.candidate_hosts is None:
            raise bad_request("shareCount and candidateHosts come together")
        if body.share_count > len(set(body.candidate_hosts)):
            raise bad_request(
                f"shareCount {body.share_count} is more than the candidate hosts "
                f"{', '.join(body.candidate_hosts)}"
            )
        ports = []
        for host_id in dict.fromkeys(body.candidate_hosts):
            self.fabric.host(host_id)
            port = blade.port_of_host(host_id)
            if port is not None and port.id != body.port:
                ports.append(port)
        if len(ports) < body.share_count:
            raise conflict(
                f"blade [{blade.id}] has links to {len(ports)} of the candidate hosts; "
                f"shareCount is {body.share_count}"
            )
        return ports[: body.share_count]

    async def _assign_all(
        self, blade: SimulatedBlade, region: SimulatedRegion, ports: list[SimulatedPort]
    ) -> tuple[SimulatedRegion, bool]:
        # On disk before anybody waits for agents: a restart must not forget it.
        await self.save()
        async with self._region_locks[region.allocation_id]:
            if blade.regions.get(region.id) is not region:
                raise conflict(f"memory [{region.id}] was freed meanwhile")
            done = await asyncio.gather(*(self._assign(region, port) for port in ports))
            await self.save()
        return region, all(done)

    async def _assign(self, region: SimulatedRegion, port: SimulatedPort) -> bool:
        host = _require_link(port)
        assignment = region.assignment(port.id)
        if assignment is None:
            assignment = Assignment(port_id=port.id, host_id=host)
            region.assignments = [*region.assignments, assignment]
        elif self.dialect is Dialect.PUBLIC:
            raise conflict(f"memory [{region.id}] is assigned to port [{port.id}] already")
        if self.dialect is Dialect.PAPER:
            await self.agents.materialise(self.fabric.host(host), region, assignment)
        return self.dialect is Dialect.PUBLIC or assignment.materialised

    async def _unassign(self, region: SimulatedRegion, port: SimulatedPort, fence: bool) -> None:
        assignment = region.assignment(port.id)
        if assignment is None:
            raise conflict(f"memory [{region.id}] is not assigned to port [{port.id}]")
        if self.dialect is Dialect.PAPER:
            await self.agents.unmaterialise(
                self.fabric.host(assignment.host_id), region.allocation_id, fence=fence
            )
        region.assignments = [a for a in region.assignments if a is not assignment]
        await self.save()


def _new_name(kind: str, wanted: str | None, taken: Mapping[str, object]) -> str:
    if len(taken) >= _PARTS_MAX:
        raise conflict(f"there are {_PARTS_MAX} of kind {kind} already")
    if wanted is None:
        return next(name for n in count() if (name := f"{kind}-{n}") not in taken)
    if wanted in taken:
        raise conflict(f"{kind} [{wanted}] exists already")
    return wanted


def _credentials(body: CredentialsBody) -> Credentials:
    return Credentials.model_validate(body.model_dump(exclude={"custom_id"}))


def _require_empty(blade: SimulatedBlade) -> None:
    if blade.regions:
        raise conflict(f"blade [{blade.id}] has regions: {', '.join(sorted(blade.regions))}")


def _require_link(port: SimulatedPort) -> str:
    """The host at the other end."""
    if port.host_id is None or not port.link_up:
        raise conflict(f"port [{port.id}] has no link to a host")
    return port.host_id
