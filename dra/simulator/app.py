"""The simulated fabric manager's HTTP application; /docs shows its API."""

from __future__ import annotations

from typing import Final

from fastapi import FastAPI
from fastapi.routing import APIRoute

from hymcache.dra.fabric.models import API_ROOT, ServiceBody, ServiceResource
from hymcache.dra.simulator.answers import make_router, tell_errors
from hymcache.dra.simulator.blade_routes import appliance_routes, blade_routes, region_routes
from hymcache.dra.simulator.fault_routes import fault_routes
from hymcache.dra.simulator.faults import FaultInjection, Faults
from hymcache.dra.simulator.host_routes import host_memory_routes, host_routes
from hymcache.dra.simulator.service import FabricService
from hymcache.version import __version__

SIMULATOR_ROOT: Final = "/simulator"
_RESOURCES: Final = {
    "/appliances": "Memory appliances, their blades, and the regions composed on them",
    "/hosts": "CXL hosts",
}


def make_simulator_app(service: FabricService) -> FastAPI:
    """GET /cfm/v1 and all below it, faults below /simulator."""

    app = FastAPI(
        title="Composable Fabric Manager, simulated",
        version=__version__,
        generate_unique_id_function=_operation_id,
    )
    tell_errors(app)
    root = make_router("service")

    @root.get(API_ROOT)
    async def get_service() -> ServiceBody:
        resources = [
            ServiceResource(uri=API_ROOT + path, methods="GET, POST", description=description)
            for path, description in _RESOURCES.items()
        ]
        return ServiceBody(version=f"simulated {__version__}", resources=resources)

    app.include_router(root)
    for make_routes in (
        appliance_routes,
        blade_routes,
        region_routes,
        host_routes,
        host_memory_routes,
    ):
        app.include_router(make_routes(service), prefix=API_ROOT)
    faults = Faults()
    app.include_router(fault_routes(service, faults), prefix=SIMULATOR_ROOT)
    app.add_middleware(FaultInjection, faults=faults)
    return app


def _operation_id(route: APIRoute) -> str:
    return "_".join(map(str, (*route.tags, route.name)))
