"""A whole controller and a scheduler, in this process, on a control plane and a blade in memory."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from hymcache.bench.fake_cluster.feature_gates import FeatureGates
from hymcache.bench.fake_cluster.object_store import Item, ObjectStore
from hymcache.bench.fake_cluster.scheduler import Scheduler, SchedulerOptions
from hymcache.dra import names
from hymcache.dra.controller import Controller, ControllerSettings, LeaseTimes
from hymcache.dra.fabric import HostId
from hymcache.dra.retry import Backoff
from tests.dra.controller.memory_fabric import BLOCK_MIB, MemoryFabric
from tests.dra.controller.store_client import StoreClient

TIMEOUT_S = 20.0
_STEP_S = 0.01


class Driver:
    """Users' view: claims, pods, and what becomes of them."""

    def __init__(self, hosts: Sequence[str], *, knows_owners: bool = True, **settings: Any) -> None:
        self.store = ObjectStore(FeatureGates())
        self.fabric = MemoryFabric(
            knows_owners, 16 * BLOCK_MIB, tuple(map(HostId, hosts)), source=random.Random(1)
        )
        self.settings = ControllerSettings(
            namespace="driver",
            identity="only",
            cluster="here",
            backoff=Backoff(first_s=0.01, longest_s=0.1),
            lease=LeaseTimes(duration_s=30.0, renew_deadline_s=20.0, retry_s=0.1),
            **settings,
        )
        for host in hosts:
            labels = {"kubernetes.io/hostname": host}
            self.create("Node", {"metadata": {"name": host, "labels": labels}, "spec": {}})
        expression = f'device.driver == "{names.DRIVER_NAME}"'
        spec = {"selectors": [{"cel": {"expression": expression}}]}
        self.create("DeviceClass", {"metadata": {"name": "c"}, "spec": spec})

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Controller]:
        """Controller and scheduler work inside of the block; what ends them is raised."""
        controller = Controller(StoreClient(self.store), self.fabric, self.settings)
        async with self.scheduling(), _running(controller.run()):
            yield controller

    def scheduling(self) -> contextlib.AbstractAsyncContextManager[None]:
        """The scheduler works inside of the block."""
        return _running(Scheduler(self.store, SchedulerOptions(retry_s=0.02)).run())

    def create(self, kind: str, body: Item) -> Item:
        return self.store.create(kind, {"kind": kind, "apiVersion": "v1", **body})

    def add_claim(
        self, name: str, size_mib: int = BLOCK_MIB, parameters: dict[str, Any] | None = None
    ) -> None:
        """A claim; `parameters` are its opaque configuration's."""
        capacity = {"requests": {names.CAPACITY: str(size_mib)}}
        devices: Item = {
            "requests": [
                {"name": "memory", "exactly": {"deviceClassName": "c", "capacity": capacity}}
            ]
        }
        if parameters is not None:
            kind = {"apiVersion": names.CONFIG_API_VERSION, "kind": names.CONFIG_KIND}
            opaque = {"driver": names.DRIVER_NAME, "parameters": {**kind, **parameters}}
            devices["config"] = [{"opaque": opaque}]
        metadata = {"name": name, "namespace": "default"}
        self.create("ResourceClaim", {"metadata": metadata, "spec": {"devices": devices}})

    def add_pod(self, name: str, claim: str, node: str) -> None:
        """A pod that may run on one node."""
        entry = {"name": "memory", "resourceClaimName": claim}
        spec = {"resourceClaims": [entry], "nodeSelector": {"kubernetes.io/hostname": node}}
        self.create("Pod", {"metadata": {"name": name, "namespace": "default"}, "spec": spec})

    def delete(self, kind: str, name: str) -> None:
        self.store.delete(kind, ("default", name))

    def is_bound(self, pod: str) -> bool:
        item = self.store.find("Pod", ("default", pod))
        return item is not None and bool(item["spec"].get("nodeName"))

    def device_of(self, claim: str) -> Item:
        """The claim's entry of status.devices; empty where it has none."""
        item = self.store.get("ResourceClaim", ("default", claim))
        devices = item["status"].get("devices") or [{}]
        first: Item = devices[0]
        return first

    def offer_more(self, pool: str) -> None:
        """A slice like the first, of a blade that the fabric manager does not know."""
        body = copy.deepcopy(next(self.store.items("ResourceSlice")))
        body["metadata"] = {"name": f"a-slice-of-{pool}"}
        body["spec"]["pool"]["name"] = pool
        self.create("ResourceSlice", body)

    def pools(self) -> list[str]:
        """Those on offer."""
        return [item["spec"]["pool"]["name"] for item in self.store.items("ResourceSlice")]

    def pool_of(self, claim: str) -> str | None:
        """Where the claim has its device."""
        allocation = self.store.get("ResourceClaim", ("default", claim))["status"].get("allocation")
        pool: str | None = allocation["devices"]["results"][0]["pool"] if allocation else None
        return pool

    def taints(self) -> list[str]:
        """Values of the taints of all devices."""
        devices = [
            device
            for item in self.store.items("ResourceSlice")
            for device in item["spec"].get("devices") or ()
        ]
        return [taint["value"] for device in devices for taint in device.get("taints") or ()]

    def mapped_hosts(self, claim: str) -> list[str]:
        return list((self.device_of(claim).get("data") or {}).get(names.DATA_MAPPED_HOSTS) or ())


@contextlib.asynccontextmanager
async def _running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool], what: str) -> None:
    """Until it holds."""
    for _ in range(round(TIMEOUT_S / _STEP_S)):
        if condition():
            return
        await asyncio.sleep(_STEP_S)
    raise AssertionError(f"not within {TIMEOUT_S:g} s: {what}")
