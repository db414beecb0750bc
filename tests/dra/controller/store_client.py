"""A ClusterClient straight on the fake control plane's store: no HTTP, no other process."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncGenerator, Callable

from hymcache.bench.fake_cluster.object_store import ObjectStore
from hymcache.bench.fake_cluster.selectors import matches_fields, matches_labels
from hymcache.bench.fake_cluster.status_error import StatusError
from hymcache.dra.cluster import (
    ClusterError,
    ClusterUnavailable,
    JsonObject,
    ObjectConflict,
    ObjectList,
    ObjectMissing,
    Rejected,
    ResourceKind,
    VersionGone,
    WatchEvent,
)
from hymcache.dra.cluster.client import Trim, whole

_ERRORS = {404: ObjectMissing, 409: ObjectConflict, 410: VersionGone}


class StoreClient:
    """`trouble` is called before each request, and may raise what a network would."""

    def __init__(self, store: ObjectStore, trouble: Callable[[], None] = lambda: None) -> None:
        self._store = store
        self._trouble = trouble

    async def get(self, kind: ResourceKind, name: str, namespace: str | None = None) -> JsonObject:
        return await self._do(lambda: self._store.get(kind.kind, (namespace or "", name)))

    async def list_all(
        self,
        kind: ResourceKind,
        namespace: str | None = None,
        *,
        label_selector: str = "",
        field_selector: str = "",
        trim: Trim = whole,
    ) -> ObjectList:
        def find() -> JsonObject:
            items = [
                item
                for item in self._store.items(kind.kind)
                if namespace in (None, item["metadata"].get("namespace"))
                and matches_labels(item, label_selector)
                and matches_fields(item, field_selector)
            ]
            return {"items": items, "version": str(self._store.version)}

        found = await self._do(find)
        trimmed = (trim(item) for item in found["items"])
        return ObjectList(tuple(item for item in trimmed if item is not None), found["version"])

    async def watch(
        self,
        kind: ResourceKind,
        resource_version: str,
        namespace: str | None = None,
        *,
        label_selector: str = "",
        field_selector: str = "",
    ) -> AsyncGenerator[WatchEvent, None]:
        await asyncio.sleep(0)
        self._trouble()
        try:
            watch, missed = self._store.open_watch(kind.kind, int(resource_version))
        except StatusError as error:
            raise _translated(error) from error
        try:
            for change in missed:
                yield WatchEvent(change.event, json.loads(change.line)["object"])
            while (following := await watch.get()) is not None:
                yield WatchEvent(following.event, json.loads(following.line)["object"])
        finally:
            self._store.close_watch(watch)

    async def create(self, kind: ResourceKind, body: JsonObject) -> JsonObject:
        return await self._do(lambda: self._store.create(kind.kind, body))

    async def replace(self, kind: ResourceKind, body: JsonObject) -> JsonObject:
        return await self._do(lambda: self._store.update(kind.kind, _name(body), body))

    async def merge_patch(
        self, kind: ResourceKind, name: str, body: JsonObject, namespace: str | None = None
    ) -> JsonObject:
        return await self._do(lambda: self._store.merge(kind.kind, (namespace or "", name), body))

    async def apply(
        self, kind: ResourceKind, body: JsonObject, field_manager: str, *, part: str = ""
    ) -> JsonObject:
        return await self._do(
            lambda: self._store.apply(
                kind.kind, _name(body), body, field_manager, force=True, part=part
            )
        )

    async def delete(
        self, kind: ResourceKind, name: str, namespace: str | None = None, *, uid: str = ""
    ) -> None:
        await self._do(lambda: self._store.delete(kind.kind, (namespace or "", name), uid))

    async def close(self) -> None:
        await asyncio.sleep(0)

    async def _do(self, act: Callable[[], JsonObject]) -> JsonObject:
        await asyncio.sleep(0)
        self._trouble()
        try:
            result = act()
        except StatusError as error:
            raise _translated(error) from error
        # Whether the answer comes back is another matter.
        self._trouble()
        return copy.deepcopy(result)


def _translated(error: StatusError) -> ClusterError | ClusterUnavailable:
    if error.code >= 500:
        return ClusterUnavailable(str(error))
    return _ERRORS.get(error.code, Rejected)(str(error), error.code, error.reason)


def _name(body: JsonObject) -> tuple[str, str]:
    return body["metadata"].get("namespace", ""), body["metadata"]["name"]
