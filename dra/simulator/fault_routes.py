"""What only a simulator has: faults that are asked for."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import StrictBool

from hymcache.dra.fabric.models import BladeBody, Body, HostBody, PortBody
from hymcache.dra.simulator.answers import ApplianceName, BladeName, HostName, PortName, make_router
from hymcache.dra.simulator.bodies import blade_body, blade_port_body, host_body
from hymcache.dra.simulator.faults import FaultBody, Faults
from hymcache.dra.simulator.service import FabricService

_BLADE = "/appliances/{applianceId}/blades/{bladeId}"


class FaultListBody(Body):
    """Faults that are to come."""

    faults: list[FaultBody]


class LinkBody(Body):
    """Whether a link is there."""

    up: StrictBool


def fault_routes(service: FabricService, faults: Faults) -> APIRouter:
    """Faults of requests, of the blades' power, of cables, and of the way to agents."""
    router = make_router("faults")

    @router.get("/faults")
    async def list_faults() -> FaultListBody:
        return FaultListBody(faults=faults.pending())

    @router.post("/faults", status_code=201)
    async def add_fault(body: FaultBody) -> FaultListBody:
        faults.add(body)
        return FaultListBody(faults=faults.pending())

    @router.delete("/faults")
    async def clear_faults() -> FaultListBody:
        faults.clear()
        return FaultListBody(faults=[])

    @router.post(_BLADE + "/power-cycle")
    async def power_cycle(appliance_id: ApplianceName, blade_id: BladeName) -> BladeBody:
        return blade_body(appliance_id, await service.power_cycle(appliance_id, blade_id))

    @router.put(_BLADE + "/ports/{portId}/link")
    async def set_link(
        appliance_id: ApplianceName, blade_id: BladeName, port_id: PortName, body: LinkBody
    ) -> PortBody:
        port = await service.set_link(appliance_id, blade_id, port_id, body.up)
        return blade_port_body(service.blade(appliance_id, blade_id), port)

    @router.put("/hosts/{hostId}/agent")
    async def set_agent(host_id: HostName, body: LinkBody) -> HostBody:
        host = service.fabric.host(host_id)
        await service.agents.set_up(host_id, body.up)
        return host_body(service, host)

    return router
