"""The fabric manager's API: hosts, and the regions as they see them."""

from __future__ import annotations

from fastapi import APIRouter, Response

from hymcache.dra.fabric.models import (
    CollectionBody,
    ComposeBody,
    CredentialsBody,
    HostBody,
    HostComposeBody,
    MemoryDeviceBody,
    MemoryRegionBody,
    PortBody,
)
from hymcache.dra.simulator.answers import (
    PARTIAL,
    HostName,
    NewHostName,
    PortName,
    RegionName,
    make_router,
    or_partial,
)
from hymcache.dra.simulator.bodies import (
    collection,
    host_body,
    host_port_body,
    host_region_body,
    host_region_name,
    host_regions,
)
from hymcache.dra.simulator.hardware import SimulatedAppliance, SimulatedBlade, SimulatedPort
from hymcache.dra.simulator.refusal import not_found
from hymcache.dra.simulator.service import FabricService

_HOST = "/hosts/{hostId}"


def host_routes(service: FabricService) -> APIRouter:
    """Hosts: list, register, show, rename, resync, remove; their ports and CXL devices."""
    router = make_router("hosts")

    @router.get("/hosts")
    async def list_hosts() -> CollectionBody:
        return collection("/hosts", service.fabric.hosts)

    @router.post("/hosts", status_code=201)
    async def add_host(body: CredentialsBody) -> HostBody:
        return host_body(service, await service.add_host(body))

    @router.get(_HOST)
    async def get_host(host_id: HostName) -> HostBody:
        return host_body(service, service.fabric.host(host_id))

    @router.put(_HOST)
    async def rename_host(host_id: HostName, new_id: NewHostName) -> HostBody:
        return host_body(service, await service.rename_host(host_id, new_id))

    @router.patch(_HOST)
    async def resync_host(host_id: HostName) -> HostBody:
        host = service.fabric.host(host_id)
        # Its agent may have another certificate or token by now.
        await service.agents.forget(host_id)
        return host_body(service, host)

    @router.delete(_HOST)
    async def remove_host(host_id: HostName) -> HostBody:
        return host_body(service, await service.remove_host(host_id))

    @router.get(_HOST + "/ports")
    async def list_ports(host_id: HostName) -> CollectionBody:
        cables = _cables(service, host_id)
        return collection(f"/hosts/{host_id}/ports", cables)

    @router.get(_HOST + "/ports/{portId}")
    async def get_port(host_id: HostName, port_id: PortName) -> PortBody:
        return host_port_body(*_cable(service, host_id, port_id))

    @router.get(_HOST + "/memory-devices")
    async def list_devices(host_id: HostName) -> CollectionBody:
        cables = _cables(service, host_id)
        return collection(f"/hosts/{host_id}/memory-devices", cables)

    @router.get(_HOST + "/memory-devices/{portId}")
    async def get_device(host_id: HostName, port_id: PortName) -> MemoryDeviceBody:
        _, blade, port = _cable(service, host_id, port_id)
        return MemoryDeviceBody(
            id=port_id,
            status_state="Enabled",
            serial_number=blade.id,
            link_status="LinkUp" if port.link_up else "LinkDown",
            memory_size_mib=blade.total_mib,
        )

    return router


def host_memory_routes(service: FabricService) -> APIRouter:
    """Memory of a host: list, compose through one of its ports, show, free."""
    router = make_router("hosts")

    @router.get(_HOST + "/memory")
    async def list_memory(host_id: HostName) -> CollectionBody:
        regions = host_regions(service, service.fabric.host(host_id))
        return collection(f"/hosts/{host_id}/memory", (host_region_name(*r) for r in regions))

    @router.post(_HOST + "/memory", status_code=201, responses=or_partial(MemoryRegionBody))
    async def compose(
        host_id: HostName, body: HostComposeBody, response: Response
    ) -> MemoryRegionBody:
        host = service.fabric.host(host_id)
        appliance, blade, port = _cable(service, host_id, body.port)
        plain = ComposeBody(memory_size_mib=body.memory_size_mib, qos=body.qos, port=port.id)
        region, complete = await service.compose(appliance.id, blade.id, plain)
        if not complete:
            response.status_code = PARTIAL
        return host_region_body(appliance.id, blade, region, host)

    @router.get(_HOST + "/memory/{memoryId}")
    async def get_memory(host_id: HostName, region_id: RegionName) -> MemoryRegionBody:
        host = service.fabric.host(host_id)
        for region in host_regions(service, host):
            if host_region_name(*region) == region_id:
                return host_region_body(*region, host)
        raise not_found("memory", region_id)

    @router.delete(_HOST + "/memory/{memoryId}")
    async def free_memory(host_id: HostName, region_id: RegionName) -> MemoryRegionBody:
        host = service.fabric.host(host_id)
        for appliance_id, blade, region in host_regions(service, host):
            if host_region_name(appliance_id, blade, region) == region_id:
                body = host_region_body(appliance_id, blade, region, host)
                await service.free(appliance_id, blade.id, region.id)
                return body
        raise not_found("memory", region_id)

    return router


_Cable = tuple[SimulatedAppliance, SimulatedBlade, SimulatedPort]


def _cables(service: FabricService, host_id: str) -> dict[str, _Cable]:
    """Cables of a host by the name of its port."""
    service.fabric.host(host_id)
    return {
        port.host_port_id or port.id: (a, b, port)
        for a, b, port in service.fabric.cables_of(host_id)
    }


def _cable(service: FabricService, host_id: str, port_id: str) -> _Cable:
    try:
        return _cables(service, host_id)[port_id]
    except KeyError:
        raise not_found("port", port_id) from None
