"""The API server as tests use it: the driver's client, without async; and objects of users."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from hymcache.dra import cluster, names
from hymcache.dra.cluster import JsonObject, ObjectMissing, OfficialClient, ResourceKind

Result = TypeVar("Result")
CALL_TIMEOUT_S = 30.0
CLASS_NAME = names.DEVICE_CLASS


class ClusterApi:
    """Calls wait for their answers; a thread of its own runs the client."""

    def __init__(self, kubeconfig: Path, namespace: str = "default") -> None:
        self.namespace = namespace
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client: OfficialClient = self.call(cluster.connect(kubeconfig))

    def call(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """What it returns or raises."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(CALL_TIMEOUT_S)

    @property
    def client(self) -> OfficialClient:
        """For use within `call`."""
        return self._client

    def close(self) -> None:
        self.call(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_TIMEOUT_S)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- any object --------------------------------------------------------------------------

    def create(self, kind: ResourceKind, body: JsonObject) -> JsonObject:
        """The object as it is stored."""
        whole = {"apiVersion": kind.api_version, "kind": kind.kind, **body}
        if kind.namespaced:
            whole["metadata"].setdefault("namespace", self.namespace)
        return self.call(self._client.create(kind, whole))

    def get(self, kind: ResourceKind, name: str) -> JsonObject:
        """One object."""
        return self.call(self._client.get(kind, name, self._place(kind)))

    def find(self, kind: ResourceKind, name: str) -> JsonObject | None:
        """One object, None where there is none."""
        try:
            return self.get(kind, name)
        except ObjectMissing:
            return None

    def items(
        self, kind: ResourceKind, namespace: str | None = None, *, label_selector: str = ""
    ) -> tuple[JsonObject, ...]:
        """All objects of a kind, in one namespace or in all."""
        found = self._client.list_all(kind, namespace, label_selector=label_selector)
        return self.call(found).items

    def patch(self, kind: ResourceKind, name: str, body: JsonObject) -> JsonObject:
        """Merges fields into an object."""
        return self.call(self._client.merge_patch(kind, name, body, self._place(kind)))

    def delete(self, kind: ResourceKind, name: str) -> None:
        """Asks for its end."""
        self.call(self._client.delete(kind, name, self._place(kind)))

    def delete_item(self, kind: ResourceKind, item: JsonObject) -> None:
        """Asks for the end of an object that was read, wherever it is."""
        metadata = item["metadata"]
        self.call(self._client.delete(kind, metadata["name"], metadata.get("namespace")))

    def _place(self, kind: ResourceKind) -> str | None:
        return self.namespace if kind.namespaced else None

    # --- users' objects ----------------------------------------------------------------------

    def add_node(self, name: str) -> None:
        """A node with the label by which slices select it."""
        labels = {"kubernetes.io/hostname": name}
        self.create(cluster.NODE, {"metadata": {"name": name, "labels": labels}, "spec": {}})

    def add_device_class(self, driver: str = names.DRIVER_NAME, name: str = CLASS_NAME) -> None:
        """The class that claims name."""
        expression = f'device.driver == "{driver}"'
        spec = {"selectors": [{"cel": {"expression": expression}}]}
        self.create(cluster.DEVICE_CLASS, {"metadata": {"name": name}, "spec": spec})

    def add_claim(
        self,
        name: str,
        size_mib: int | None = None,
        *,
        annotations: dict[str, str] | None = None,
        parameters: JsonObject | None = None,
    ) -> JsonObject:
        """A claim for one region. `parameters`: shareCount, qos, ... as opaque configuration."""
        exactly: JsonObject = {"deviceClassName": CLASS_NAME}
        if size_mib is not None:
            exactly["capacity"] = {"requests": {names.CAPACITY: str(size_mib)}}
        devices: JsonObject = {"requests": [{"name": "memory", "exactly": exactly}]}
        if parameters:
            identity = {"apiVersion": names.CONFIG_API_VERSION, "kind": names.CONFIG_KIND}
            opaque = {"driver": names.DRIVER_NAME, "parameters": {**identity, **parameters}}
            devices["config"] = [{"opaque": opaque}]
        metadata = {"name": name, "annotations": annotations or {}}
        return self.create(
            cluster.RESOURCE_CLAIM, {"metadata": metadata, "spec": {"devices": devices}}
        )

    def add_pod(self, name: str, claim: str, *, node: str | None = None) -> JsonObject:
        """A pod that uses a claim; `node` pins it."""
        spec: JsonObject = {
            "containers": [
                {"name": "c", "image": "example/c", "resources": {"claims": [{"name": "memory"}]}}
            ],
            "resourceClaims": [{"name": "memory", "resourceClaimName": claim}],
        }
        if node is not None:
            spec["nodeSelector"] = {"kubernetes.io/hostname": node}
        return self.create(cluster.POD, {"metadata": {"name": name}, "spec": spec})

    def claim(self, name: str) -> JsonObject:
        """A claim."""
        return self.get(cluster.RESOURCE_CLAIM, name)

    def node_of(self, pod: str) -> str | None:
        """The node that a pod is bound to."""
        node: str | None = self.get(cluster.POD, pod)["spec"].get("nodeName")
        return node

    def device_status(self, claim: str) -> JsonObject | None:
        """The first entry of the claim's status.devices."""
        found = self.find(cluster.RESOURCE_CLAIM, claim)
        devices = ((found or {}).get("status") or {}).get("devices") or ()
        return devices[0] if devices else None

    def condition(self, claim: str, kind: str = names.CONDITION_ATTACHED) -> JsonObject | None:
        """A condition of the claim's first device."""
        status = self.device_status(claim) or {}
        for condition in status.get("conditions") or ():
            if condition["type"] == kind:
                found: JsonObject = condition
                return found
        return None

    def is_attached(self, claim: str) -> bool:
        """Whether its first device is."""
        condition = self.condition(claim)
        return condition is not None and condition["status"] == "True"


def wait_until(
    condition: Callable[[], Result], what: str, *, timeout_s: float = 60.0, period_s: float = 0.05
) -> Result:
    """The first true value of `condition`; fails with `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(period_s)
