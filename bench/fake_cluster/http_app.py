"""The HTTP side: the paths, methods and bodies of the API server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, Final

import yaml
from aiohttp import web

from hymcache.bench.fake_cluster.faults import Faults
from hymcache.bench.fake_cluster.namespace_controller import SERVICE_ACCOUNT
from hymcache.bench.fake_cluster.object_store import Change, Item, Name, ObjectStore
from hymcache.bench.fake_cluster.selectors import matches_fields, matches_labels
from hymcache.bench.fake_cluster.status_error import StatusError
from hymcache.dra import cluster
from hymcache.dra.cluster import ResourceKind

KINDS: Final = (
    cluster.POD,
    cluster.NODE,
    cluster.CONFIG_MAP,
    cluster.EVENT,
    cluster.LEASE,
    cluster.RESOURCE_CLAIM,
    cluster.RESOURCE_SLICE,
    cluster.DEVICE_CLASS,
    cluster.NAMESPACE,
    SERVICE_ACCOUNT,
)
_BOOKMARK_PERIOD_S: Final = 30.0
_WATCH_S_MAX: Final = 600.0
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ApiServer:
    """Serves an ObjectStore. `faults` says what goes wrong at the moment."""

    def __init__(self, store: ObjectStore, faults: Faults) -> None:
        self.store = store
        self._faults = faults
        # What was asked, as RBAC sees it: (group, resource, verb).
        self.requested: set[tuple[str, str, str]] = set()
        # Whether a watch that cannot be had is refused by an event, after a 200.
        self.errors_in_stream = False

    def make_app(self) -> web.Application:
        """The application, all kinds at their paths."""
        app = web.Application(middlewares=[self._guard], client_max_size=4 << 20)
        for kind in KINDS:
            for prefix in {kind.path(), kind.path("{namespace}")}:
                app.router.add_get(prefix, self._bound(self._list_or_watch, kind))
                app.router.add_post(prefix, self._bound(self._create, kind))
                for part in ("", "/status"):
                    path = f"{prefix}/{{name}}{part}"
                    app.router.add_get(path, self._bound(self._get, kind))
                    app.router.add_put(path, self._bound(self._replace, kind))
                    app.router.add_patch(path, self._bound(self._patch, kind))
                app.router.add_delete(f"{prefix}/{{name}}", self._bound(self._delete, kind))
        app.router.add_get("/version", self._version)
        return app

    def _bound(
        self,
        handle: Callable[[web.Request, ResourceKind], Awaitable[web.StreamResponse]],
        kind: ResourceKind,
    ) -> _Handler:
        async def run(request: web.Request) -> web.StreamResponse:
            return await handle(request, kind)

        return run

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        await self._faults.delay()
        try:
            self._faults.check(request.method, request.path)
            return await handler(request)
        except StatusError as error:
            return web.json_response(error.body(), status=error.code)

    async def _version(self, _request: web.Request) -> web.StreamResponse:
        minor = "36" if self.store.gates.consumable_capacity else "34"
        return web.json_response({"major": "1", "minor": minor, "gitVersion": f"v1.{minor}.0"})

    def _note(self, kind: ResourceKind, verb: str, part: str = "") -> None:
        group = kind.api_version.rpartition("/")[0]
        self.requested.add((group, f"{kind.plural}/{part}" if part else kind.plural, verb))

    # --- reading -----------------------------------------------------------------------------

    async def _get(self, request: web.Request, kind: ResourceKind) -> web.StreamResponse:
        self._note(kind, "get")
        return web.json_response(self.store.get(kind.kind, _name(request)))

    async def _list_or_watch(self, request: web.Request, kind: ResourceKind) -> web.StreamResponse:
        if request.query.get("watch") in ("true", "1", "True"):
            self._note(kind, "watch")
            return await self._watch(request, kind)
        self._note(kind, "list")
        items = [item for item in self.store.items(kind.kind) if _wanted(request, item)]
        metadata = {"resourceVersion": str(self.store.version)}
        start = int(request.query.get("continue") or 0)
        limit = int(request.query.get("limit") or 0)
        if limit and start + limit < len(items):
            metadata["continue"] = str(start + limit)
        page = items[start : start + limit] if limit else items
        return web.json_response(
            {
                "kind": f"{kind.kind}List",
                "apiVersion": kind.api_version,
                "metadata": metadata,
                "items": page,
            }
        )

    async def _watch(self, request: web.Request, kind: ResourceKind) -> web.StreamResponse:
        seconds = min(float(request.query.get("timeoutSeconds") or _WATCH_S_MAX), _WATCH_S_MAX)
        version = int(request.query.get("resourceVersion") or 0) or self.store.version
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        try:
            watch, missed = self.store.open_watch(kind.kind, version)
        except StatusError as error:
            if not self.errors_in_stream:
                raise
            await response.prepare(request)
            event = {"type": "ERROR", "object": error.body()}
            await response.write(json.dumps(event).encode() + b"\n")
            return response
        try:
            await response.prepare(request)
            for change in missed:
                await self._send(response, request, change)
            async with asyncio.timeout(seconds):
                while True:
                    if not await self._next_event(response, request, kind, watch):
                        break
        except (TimeoutError, ConnectionError):
            pass
        finally:
            self.store.close_watch(watch)
        return response

    async def _next_event(
        self,
        response: web.StreamResponse,
        request: web.Request,
        kind: ResourceKind,
        watch: asyncio.Queue[Change | None],
    ) -> bool:
        try:
            async with asyncio.timeout(_BOOKMARK_PERIOD_S):
                change = await watch.get()
        except TimeoutError:
            metadata = {"resourceVersion": str(self.store.version)}
            item = {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": metadata}
            await response.write(json.dumps({"type": "BOOKMARK", "object": item}).encode() + b"\n")
            return True
        if change is None:
            return False
        await self._send(response, request, change)
        return True

    async def _send(
        self, response: web.StreamResponse, request: web.Request, change: Change
    ) -> None:
        if _wanted(request, change.item):
            await response.write(change.line)

    # --- writing -----------------------------------------------------------------------------

    async def _create(self, request: web.Request, kind: ResourceKind) -> web.StreamResponse:
        self._note(kind, "create")
        body = await _body(request, kind)
        if kind.namespaced:
            body["metadata"].setdefault("namespace", request.match_info["namespace"])
        return web.json_response(self.store.create(kind.kind, body), status=201)

    async def _replace(self, request: web.Request, kind: ResourceKind) -> web.StreamResponse:
        part = _part(request)
        self._note(kind, "update", part)
        body = await _body(request, kind)
        return web.json_response(self.store.update(kind.kind, _name(request), body, part))

    async def _patch(self, request: web.Request, kind: ResourceKind) -> web.StreamResponse:
        part = _part(request)
        self._note(kind, "patch", part)
        content_type = request.content_type
        if content_type == "application/merge-patch+json":
            patch = await request.json()
            return web.json_response(self.store.merge(kind.kind, _name(request), patch, part))
        if content_type != "application/apply-patch+yaml":
            raise StatusError(415, "UnsupportedMediaType", f"{content_type}: not known here")
        body = await _body(request, kind)
        manager = request.query.get("fieldManager", "")
        if not manager:
            raise StatusError(422, "Invalid", "PatchOptions: fieldManager: is required for apply")
        if kind.namespaced:
            body["metadata"].setdefault("namespace", request.match_info["namespace"])
        force = request.query.get("force") in ("true", "True", "1")
        item = self.store.apply(kind.kind, _name(request), body, manager, force=force, part=part)
        return web.json_response(item)

    async def _delete(self, request: web.Request, kind: ResourceKind) -> web.StreamResponse:
        self._note(kind, "delete")
        options = await request.json() if request.can_read_body else {}
        uid = (options.get("preconditions") or {}).get("uid", "")
        return web.json_response(self.store.delete(kind.kind, _name(request), uid))


def _name(request: web.Request) -> Name:
    return request.match_info.get("namespace", ""), request.match_info["name"]


def _part(request: web.Request) -> str:
    return "status" if request.path.endswith("/status") else ""


def _wanted(request: web.Request, item: Item) -> bool:
    namespace = request.match_info.get("namespace")
    if namespace is not None and item["metadata"].get("namespace") != namespace:
        return False
    return matches_labels(item, request.query.get("labelSelector", "")) and matches_fields(
        item, request.query.get("fieldSelector", "")
    )


async def _body(request: web.Request, kind: ResourceKind) -> Item:
    text = await request.text()
    try:
        # JSON is YAML too, and this server is measured.
        is_yaml = "yaml" in request.content_type and not text.startswith("{")
        body: Any = yaml.safe_load(text) if is_yaml else json.loads(text)
    except (ValueError, yaml.YAMLError) as error:
        raise StatusError(400, "BadRequest", f"body: {error}") from error
    if not isinstance(body, dict) or not isinstance(body.get("metadata"), dict):
        raise StatusError(400, "BadRequest", "body: not an object with metadata")
    if (body.get("apiVersion"), body.get("kind")) != (kind.api_version, kind.kind):
        raise StatusError(400, "BadRequest", f"body: not a {kind.api_version} {kind.kind}")
    return body
