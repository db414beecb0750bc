"""Requests to the API server, as a Protocol and over the official client."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import aiohttp
from kubernetes.aio import client as official
from kubernetes.aio import config as official_config

from hymcache.dra.cluster.errors import (
    ClusterError,
    ClusterUnavailable,
    ObjectConflict,
    ObjectMissing,
    Rejected,
    VersionGone,
)
from hymcache.dra.cluster.kinds import ResourceKind
from hymcache.errors import ConfigError

JsonObject = dict[str, Any]

_REQUEST_TIMEOUT_S: Final = 10.0
# Lists are read in pages of this many objects: a page is what the server holds in memory.
_PAGE_OBJECTS_MAX: Final = 500
_PAGES_MAX: Final = 2_000
# The server ends a watch after this long; its bookmarks come about once a minute, so a watch
# that is silent for longer than two of them is on a dead connection.
_WATCH_S: Final = 300
_WATCH_SILENCE_S: Final = 150.0
_CONNECTIONS_MAX: Final = 64
_MERGE_PATCH: Final = "application/merge-patch+json"
# JSON is YAML; the server knows server-side apply by this type alone.
_APPLY_PATCH: Final = "application/apply-patch+yaml"

Trim = Callable[[JsonObject], JsonObject | None]


def whole(item: JsonObject) -> JsonObject:
    """Leaves all of an object."""
    return item


@dataclass(frozen=True)
class ObjectList:
    """All objects of a collection, and the version from which to watch it."""

    items: tuple[JsonObject, ...]
    resource_version: str


@dataclass(frozen=True)
class WatchEvent:
    """A change: `kind` is ADDED, MODIFIED, DELETED or BOOKMARK (then only a version counts)."""

    kind: str
    item: JsonObject


class ClusterClient(Protocol):
    """What the driver asks of an API server. Every call but a watch ends within 10 s.

    All raise ClusterUnavailable, and a ClusterError where the server refuses.
    """

    async def get(self, kind: ResourceKind, name: str, namespace: str | None = None) -> JsonObject:
        """One object; ObjectMissing where there is none."""

    async def list_all(
        self,
        kind: ResourceKind,
        namespace: str | None = None,
        *,
        label_selector: str = "",
        field_selector: str = "",
        trim: Trim = whole,
    ) -> ObjectList:
        """All objects of the kind, in one namespace or in all, each as `trim` leaves it.

        Those of which it leaves None are left out. It is called page by page, so that whole
        objects are not all in memory at once.
        """

    def watch(
        self,
        kind: ResourceKind,
        resource_version: str,
        namespace: str | None = None,
        *,
        label_selector: str = "",
        field_selector: str = "",
    ) -> AsyncGenerator[WatchEvent, None]:
        """Changes after that version, until the server ends the watch.

        Raises VersionGone where the version is too old.
        """

    async def create(self, kind: ResourceKind, body: JsonObject) -> JsonObject:
        """The new object as it is stored; ObjectConflict where one has its name."""

    async def replace(self, kind: ResourceKind, body: JsonObject) -> JsonObject:
        """Writes a whole object; ObjectConflict unless its resourceVersion is the newest."""

    async def merge_patch(
        self, kind: ResourceKind, name: str, body: JsonObject, namespace: str | None = None
    ) -> JsonObject:
        """Merges fields in; with metadata.resourceVersion in them, only into that version."""

    async def apply(
        self, kind: ResourceKind, body: JsonObject, field_manager: str, *, part: str = ""
    ) -> JsonObject:
        """Server-side apply: the manager's fields become those in `body`, others stay."""

    async def delete(
        self, kind: ResourceKind, name: str, namespace: str | None = None, *, uid: str = ""
    ) -> None:
        """Asks for its end; with `uid`, only that of the object with it (else ObjectConflict)."""

    async def close(self) -> None:
        """Gives the connections back."""


class OfficialClient:
    """A ClusterClient over kubernetes.aio's transport and authentication."""

    def __init__(self, configuration: official.Configuration) -> None:
        configuration.connection_pool_maxsize = _CONNECTIONS_MAX
        # The caller knows what may be repeated.
        configuration.retries = None
        # Else each request looks for the user's .netrc, in a thread. A cluster's API server is not
        # behind a proxy, and its credentials are in the kubeconfig.
        configuration.client_session_kwargs = {"trust_env": False}
        self._api = official.ApiClient(configuration)
        self._host = str(configuration.host)

    async def get(self, kind: ResourceKind, name: str, namespace: str | None = None) -> JsonObject:
        """See ClusterClient."""
        return await self._send("GET", kind.path(namespace, name))

    async def list_all(
        self,
        kind: ResourceKind,
        namespace: str | None = None,
        *,
        label_selector: str = "",
        field_selector: str = "",
        trim: Trim = whole,
    ) -> ObjectList:
        """See ClusterClient."""
        items: list[JsonObject] = []
        query = {"limit": str(_PAGE_OBJECTS_MAX)}
        query |= _selectors(label_selector, field_selector)
        for _ in range(_PAGES_MAX):
            page = await self._send("GET", kind.path(namespace), query)
            trimmed = (trim(item) for item in page.get("items") or ())
            items += (item for item in trimmed if item is not None)
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                return ObjectList(tuple(items), metadata.get("resourceVersion", ""))
            query["continue"] = metadata["continue"]
        raise ClusterError(f"{kind.plural}: more than {_PAGES_MAX * _PAGE_OBJECTS_MAX} objects")

    async def watch(
        self,
        kind: ResourceKind,
        resource_version: str,
        namespace: str | None = None,
        *,
        label_selector: str = "",
        field_selector: str = "",
    ) -> AsyncGenerator[WatchEvent, None]:
        """See ClusterClient."""
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(_WATCH_S),
        }
        query |= _selectors(label_selector, field_selector)
        timeout = aiohttp.ClientTimeout(sock_connect=_REQUEST_TIMEOUT_S, sock_read=_WATCH_SILENCE_S)
        response = await self._request("GET", kind.path(namespace), query, timeout=timeout)
        try:
            if response.status != 200:
                await _refuse(response, kind.plural)
            while line := await self._next_line(response):
                event = self._parse_event(line)
                if event["type"] == "ERROR":
                    raise _error_of(event["object"], int(event["object"].get("code", 0)))
                yield WatchEvent(event["type"], event["object"])
        finally:
            response.close()

    async def create(self, kind: ResourceKind, body: JsonObject) -> JsonObject:
        """See ClusterClient."""
        namespace = body["metadata"].get("namespace")
        return await self._send("POST", kind.path(namespace), body=body)

    async def replace(self, kind: ResourceKind, body: JsonObject) -> JsonObject:
        """See ClusterClient."""
        metadata = body["metadata"]
        path = kind.path(metadata.get("namespace"), metadata["name"])
        return await self._send("PUT", path, body=body)

    async def merge_patch(
        self, kind: ResourceKind, name: str, body: JsonObject, namespace: str | None = None
    ) -> JsonObject:
        """See ClusterClient."""
        path = kind.path(namespace, name)
        return await self._send("PATCH", path, body=body, content_type=_MERGE_PATCH)

    async def apply(
        self, kind: ResourceKind, body: JsonObject, field_manager: str, *, part: str = ""
    ) -> JsonObject:
        """See ClusterClient."""
        metadata = body["metadata"]
        path = kind.path(metadata.get("namespace"), metadata["name"], part)
        query = {"fieldManager": field_manager, "force": "true"}
        return await self._send("PATCH", path, query, body=body, content_type=_APPLY_PATCH)

    async def delete(
        self, kind: ResourceKind, name: str, namespace: str | None = None, *, uid: str = ""
    ) -> None:
        """See ClusterClient."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1"} | (
            {"preconditions": {"uid": uid}} if uid else {}
        )
        await self._send("DELETE", kind.path(namespace, name), body=body)

    async def close(self) -> None:
        """See ClusterClient."""
        await self._api.close()

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        body: JsonObject | None = None,
        content_type: str = "application/json",
    ) -> JsonObject:
        timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
        response = await self._request(
            method, path, query, body=body, content_type=content_type, timeout=timeout
        )
        try:
            if not 200 <= response.status < 300:
                await _refuse(response, path)
            answer: JsonObject = await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unavailable(error) from error
        finally:
            response.release()
        return answer

    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        body: JsonObject | None = None,
        content_type: str = "application/json",
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's own
    ) -> aiohttp.ClientResponse:
        request = await self._api.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            answer = await self._api.call_api(*request, _request_timeout=timeout)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unavailable(error) from error
        response: aiohttp.ClientResponse = answer.response
        return response

    async def _next_line(self, response: aiohttp.ClientResponse) -> bytes:
        try:
            return await response.content.readline()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            # ValueError: a line longer than the buffer, which only a broken stream has.
            raise self._unavailable(error) from error

    def _parse_event(self, line: bytes) -> JsonObject:
        try:
            event: JsonObject = json.loads(line)
        except ValueError as error:
            # Cut off: the connection broke in the middle of it.
            raise self._unavailable(error) from error
        return event

    def _unavailable(self, error: BaseException) -> ClusterUnavailable:
        reason = str(error) or type(error).__name__
        return ClusterUnavailable(f"{self._host}: the API server does not answer: {reason}")


async def connect(kubeconfig: Path | None) -> OfficialClient:
    """A client for the cluster that `kubeconfig` names; without one, for the one that it runs in.

    Raises ConfigError.
    """
    configuration = official.Configuration()
    try:
        if kubeconfig is None:
            official_config.load_incluster_config(client_configuration=configuration)
        else:
            await official_config.load_kube_config(
                config_file=str(kubeconfig), client_configuration=configuration
            )
    except (official_config.ConfigException, OSError) as error:
        where = "not in a pod" if kubeconfig is None else str(kubeconfig)
        raise ConfigError(f"{where}: {error}; name a kubeconfig with --kubeconfig") from error
    return OfficialClient(configuration)


def _selectors(label_selector: str, field_selector: str) -> dict[str, str]:
    chosen = {"labelSelector": label_selector, "fieldSelector": field_selector}
    return {name: value for name, value in chosen.items() if value}


async def _refuse(response: aiohttp.ClientResponse, what: str) -> None:
    text = await response.text(errors="replace")
    try:
        status = json.loads(text)
    except ValueError:
        status = {"message": text[:200]}
    if not isinstance(status, dict):
        status = {"message": text[:200]}
    status.setdefault("message", what)
    raise _error_of(status, response.status)


def _error_of(status: JsonObject, code: int) -> ClusterError | ClusterUnavailable:
    reason = str(status.get("reason", ""))
    message = " ".join(str(status.get("message") or reason or f"status {code}").split())
    if code == 429 or code >= 500:
        return ClusterUnavailable(f"the API server cannot now ({code}): {message}")
    error_class = {404: ObjectMissing, 409: ObjectConflict, 410: VersionGone}.get(code, Rejected)
    return error_class(f"{message} ({code})", code, reason)
