"""Random histories: users, a scheduler, lost requests and controllers that die, from one seed.

Whatever happens, no two claims have the same bytes, no pod is bound without its region, and in
the end nothing is left. A failing run prints its seed; put it into SEEDS.
"""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from hymcache.bench.fake_cluster.feature_gates import FeatureGates
from hymcache.bench.fake_cluster.object_store import Item, ObjectStore
from hymcache.bench.fake_cluster.scheduler import Scheduler, SchedulerOptions
from hymcache.dra import names
from hymcache.dra.cluster import ClusterUnavailable
from hymcache.dra.controller import Controller, ControllerSettings, LeaseTimes, Step
from hymcache.dra.fabric import HostId
from hymcache.dra.retry import Backoff
from tests.dra.controller.memory_fabric import BLOCK_MIB, MemoryFabric
from tests.dra.controller.store_client import StoreClient

SEEDS = tuple(range(8))
HOSTS = (HostId("node-1"), HostId("node-2"))
BLADE_MIB = 8 * BLOCK_MIB
NAMES = 6
LIVES_MAX = 40
ACTS = 120


class Killed(BaseException):
    """The process is gone: nothing that comes after is done."""


class History:
    """One run."""

    def __init__(self, seed: int, *, knows_owners: bool) -> None:
        self.source = random.Random(seed)
        self.store = ObjectStore(FeatureGates())
        self.fabric = MemoryFabric(
            knows_owners, BLADE_MIB, HOSTS, source=random.Random(seed + 1), trouble_rate=0.1
        )
        self.quiet = False
        self.lives = 0
        for host in HOSTS:
            labels = {"kubernetes.io/hostname": host}
            self.create("Node", {"metadata": {"name": host, "labels": labels}, "spec": {}})
        expression = f'device.driver == "{names.DRIVER_NAME}"'
        spec = {"selectors": [{"cel": {"expression": expression}}]}
        self.create("DeviceClass", {"metadata": {"name": "c"}, "spec": spec})

    def create(self, kind: str, body: Item) -> Item:
        return self.store.create(kind, {"kind": kind, "apiVersion": "v1", **body})

    def trouble(self) -> None:
        """A request to the API server, or its answer, is lost now and then."""
        if not self.quiet and self.source.random() < 0.01:
            raise ClusterUnavailable("lost")

    def hook(self, _step: Step) -> None:
        if not self.quiet and self.lives < LIVES_MAX and self.source.random() < 0.03:
            raise Killed

    # --- users -------------------------------------------------------------------------------

    def act(self) -> None:
        """One thing that a user does."""
        number = self.source.randrange(NAMES)
        name = ("default", f"kv-{number}")
        pod = ("default", f"engine-{number}")
        if self.store.find("ResourceClaim", name) is None:
            if self.store.find("Pod", pod) is None:
                self.add_claim(name[1], self.source.randint(1, 5) * BLOCK_MIB)
                self.add_pod(pod[1], name[1])
            return
        choice = self.source.random()
        if choice < 0.4 and self.store.find("Pod", pod) is not None:
            self.store.delete("Pod", pod)
        elif choice < 0.7:
            if self.store.find("Pod", pod) is not None:
                self.store.delete("Pod", pod)
            self.store.delete("ResourceClaim", name)
        elif choice < 0.9 and self.store.find("Pod", pod) is None:
            self.add_pod(pod[1], name[1])
        else:
            self.hold_or_let_go()

    def hold_or_let_go(self) -> None:
        """A process on a host keeps a device open, or stops to."""
        if self.fabric.held and self.source.random() < 0.7:
            self.fabric.held.pop()
        elif self.fabric.devices:
            _, allocation = self.source.choice(sorted(self.fabric.devices))
            self.fabric.held.add(allocation)

    def add_claim(self, name: str, size_mib: int) -> None:
        capacity = {"requests": {names.CAPACITY: str(size_mib)}}
        exactly = {"deviceClassName": "c", "capacity": capacity}
        requests = [{"name": "memory", "exactly": exactly}]
        metadata = {"name": name, "namespace": "default"}
        self.create(
            "ResourceClaim", {"metadata": metadata, "spec": {"devices": {"requests": requests}}}
        )

    def add_pod(self, name: str, claim: str) -> None:
        metadata = {"name": name, "namespace": "default"}
        entry = {"name": "memory", "resourceClaimName": claim}
        self.create("Pod", {"metadata": metadata, "spec": {"resourceClaims": [entry]}})

    # --- the driver --------------------------------------------------------------------------

    async def run_controllers(self) -> None:
        """One life after the other."""
        while True:
            self.lives += 1
            client = StoreClient(self.store, self.trouble)
            controller = Controller(client, self.fabric, settings(), hook=self.hook)
            with contextlib.suppress(Killed):
                try:
                    await controller.run()
                except BaseExceptionGroup as group:
                    if group.subgroup(Killed) is None:
                        raise
            await asyncio.sleep(0.01)

    # --- what must hold ----------------------------------------------------------------------

    def check(self) -> None:
        taken = sum(region.size_mib for region in self.fabric.regions.values())
        assert taken <= BLADE_MIB
        users: dict[str, str] = {}
        for claim in self.store.items("ResourceClaim"):
            for device in claim["status"].get("devices") or ():
                data = device.get("data")
                if not data or not _attached(device):
                    continue
                name = claim["metadata"]["name"]
                assert data["memoryId"] in self.fabric.regions, f"{name}: its region is gone"
                other = users.setdefault(data["memoryId"], name)
                assert other == name, f"{name} and {other} have the same bytes"
                for host in data[names.DATA_MAPPED_HOSTS]:
                    device_key = (host, data[names.DATA_ALLOCATION_ID])
                    assert self.fabric.devices.get(device_key) == data["memoryId"]

    def is_over(self) -> bool:
        return not (
            list(self.store.items("ResourceClaim"))
            or self.fabric.regions
            or self.fabric.devices
            or list(self.store.items("ConfigMap"))
        )


def _attached(device: Item) -> bool:
    conditions = {c["type"]: c["status"] for c in device["conditions"]}
    return conditions.get(names.CONDITION_ATTACHED) == "True"


def settings() -> ControllerSettings:
    return ControllerSettings(
        namespace="driver",
        identity="only",
        cluster="here",
        fabric_period_s=10.0,
        attach_deadline_s=5.0,
        # Requests that get no answer are over here.
        late_compose_s=0.0,
        workers=4,
        backoff=Backoff(first_s=0.005, longest_s=0.05),
        lease=LeaseTimes(duration_s=30.0, renew_deadline_s=20.0, retry_s=0.1),
    )


async def run(history: History) -> None:
    scheduler = Scheduler(history.store, SchedulerOptions(retry_s=0.02))
    tasks = [
        asyncio.create_task(scheduler.run()),
        asyncio.create_task(history.run_controllers()),
    ]
    history.store.listen(lambda _change: history.check())
    try:
        for _ in range(ACTS):
            history.act()
            await asyncio.sleep(history.source.random() * 0.02)
            _raise_failures(tasks)
        # Everybody goes home, and nothing fails any more.
        history.quiet = True
        history.fabric.trouble_rate = 0.0
        history.fabric.held.clear()
        for kind in ("Pod", "ResourceClaim"):
            for item in list(history.store.items(kind)):
                history.store.delete(kind, ("default", item["metadata"]["name"]))
        async with asyncio.timeout(20):
            while not history.is_over():
                await asyncio.sleep(0.02)
                _raise_failures(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _raise_failures(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("knows_owners", [True, False], ids=["paper", "public"])
@pytest.mark.parametrize("seed", SEEDS)
def test_no_history_sells_memory_twice_or_leaks_it(seed: int, knows_owners: bool) -> None:
    print(f"seed {seed}")  # noqa: T201 - told where the run fails
    history = History(seed, knows_owners=knows_owners)
    asyncio.run(run(history))
    assert history.fabric.composed > 0
