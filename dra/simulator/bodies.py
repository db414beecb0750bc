"""The simulated parts as bodies of the fabric manager's API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from hymcache.dra.fabric.models import (
    API_ROOT,
    ApplianceBody,
    BladeBody,
    CollectionBody,
    CompositionStatus,
    HostBody,
    MappedHostBody,
    Member,
    MemoryRegionBody,
    MemoryType,
    PortBody,
    ResourceBlockBody,
)
from hymcache.dra.simulator.hardware import (
    ResourceBlock,
    SimulatedAppliance,
    SimulatedBlade,
    SimulatedHost,
    SimulatedPort,
    SimulatedRegion,
)
from hymcache.dra.simulator.service import Dialect, FabricService

_ONLINE: Final = "online"
_OFFLINE: Final = "offline"
# What arXiv 2609.10790 measured of its blade: 27.1-28.5 GB/s, 461-507 ns, DDR4 at 1866 MHz.
_BANDWIDTH_GBPS: Final = 27
_LATENCY_NS: Final = 484
_MEMORY_MHZ: Final = 1866
# PCIe 5, 16 lanes.
_LINK_GBPS: Final = 32
_LINK_WIDTH: Final = 16


def collection(path: str, names: Iterable[str]) -> CollectionBody:
    """A collection of what lies below a path of the API."""
    members = [Member(uri=f"{API_ROOT}{path}/{name}") for name in names]
    return CollectionBody(member_count=len(members), members=members)


def appliance_body(appliance: SimulatedAppliance) -> ApplianceBody:
    """An appliance with the sums over its blades."""
    blades = appliance.blades.values()
    allocated_mib = sum(blade.allocated_mib for blade in blades)
    return ApplianceBody(
        id=appliance.id,
        ip_address=appliance.credentials.ip_address,
        port=appliance.credentials.port,
        status=_ONLINE,
        blades=Member(uri=f"{API_ROOT}{appliance_path(appliance.id)}/blades"),
        total_memory_available_mib=sum(blade.total_mib for blade in blades) - allocated_mib,
        total_memory_allocated_mib=allocated_mib,
    )


def blade_body(appliance_id: str, blade: SimulatedBlade) -> BladeBody:
    """A blade; "available" is what is not allocated."""
    uri = f"{API_ROOT}{blade_path(appliance_id, blade.id)}"
    return BladeBody(
        id=blade.id,
        ip_address=blade.credentials.ip_address,
        port=blade.credentials.port,
        status=_ONLINE if blade.online else _OFFLINE,
        ports=Member(uri=f"{uri}/ports"),
        resources=Member(uri=f"{uri}/resources"),
        memory=Member(uri=f"{uri}/memory"),
        total_memory_available_mib=blade.total_mib - blade.allocated_mib,
        total_memory_allocated_mib=blade.allocated_mib,
    )


def host_body(service: FabricService, host: SimulatedHost) -> HostBody:
    """A host and how much memory of blades it has."""
    uri = f"{API_ROOT}/hosts/{host.id}"
    return HostBody(
        id=host.id,
        ip_address=host.credentials.ip_address,
        port=host.credentials.port,
        status=_OFFLINE if host.id in service.agents.cut_off else _ONLINE,
        ports=Member(uri=f"{uri}/ports"),
        memory=Member(uri=f"{uri}/memory"),
        memory_devices=Member(uri=f"{uri}/memory-devices"),
        local_memory_mib=0,
        remote_memory_mib=sum(region.size_mib for _, _, region in host_regions(service, host)),
    )


def host_regions(
    service: FabricService, host: SimulatedHost
) -> list[tuple[str, SimulatedBlade, SimulatedRegion]]:
    """Regions that are assigned to a host: appliance, blade and region."""
    return [
        (appliance.id, blade, region)
        for appliance, blade, port in service.fabric.cables_of(host.id)
        for region in blade.regions.values()
        if region.assignment(port.id)
    ]


def block_body(blade: SimulatedBlade, block: ResourceBlock) -> ResourceBlockBody:
    """A resource block."""
    return ResourceBlockBody(
        id=block.id,
        composition_status=CompositionStatus(
            composition_state="Unused" if block.region_id is None else "Composed",
            max_compositions=1,
            number_of_compositions=0 if block.region_id is None else 1,
        ),
        channel_id=block.channel,
        channel_resource_index=block.index,
        capacity_mib=blade.block_mib,
        data_width_bits=64,
        memory_type="DRAM",
        memory_device_type="DDR4",
        manufacturer="HyMCache simulator",
        operating_speed_mhz=_MEMORY_MHZ,
        rank_count=2,
    )


def blade_port_body(blade: SimulatedBlade, port: SimulatedPort) -> PortBody:
    """A blade's port; the cable leads to a host's."""
    linked = None
    if port.host_id is not None:
        linked = f"{API_ROOT}/hosts/{port.host_id}/ports/{port.host_port_id}"
    return _port_body(f"{blade.id}-{port.id}", port, port.id, linked)


def host_port_body(
    appliance: SimulatedAppliance, blade: SimulatedBlade, port: SimulatedPort
) -> PortBody:
    """The host's end of a blade port's cable."""
    linked = f"{API_ROOT}{blade_path(appliance.id, blade.id)}/ports/{port.id}"
    return _port_body(f"{port.host_id}-{port.host_port_id}", port, port.host_port_id or "", linked)


def region_body(
    service: FabricService,
    appliance_id: str,
    blade: SimulatedBlade,
    region: SimulatedRegion,
    port_id: str | None = None,
) -> MemoryRegionBody:
    """A region. The public service shows one port: the one in question, else the last."""
    paper = service.dialect is Dialect.PAPER
    shown = region.assignment(port_id) if port_id else None
    if shown is None and region.assignments:
        shown = region.assignments[-1]
    mapped = None if shown is None else blade.ports.get(shown.port_id)
    complete = all(a.materialised for a in region.assignments) if paper else True
    return MemoryRegionBody(
        id=region.id,
        type=MemoryType.REGION,
        size_mib=region.size_mib,
        status="OK" if complete else "Warning",
        bandwidth=_BANDWIDTH_GBPS,
        latency=_LATENCY_NS,
        memory_appliance_id=appliance_id,
        memory_blade_id=blade.id,
        memory_appliance_port=shown.port_id if shown else None,
        mapped_host_id=shown.host_id if shown else None,
        mapped_host_port=mapped.host_port_id if mapped else None,
        address_range_offset_mib=region.offset_mib if service.tells_offsets else None,
        allocation_id=region.allocation_id if paper else None,
        claim_uid=region.claim_uid if paper else None,
        mapped_hosts=_mapped_hosts(region) if paper else None,
    )


def host_region_body(
    appliance_id: str, blade: SimulatedBlade, region: SimulatedRegion, host: SimulatedHost
) -> MemoryRegionBody:
    """A region as its host sees it."""
    port = blade.port_of_host(host.id)
    return MemoryRegionBody(
        id=host_region_name(appliance_id, blade, region),
        type=MemoryType.CXL,
        size_mib=region.size_mib,
        status="OK",
        bandwidth=_BANDWIDTH_GBPS,
        latency=_LATENCY_NS,
        memory_appliance_id=appliance_id,
        memory_blade_id=blade.id,
        memory_appliance_port=port.id if port else None,
        mapped_host_id=host.id,
        mapped_host_port=port.host_port_id if port else None,
    )


def host_region_name(appliance_id: str, blade: SimulatedBlade, region: SimulatedRegion) -> str:
    """What a host calls a region: it may have some of several blades."""
    return f"{appliance_id}.{blade.id}.{region.id}"


def appliance_path(appliance_id: str) -> str:
    """Below the API's root."""
    return f"/appliances/{appliance_id}"


def blade_path(appliance_id: str, blade_id: str) -> str:
    """Below the API's root."""
    return f"/appliances/{appliance_id}/blades/{blade_id}"


def _mapped_hosts(region: SimulatedRegion) -> list[MappedHostBody]:
    return [
        MappedHostBody(
            host_id=assignment.host_id,
            port_id=assignment.port_id,
            materialized=assignment.materialised,
            physical_start=assignment.physical_start,
            details=assignment.details,
        )
        for assignment in region.assignments
    ]


def _port_body(cxl_id: str, port: SimulatedPort, name: str, linked: str | None) -> PortBody:
    return PortBody(
        id=name,
        status_health="OK",
        status_state="Enabled",
        g_cxl_id=cxl_id,
        linked_port_uri=linked,
        port_protocol="CXL",
        port_medium="Electrical",
        current_speed_gbps=_LINK_GBPS,
        width=_LINK_WIDTH,
        link_status="LinkUp" if port.link_up else "LinkDown",
        link_state="Enabled",
    )
