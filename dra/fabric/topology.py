"""What a fabric manager has: blades, their ports, and the regions composed on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NewType

ApplianceId = NewType("ApplianceId", str)
BladeId = NewType("BladeId", str)
PortId = NewType("PortId", str)
# A host as the fabric manager calls it. Nodes are registered there under their Kubernetes names.
HostId = NewType("HostId", str)
# A region on its blade. Unique there only, and used again after a free.
MemoryId = NewType("MemoryId", str)
# A region everywhere: a UUID, the name of its CDI device on every host.
AllocationId = NewType("AllocationId", str)


@dataclass(frozen=True, slots=True, order=True)
class BladeKey:
    """Where a region lies."""

    appliance_id: ApplianceId
    blade_id: BladeId

    def __str__(self) -> str:
        return f"{self.appliance_id}/{self.blade_id}"


@dataclass(frozen=True, slots=True)
class BladePort:
    """A CXL port of a blade. `host_id` is the host at the other end of the cable, if any."""

    port_id: PortId
    host_id: HostId | None
    link_up: bool


@dataclass(frozen=True, slots=True)
class Blade:
    """A memory blade as the fabric manager sees it.

    `online` is false while the fabric manager does not know the blade's state: it lost it, or
    the blade was power-cycled and waits for `FabricManager.resync`.
    Regions are made of blocks of `block_mib` on `channels` channels (DIMMs). One of QoS q takes
    as many blocks on each of q channels, so its size is a multiple of q * block_mib.
    """

    key: BladeKey
    online: bool
    total_mib: int
    allocated_mib: int
    block_mib: int
    channels: int
    ports: tuple[BladePort, ...]

    @property
    def free_mib(self) -> int:
        """What is not allocated."""
        return max(0, self.total_mib - self.allocated_mib)

    @property
    def hosts(self) -> tuple[HostId, ...]:
        """Hosts that a region can be attached to: cabled, the link up. Sorted."""
        cabled = {port.host_id for port in self.ports if port.host_id and port.link_up}
        return tuple(sorted(cabled))


@dataclass(frozen=True, slots=True)
class Attachment:
    """A host that a region is assigned to.

    `materialised`: the host's agent made the DAX device and its CDI spec. `physical_start` is
    the first byte in the host's physical address space, None where only the agent knows it.
    """

    host_id: HostId
    port_id: PortId
    materialised: bool
    physical_start: int | None = None
    details: str = ""


@dataclass(frozen=True, slots=True)
class RegionRef:
    """What is needed to free a region: the teardown data of a claim."""

    blade: BladeKey
    memory_id: MemoryId
    allocation_id: AllocationId


@dataclass(frozen=True, slots=True)
class Region:
    """A composed region.

    `owner` is `ComposeRequest.owner` where the dialect carries it (paper), else None.
    `offset_mib` counts from a host's first byte of CXL memory; None where it is not told.
    """

    blade: BladeKey
    memory_id: MemoryId
    allocation_id: AllocationId
    size_mib: int
    attachments: tuple[Attachment, ...] = ()
    owner: str | None = None
    offset_mib: int | None = None

    @property
    def ref(self) -> RegionRef:
        """Its teardown data."""
        return RegionRef(self.blade, self.memory_id, self.allocation_id)

    @property
    def ready_hosts(self) -> tuple[HostId, ...]:
        """Hosts on which pods can use it now. Sorted."""
        return tuple(sorted(a.host_id for a in self.attachments if a.materialised))

    def attachment(self, host_id: HostId) -> Attachment | None:
        """How it is attached to a host, None where it is not."""
        return next((a for a in self.attachments if a.host_id == host_id), None)

    def with_attachment(self, attachment: Attachment) -> Region:
        """The region with this attachment in place of the same host's."""
        others = (a for a in self.attachments if a.host_id != attachment.host_id)
        ordered = sorted((*others, attachment), key=lambda a: a.host_id)
        return replace(self, attachments=tuple(ordered))

    def without_host(self, host_id: HostId) -> Region:
        """The region, not attached to this host."""
        return replace(self, attachments=tuple(a for a in self.attachments if a.host_id != host_id))
