"""The REST side of a host agent. What is served where is told in resources.py."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, FastAPI, Header, Query, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hymcache.dra.host_agent import resources, service_tree
from hymcache.dra.host_agent.allocations import HostAllocations
from hymcache.dra.host_agent.backend import MemoryRegion
from hymcache.dra.host_agent.redfish_errors import (
    ERROR_RESPONSES,
    Refused,
    held,
    tell_errors,
)
from hymcache.dra.host_agent.resources import (
    DaxDevice,
    DaxRegion,
    LoginRequest,
    MaterializeRequest,
    UnmaterializeRequest,
)
from hymcache.dra.host_agent.service_tree import collection, link
from hymcache.dra.host_agent.sessions import Sessions
from hymcache.limits import MIB

_BODY_BYTES_MAX: Final = 64 << 10
# Guessing passwords takes this long for each.
_WRONG_PASSWORD_S: Final = 1.0


def make_agent_app(allocations: HostAllocations, sessions: Sessions) -> FastAPI:
    """The agent's application; its OpenAPI page is at /docs."""
    app = FastAPI(
        title="HyMCache host agent", version="1", redoc_url=None, responses=ERROR_RESPONSES
    )
    app.add_middleware(_BoundedBody)

    async def authorize(token: Annotated[str, Header(alias=resources.TOKEN_HEADER)] = "") -> None:
        if sessions.find(token) is None:
            raise Refused(
                401,
                f"no session; POST user name and password to {resources.SESSIONS}",
                "NoValidSession",
            )

    app.include_router(service_tree.open_router())
    app.include_router(_login_router(sessions))
    guarded = [Depends(authorize)]
    app.include_router(service_tree.guarded_router(), dependencies=guarded)
    app.include_router(_sessions_router(sessions), dependencies=guarded)
    app.include_router(_memory_router(allocations), dependencies=guarded)
    app.include_router(_action_router(allocations), dependencies=guarded)
    tell_errors(app)
    return app


def _login_router(sessions: Sessions) -> APIRouter:
    router = APIRouter(tags=["sessions"])

    @router.post(resources.SESSIONS, status_code=201)
    async def login(request: LoginRequest, response: Response) -> dict[str, Any]:
        begun = sessions.begin(request.user_name, request.password)
        if begun is None:
            await asyncio.sleep(_WRONG_PASSWORD_S)
            raise Refused(401, "wrong user name or password", "ResourceAtUriUnauthorized")
        name, token = begun
        location = f"{resources.SESSIONS}/{name}"
        response.headers[resources.TOKEN_HEADER] = token
        response.headers["Location"] = location
        return _session(name)

    return router


def _sessions_router(sessions: Sessions) -> APIRouter:
    router = APIRouter(tags=["sessions"])

    @router.get(resources.SESSIONS)
    async def list_sessions() -> dict[str, Any]:
        links = [link(f"{resources.SESSIONS}/{name}") for name in sessions.names()]
        return collection(resources.SESSIONS, "Sessions", links)

    @router.delete(resources.SESSIONS + "/{name}", status_code=204)
    async def logout(name: str) -> None:
        if not sessions.end(name):
            raise Refused(404, f"no session {name}", "ResourceNotFound")

    return router


def _memory_router(allocations: HostAllocations) -> APIRouter:
    router = APIRouter(tags=["memory"])

    @router.get(resources.MEMORY_DOMAIN)
    def memory_domain() -> dict[str, Any]:
        return _memory_domain(allocations.regions())

    @router.get(resources.MEMORY_CHUNKS)
    def memory_chunks(expand: Annotated[str, Query(alias="$expand")] = "") -> dict[str, Any]:
        devices = allocations.list_all()
        members = (
            [_chunk(device) for device in devices]
            if expand
            else [link(f"{resources.MEMORY_CHUNKS}/{device.allocation_id}") for device in devices]
        )
        return collection(resources.MEMORY_CHUNKS, "Materialised regions", members)

    @router.get(resources.MEMORY_CHUNKS + "/{allocation_id}")
    def memory_chunk(allocation_id: str) -> dict[str, Any]:
        for device in allocations.list_all():
            if device.allocation_id == allocation_id:
                return _chunk(device)
        raise Refused(404, f"no allocation {allocation_id} on this host", "ResourceNotFound")

    return router


def _action_router(allocations: HostAllocations) -> APIRouter:
    router = APIRouter(tags=["actions"])

    @router.post(resources.MATERIALIZE, responses={201: {"description": "It was made now."}})
    async def materialize_dax(request: MaterializeRequest, response: Response) -> dict[str, Any]:
        device, is_new = await allocations.materialize(
            request.allocation_id, request.physical_start, request.size_bytes
        )
        response.status_code = 201 if is_new else 200
        response.headers["Location"] = f"{resources.MEMORY_CHUNKS}/{device.allocation_id}"
        return _chunk(device)

    @router.post(resources.UNMATERIALIZE)
    async def unmaterialize_dax(request: UnmaterializeRequest) -> dict[str, Any]:
        holders = await allocations.unmaterialize(
            request.allocation_id, fence=request.fence, wait_s=request.wait_s
        )
        if holders:
            raise held(request.allocation_id, holders)
        return {"AllocationId": request.allocation_id, "Unmaterialized": True}

    return router


def _session(name: str) -> dict[str, Any]:
    return {
        "@odata.id": f"{resources.SESSIONS}/{name}",
        "@odata.type": "#Session.v1_5_0.Session",
        "Id": name,
        "Name": "Session",
    }


def _memory_domain(regions: Sequence[MemoryRegion]) -> dict[str, Any]:
    return {
        "@odata.id": resources.MEMORY_DOMAIN,
        "@odata.type": "#MemoryDomain.v1_5_0.MemoryDomain",
        "Id": "CXL",
        "Name": "CXL memory",
        "AllowsMemoryChunkCreation": False,  # the fabric manager composes; the actions split
        "MemoryChunks": link(resources.MEMORY_CHUNKS),
        "Actions": {
            "Oem": {
                "#CxlHost.MaterializeDAX": {"target": resources.MATERIALIZE},
                "#CxlHost.UnmaterializeDAX": {"target": resources.UNMATERIALIZE},
            }
        },
        "Oem": {
            "CxlHost": {
                "Regions": [
                    DaxRegion(
                        name=region.name,
                        physical_start=region.range.start if region.range else None,
                        size_bytes=region.size_bytes,
                        available_bytes=region.available_bytes,
                        align_bytes=region.align_bytes,
                    ).model_dump(mode="json", by_alias=True)
                    for region in regions
                ]
            }
        },
    }


def _chunk(device: DaxDevice) -> dict[str, Any]:
    return {
        "@odata.id": f"{resources.MEMORY_CHUNKS}/{device.allocation_id}",
        "@odata.type": "#MemoryChunks.v1_6_0.MemoryChunks",
        "Id": device.allocation_id,
        "Name": f"Region {device.allocation_id}",
        "AddressRangeType": "Volatile",
        "MemoryChunkSizeMiB": device.size_bytes // MIB,
        "Status": {
            "State": "Enabled" if device.phase is resources.AllocationPhase.READY else "Disabled"
        },
        "Oem": {"CxlHost": device.model_dump(mode="json", by_alias=True)},
    }


class _BoundedBody:
    """Ends requests whose body is larger than any of ours."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        left_bytes = _BODY_BYTES_MAX

        async def receive_bounded() -> Message:
            nonlocal left_bytes
            message = await receive()
            left_bytes -= len(message.get("body", b""))
            if left_bytes < 0:
                raise HTTPException(413, f"a body may have {_BODY_BYTES_MAX} bytes")
            return message

        await self._app(scope, receive_bounded, send)
