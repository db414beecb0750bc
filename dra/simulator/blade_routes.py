"""The fabric manager's API: appliances, blades and their regions."""

from __future__ import annotations

from fastapi import APIRouter, Response

from hymcache.dra.fabric.models import (
    ApplianceBody,
    AssignBody,
    BladeBody,
    CollectionBody,
    ComposeBlocksBody,
    ComposeBody,
    CredentialsBody,
    MemoryRegionBody,
    PortBody,
    ResourceBlockBody,
)
from hymcache.dra.simulator.answers import (
    PARTIAL,
    ApplianceName,
    BladeName,
    BlockName,
    Fence,
    NewApplianceName,
    NewBladeName,
    PortName,
    RegionName,
    make_router,
    or_partial,
)
from hymcache.dra.simulator.bodies import (
    appliance_body,
    appliance_path,
    blade_body,
    blade_path,
    blade_port_body,
    block_body,
    collection,
    region_body,
)
from hymcache.dra.simulator.refusal import not_found
from hymcache.dra.simulator.service import FabricService

_APPLIANCE = "/appliances/{applianceId}"
_BLADE = _APPLIANCE + "/blades/{bladeId}"


def appliance_routes(service: FabricService) -> APIRouter:
    """Appliances: list, register, show, rename, resync, remove."""
    router = make_router("appliances")

    @router.get("/appliances")
    async def list_appliances() -> CollectionBody:
        return collection("/appliances", service.fabric.appliances)

    @router.post("/appliances", status_code=201)
    async def add_appliance(body: CredentialsBody) -> ApplianceBody:
        return appliance_body(await service.add_appliance(body))

    @router.get(_APPLIANCE)
    async def get_appliance(appliance_id: ApplianceName) -> ApplianceBody:
        return appliance_body(service.fabric.appliance(appliance_id))

    @router.put(_APPLIANCE)
    async def rename_appliance(
        appliance_id: ApplianceName, new_id: NewApplianceName
    ) -> ApplianceBody:
        return appliance_body(await service.rename_appliance(appliance_id, new_id))

    @router.patch(_APPLIANCE)
    async def resync_appliance(appliance_id: ApplianceName) -> ApplianceBody:
        appliance = service.fabric.appliance(appliance_id)
        for blade in list(appliance.blades.values()):
            await service.resync(blade)
        return appliance_body(appliance)

    @router.delete(_APPLIANCE)
    async def remove_appliance(appliance_id: ApplianceName) -> ApplianceBody:
        return appliance_body(await service.remove_appliance(appliance_id))

    return router


def blade_routes(service: FabricService) -> APIRouter:
    """Blades: list, register, show, rename, resync, remove; their resource blocks and ports."""
    router = make_router("blades")

    @router.get(_APPLIANCE + "/blades")
    async def list_blades(appliance_id: ApplianceName) -> CollectionBody:
        appliance = service.fabric.appliance(appliance_id)
        return collection(appliance_path(appliance_id) + "/blades", appliance.blades)

    @router.post(_APPLIANCE + "/blades", status_code=201)
    async def add_blade(appliance_id: ApplianceName, body: CredentialsBody) -> BladeBody:
        return blade_body(appliance_id, await service.add_blade(appliance_id, body))

    @router.get(_BLADE)
    async def get_blade(appliance_id: ApplianceName, blade_id: BladeName) -> BladeBody:
        return blade_body(appliance_id, service.blade(appliance_id, blade_id))

    @router.put(_BLADE)
    async def rename_blade(
        appliance_id: ApplianceName,
        blade_id: BladeName,
        new_id: NewBladeName,
    ) -> BladeBody:
        return blade_body(appliance_id, await service.rename_blade(appliance_id, blade_id, new_id))

    @router.patch(_BLADE)
    async def resync_blade(appliance_id: ApplianceName, blade_id: BladeName) -> BladeBody:
        blade = service.blade(appliance_id, blade_id)
        await service.resync(blade)
        return blade_body(appliance_id, blade)

    @router.delete(_BLADE)
    async def remove_blade(appliance_id: ApplianceName, blade_id: BladeName) -> BladeBody:
        return blade_body(appliance_id, await service.remove_blade(appliance_id, blade_id))

    @router.get(_BLADE + "/resources")
    async def list_resources(appliance_id: ApplianceName, blade_id: BladeName) -> CollectionBody:
        blade = service.blade(appliance_id, blade_id)
        return collection(blade_path(appliance_id, blade_id) + "/resources", blade.blocks)

    @router.get(_BLADE + "/resources/{resourceId}")
    async def get_resource(
        appliance_id: ApplianceName, blade_id: BladeName, block_id: BlockName
    ) -> ResourceBlockBody:
        blade = service.blade(appliance_id, blade_id)
        if block_id not in blade.blocks:
            raise not_found("resource", block_id)
        return block_body(blade, blade.blocks[block_id])

    @router.get(_BLADE + "/ports")
    async def list_ports(appliance_id: ApplianceName, blade_id: BladeName) -> CollectionBody:
        blade = service.blade(appliance_id, blade_id)
        return collection(blade_path(appliance_id, blade_id) + "/ports", blade.ports)

    @router.get(_BLADE + "/ports/{portId}")
    async def get_port(
        appliance_id: ApplianceName, blade_id: BladeName, port_id: PortName
    ) -> PortBody:
        blade = service.blade(appliance_id, blade_id)
        return blade_port_body(blade, blade.port(port_id))

    return router


def region_routes(service: FabricService) -> APIRouter:
    """Regions of a blade: list, compose, show, assign, free."""
    router = make_router("memory")
    partial = or_partial(MemoryRegionBody)

    @router.get(_BLADE + "/memory")
    async def list_memory(appliance_id: ApplianceName, blade_id: BladeName) -> CollectionBody:
        blade = service.blade(appliance_id, blade_id)
        return collection(blade_path(appliance_id, blade_id) + "/memory", blade.regions)

    @router.post(_BLADE + "/memory", status_code=201, responses=partial)
    async def compose(
        appliance_id: ApplianceName, blade_id: BladeName, body: ComposeBody, response: Response
    ) -> MemoryRegionBody:
        region, complete = await service.compose(appliance_id, blade_id, body)
        if not complete:
            response.status_code = PARTIAL
        blade = service.blade(appliance_id, blade_id)
        return region_body(service, appliance_id, blade, region)

    @router.put(_BLADE + "/memory", status_code=201, responses=partial)
    async def compose_blocks(
        appliance_id: ApplianceName,
        blade_id: BladeName,
        body: ComposeBlocksBody,
        response: Response,
    ) -> MemoryRegionBody:
        region, complete = await service.compose_blocks(appliance_id, blade_id, body)
        if not complete:
            response.status_code = PARTIAL
        blade = service.blade(appliance_id, blade_id)
        return region_body(service, appliance_id, blade, region)

    @router.get(_BLADE + "/memory/{memoryId}")
    async def get_memory(
        appliance_id: ApplianceName, blade_id: BladeName, region_id: RegionName
    ) -> MemoryRegionBody:
        blade = service.blade(appliance_id, blade_id)
        return region_body(service, appliance_id, blade, blade.region(region_id))

    @router.patch(_BLADE + "/memory/{memoryId}", responses=partial)
    async def change_memory(
        appliance_id: ApplianceName,
        blade_id: BladeName,
        region_id: RegionName,
        body: AssignBody,
        response: Response,
        *,
        fence: Fence = False,
    ) -> MemoryRegionBody:
        region, complete = await service.change(
            appliance_id, blade_id, region_id, body, fence=fence
        )
        if not complete:
            response.status_code = PARTIAL
        blade = service.blade(appliance_id, blade_id)
        return region_body(service, appliance_id, blade, region, body.port)

    @router.delete(_BLADE + "/memory/{memoryId}")
    async def free_memory(
        appliance_id: ApplianceName,
        blade_id: BladeName,
        region_id: RegionName,
        fence: Fence = False,
    ) -> MemoryRegionBody:
        blade = service.blade(appliance_id, blade_id)
        region = await service.free(appliance_id, blade_id, region_id, fence=fence)
        return region_body(service, appliance_id, blade, region)

    return router
