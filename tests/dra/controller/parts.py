"""The controller's parts on a fabric manager and a control plane in memory, one by one."""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, ParamSpec

from hymcache.bench.fake_cluster.feature_gates import FeatureGates
from hymcache.bench.fake_cluster.object_store import ObjectStore
from hymcache.dra.claim import RegionKey
from hymcache.dra.cluster import ClusterUnavailable
from hymcache.dra.controller.blades import BladeBook
from hymcache.dra.controller.composer import Composer
from hymcache.dra.controller.housekeeping import Housekeeping
from hymcache.dra.controller.ledger import Ledger
from hymcache.dra.controller.region_record import RegionRecord
from hymcache.dra.controller.settings import ControllerSettings
from hymcache.dra.controller.steps import no_hook
from hymcache.dra.fabric import AllocationId, HostId, MemoryId, Region
from tests.dra.controller.memory_fabric import BLADE, BLOCK_MIB, MemoryFabric
from tests.dra.controller.store_client import StoreClient

HOSTS = (HostId("node-1"), HostId("node-2"))
CLUSTER = "here"


_Arguments = ParamSpec("_Arguments")


def asynchronous(
    test: Callable[_Arguments, Coroutine[Any, Any, None]],
) -> Callable[_Arguments, None]:
    """A test that awaits."""

    @functools.wraps(test)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class Parts:
    """`now` is the time of day; it stands still.

    The next requests to the API server raise what is in `trouble`; the answers of the next
    `lose_answers` that change something are lost.
    """

    def __init__(self, *, knows_owners: bool, **settings: Any) -> None:
        self.now = time.time()
        self.trouble: list[Exception] = []
        self.lose_answers = 0
        self.fabric = MemoryFabric(
            knows_owners, 16 * BLOCK_MIB, HOSTS, source=random.Random(1), trouble_rate=0.0
        )
        self.store = ObjectStore(FeatureGates())
        self.client = StoreClient(self.store, self._raise_trouble)
        self.store.listen(self._lose_answer)
        self.settings = ControllerSettings(
            namespace="driver", identity="only", cluster=CLUSTER, **settings
        )
        self.ledger = Ledger(self.client, "driver", self.settings.driver)
        self.book = BladeBook(self.ledger, lambda: self.now)
        self.composer = Composer(
            self.fabric,
            self.ledger,
            self.book,
            self.settings,
            hook=no_hook,
            leading=lambda: True,
            wall_clock=lambda: self.now,
        )
        self.orphans: list[RegionRecord] = []
        self.housekeeping = Housekeeping(
            fabric=self.fabric,
            ledger=self.ledger,
            book=self.book,
            composer=self.composer,
            settings=self.settings,
            lost=lambda _key: None,
            orphaned=self.orphans.append,
            changed=lambda: None,
            clock=lambda: self.now,
        )

    def _raise_trouble(self) -> None:
        if self.trouble:
            raise self.trouble.pop(0)

    def _lose_answer(self, _change: object) -> None:
        if self.lose_answers:
            self.lose_answers -= 1
            self.trouble.append(ClusterUnavailable("the answer was lost"))

    def record(self, uid: str = "uid-1", size_mib: int = BLOCK_MIB) -> RegionRecord:
        """What is going to be composed."""
        return RegionRecord(
            key=RegionKey(uid, "share-1"),
            claim_namespace="default",
            claim_name="kv",
            request="memory",
            pool="pool",
            device="blade-0",
            blade=BLADE,
            request_mib=size_mib,
            size_mib=size_mib,
            qos=1,
            hosts=HOSTS,
        )

    def put_region(self, name: str, owner: str | None = None, size_mib: int = BLOCK_MIB) -> None:
        """A region that somebody else has made, or a request that was thought lost."""
        region = Region(BLADE, MemoryId(name), AllocationId(f"late-{name}"), size_mib, owner=owner)
        self.fabric.regions[MemoryId(name)] = (
            region
            if self.fabric.knows_owners
            else replace(region, allocation_id=AllocationId(""), owner=None)
        )
