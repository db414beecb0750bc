"""What the simulated fabric consists of, and how a blade gives its memory away.

A blade has resource blocks on channels (DIMMs). A region takes as many blocks on each of QoS
channels, the emptiest ones, and a contiguous range of the blade's addresses, first fit: its hosts
map the same range, each counted from where CXL memory begins there.

The models are the state file's layout (state_file.py); a power cycle is a blade that is not
online and whose regions are only what the fabric manager still believes in.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from itertools import count

from pydantic import BaseModel, ConfigDict, Field

from hymcache.dra.simulator.refusal import bad_request, conflict, failure, not_found
from hymcache.dra.state_file import StateDocument


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class Credentials(_Part):
    """How a part is reached: what it was registered with."""

    username: str
    password: str
    ip_address: str
    port: int
    insecure: bool = False
    protocol: str = "https"
    backend: str = "httpfish"


class Assignment(_Part):
    """A port that a region is assigned to, and how far its host is."""

    port_id: str
    host_id: str
    materialised: bool = False
    physical_start: int | None = None
    details: str = ""


class SimulatedRegion(_Part):
    """A composed region. Sizes and offsets in MiB."""

    id: str
    allocation_id: str
    size_mib: int
    offset_mib: int
    qos: int
    block_ids: tuple[str, ...]
    claim_uid: str | None = None
    assignments: list[Assignment] = []

    def assignment(self, port_id: str) -> Assignment | None:
        """How it is assigned to a port, None where it is not."""
        return next((a for a in self.assignments if a.port_id == port_id), None)


class ResourceBlock(_Part):
    """A piece of a channel, part of at most one region."""

    id: str
    channel: int
    index: int
    region_id: str | None = None


class SimulatedPort(_Part):
    """A port of a blade; the cable leads to a port of a host."""

    id: str
    host_id: str | None = None
    host_port_id: str | None = None
    link_up: bool = True


class SimulatedBlade(_Part):
    """A memory blade. Its addresses begin `base_mib` after the first blade's."""

    id: str
    credentials: Credentials
    base_mib: int
    block_mib: int
    channels: int
    online: bool = True
    blocks: dict[str, ResourceBlock]
    ports: dict[str, SimulatedPort]
    regions: dict[str, SimulatedRegion] = {}

    @property
    def total_mib(self) -> int:
        """All its memory."""
        return self.block_mib * len(self.blocks)

    @property
    def allocated_mib(self) -> int:
        """What regions have."""
        return sum(region.size_mib for region in self.regions.values())

    def region(self, region_id: str) -> SimulatedRegion:
        """A region. Refuses (404) where there is none of that name."""
        try:
            return self.regions[region_id]
        except KeyError:
            raise not_found("memory", region_id) from None

    def port(self, port_id: str) -> SimulatedPort:
        """A port. Refuses (404) where there is none of that name."""
        try:
            return self.ports[port_id]
        except KeyError:
            raise not_found("port", port_id) from None

    def port_of_host(self, host_id: str) -> SimulatedPort | None:
        """The port that is cabled to a host and has a link."""
        for port in self.ports.values():
            if port.host_id == host_id and port.link_up:
                return port
        return None

    def require_online(self) -> None:
        """Refuses (500) while the service does not know the blade's state."""
        if not self.online:
            raise failure(f"blade [{self.id}] has lost its state in a power cycle; resync it")

    def compose(self, size_mib: int, qos: int, claim_uid: str | None) -> SimulatedRegion:
        """A region of at least this size. Refuses (409) where there is not enough memory."""
        self.require_online()
        if qos > self.channels:
            raise conflict(f"blade [{self.id}] has {self.channels} channels: QoS {qos} needs more")
        blocks_a_channel = -(-size_mib // (self.block_mib * qos))
        free = Counter(b.channel for b in self.blocks.values() if b.region_id is None)
        emptiest = sorted(free, key=lambda channel: (-free[channel], channel))[:qos]
        if len(emptiest) < qos or free[emptiest[-1]] < blocks_a_channel:
            raise conflict(
                f"blade [{self.id}] has no {blocks_a_channel} unused resource blocks of "
                f"{self.block_mib} MiB on each of {qos} channels"
            )
        chosen = [block_id for c in emptiest for block_id in self._unused(c, blocks_a_channel)]
        return self._take(chosen, qos, claim_uid)

    def compose_blocks(self, block_ids: list[str]) -> SimulatedRegion:
        """A region of exactly these blocks. Refuses those that are not there or not unused."""
        self.require_online()
        if len(set(block_ids)) < len(block_ids):
            raise bad_request("memoryResources names a resource twice")
        for block_id in block_ids:
            block = self.blocks.get(block_id)
            if block is None:
                raise not_found("resource", block_id)
            if block.region_id is not None:
                raise conflict(f"resource [{block_id}] is part of a region already")
        channels = {self.blocks[block_id].channel for block_id in block_ids}
        return self._take(block_ids, len(channels), None)

    def free(self, region_id: str) -> SimulatedRegion:
        """Takes a region's memory back."""
        region = self.regions.pop(region_id)
        for block_id in region.block_ids:
            self.blocks[block_id].region_id = None
        return region

    def power_cycle(self) -> None:
        """The blade forgets its regions; the service does not notice what they were."""
        self.online = False

    def resync(self) -> list[SimulatedRegion]:
        """The service reads the blade anew. Returns the regions that it finds to be lost."""
        if self.online:
            return []
        self.online = True
        return [self.free(region_id) for region_id in list(self.regions)]

    def _unused(self, channel: int, wanted: int) -> Iterator[str]:
        for block in self.blocks.values():
            if wanted and block.channel == channel and block.region_id is None:
                wanted -= 1
                yield block.id

    def _take(self, block_ids: list[str], qos: int, claim_uid: str | None) -> SimulatedRegion:
        size_mib = len(block_ids) * self.block_mib
        offset_mib = self._first_fit(size_mib)
        # A name is used again once it is free: whoever trusts in names alone is found out.
        region_id = next(name for n in count() if (name := f"memory-{n}") not in self.regions)
        region = SimulatedRegion(
            id=region_id,
            allocation_id=str(uuid.uuid4()),
            size_mib=size_mib,
            offset_mib=offset_mib,
            qos=qos,
            block_ids=tuple(block_ids),
            claim_uid=claim_uid,
        )
        self.regions[region_id] = region
        for block_id in block_ids:
            self.blocks[block_id].region_id = region_id
        return region

    def _first_fit(self, size_mib: int) -> int:
        start_mib = self.base_mib
        for region in sorted(self.regions.values(), key=lambda region: region.offset_mib):
            if region.offset_mib - start_mib >= size_mib:
                return start_mib
            start_mib = region.offset_mib + region.size_mib
        if self.base_mib + self.total_mib - start_mib < size_mib:
            raise conflict(f"blade [{self.id}] has no contiguous range of {size_mib} MiB")
        return start_mib


class SimulatedAppliance(_Part):
    """A box of blades."""

    id: str
    credentials: Credentials
    blades: dict[str, SimulatedBlade] = {}

    def blade(self, blade_id: str) -> SimulatedBlade:
        """A blade. Refuses (404) where there is none of that name."""
        try:
            return self.blades[blade_id]
        except KeyError:
            raise not_found("blade", blade_id) from None


class SimulatedHost(_Part):
    """A host: its agent's address and, for each blade port at the end of a cable, a port."""

    id: str
    credentials: Credentials


class Fabric(StateDocument):
    """Everything: what the fabric manager keeps."""

    appliances: dict[str, SimulatedAppliance] = Field(default_factory=dict)
    hosts: dict[str, SimulatedHost] = Field(default_factory=dict)

    def appliance(self, appliance_id: str) -> SimulatedAppliance:
        """An appliance. Refuses (404) where there is none of that name."""
        try:
            return self.appliances[appliance_id]
        except KeyError:
            raise not_found("appliance", appliance_id) from None

    def host(self, host_id: str) -> SimulatedHost:
        """A host. Refuses (404) where there is none of that name."""
        try:
            return self.hosts[host_id]
        except KeyError:
            raise not_found("host", host_id) from None

    @property
    def end_mib(self) -> int:
        """Where the addresses of all blades end."""
        blades = (blade for box in self.appliances.values() for blade in box.blades.values())
        return max((blade.base_mib + blade.total_mib for blade in blades), default=0)

    def cables_of(
        self, host_id: str
    ) -> Iterator[tuple[SimulatedAppliance, SimulatedBlade, SimulatedPort]]:
        """Ports of blades that are cabled to a host."""
        for appliance in self.appliances.values():
            for blade in appliance.blades.values():
                for port in blade.ports.values():
                    if port.host_id == host_id:
                        yield appliance, blade, port


def make_blade(
    blade_id: str,
    credentials: Credentials,
    *,
    base_mib: int,
    block_mib: int,
    channels: int,
    blocks_a_channel: int,
    hosts: tuple[str, ...] = (),
    ports: int = 0,
) -> SimulatedBlade:
    """A blade with unused blocks, a port cabled to each host, and as many ports as wished."""
    blocks = {
        f"channel-{channel}-block-{index}": ResourceBlock(
            id=f"channel-{channel}-block-{index}", channel=channel, index=index
        )
        for index in range(blocks_a_channel)
        for channel in range(channels)
    }
    all_ports: dict[str, SimulatedPort] = {}
    for number in range(max(ports, len(hosts))):
        host_id = hosts[number] if number < len(hosts) else None
        port_id = f"port-{number}"
        all_ports[port_id] = SimulatedPort(
            id=port_id,
            host_id=host_id,
            host_port_id=None if host_id is None else f"{blade_id}-{port_id}",
            link_up=host_id is not None,
        )
    return SimulatedBlade(
        id=blade_id,
        credentials=credentials,
        base_mib=base_mib,
        block_mib=block_mib,
        channels=channels,
        blocks=blocks,
        ports=all_ports,
    )
