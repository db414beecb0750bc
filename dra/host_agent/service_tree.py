"""The way from Redfish's root to the memory domain: what clients find by following links."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastapi import APIRouter

from hymcache.dra.host_agent import resources

_SYSTEMS: Final = f"{resources.ROOT}/Systems"
_SYSTEM: Final = f"{_SYSTEMS}/1"
_SESSION_SERVICE: Final = f"{resources.ROOT}/SessionService"


def link(path: str) -> dict[str, str]:
    """A reference to another resource."""
    return {"@odata.id": path}


def collection(path: str, name: str, members: list[dict[str, Any]]) -> dict[str, Any]:
    """A list of resources, or of links to them."""
    return link(path) | {
        "Name": name,
        "Members": members,
        "Members@odata.count": len(members),
    }


_ROOT: Final[Mapping[str, Any]] = link(resources.ROOT) | {
    "@odata.type": "#ServiceRoot.v1_15_0.ServiceRoot",
    "Id": "RootService",
    "Name": "HyMCache host agent",
    "RedfishVersion": "1.15.0",
    "Systems": link(_SYSTEMS),
    "SessionService": link(_SESSION_SERVICE),
    "Links": {"Sessions": link(resources.SESSIONS)},
}
_GUARDED: Final[Mapping[str, Mapping[str, Any]]] = {
    _SESSION_SERVICE: link(_SESSION_SERVICE)
    | {
        "@odata.type": "#SessionService.v1_1_8.SessionService",
        "Id": "SessionService",
        "Name": "Sessions",
        "Sessions": link(resources.SESSIONS),
    },
    _SYSTEMS: collection(_SYSTEMS, "Systems", [link(_SYSTEM)]),
    _SYSTEM: link(_SYSTEM)
    | {
        "@odata.type": "#ComputerSystem.v1_20_0.ComputerSystem",
        "Id": "1",
        "Name": "This host",
        "MemoryDomains": link(f"{_SYSTEM}/MemoryDomains"),
    },
    f"{_SYSTEM}/MemoryDomains": collection(
        f"{_SYSTEM}/MemoryDomains", "Memory domains", [link(resources.MEMORY_DOMAIN)]
    ),
}


def open_router() -> APIRouter:
    """The root: Redfish has it open, so that clients find where to log in."""
    router = APIRouter(tags=["service"])

    @router.get(resources.ROOT)
    async def service_root() -> dict[str, Any]:
        return dict(_ROOT)

    return router


def guarded_router() -> APIRouter:
    """What lies between root and memory domain."""
    router = APIRouter(tags=["service"])

    def serve(path: str, body: Mapping[str, Any]) -> None:
        @router.get(path, name=path)
        async def resource() -> dict[str, Any]:
            return dict(body)

    for path, body in _GUARDED.items():
        serve(path, body)
    return router
