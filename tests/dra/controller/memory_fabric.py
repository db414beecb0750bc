"""A fabric manager in memory, for thousands of runs: both dialects' ways, answers that are lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from itertools import count

from hymcache.dra.fabric import (
    AllocationId,
    ApplianceId,
    Attachment,
    Blade,
    BladeId,
    BladeKey,
    BladePort,
    ComposeRequest,
    FabricConflict,
    HostId,
    MemoryId,
    PortId,
    Region,
    RegionRef,
)
from hymcache.errors import Unavailable

BLADE = BladeKey(ApplianceId("appliance-0"), BladeId("blade-0"))
BLOCK_MIB = 64


@dataclass
class MemoryFabric:
    """One blade. Names of regions are used again, the lowest first, as real ones do.

    With `knows_owners` it is like the paper's, else like the public service. `trouble_rate` is
    the share of requests that fail, half of them after they were carried out.
    """

    knows_owners: bool
    total_mib: int
    hosts: tuple[HostId, ...]
    source: random.Random = field(default_factory=random.Random)
    trouble_rate: float = 0.0
    # What every request to compose meets, if anything.
    fails: Exception | None = None
    regions: dict[MemoryId, Region] = field(default_factory=dict)
    # Devices on hosts: which allocation has which region's bytes.
    devices: dict[tuple[HostId, AllocationId], MemoryId] = field(default_factory=dict)
    held: set[AllocationId] = field(default_factory=set)
    composed: int = 0
    detached: int = 0

    async def list_blades(self) -> tuple[Blade, ...]:
        await self._answer()
        return (self._blade(),)

    async def get_blade(self, blade: BladeKey) -> Blade | None:
        await self._answer()
        return self._blade() if blade == BLADE else None

    async def list_memory_ids(self, blade: BladeKey) -> frozenset[MemoryId]:
        await self._answer()
        return frozenset(self.regions)

    async def list_regions(
        self, blade: BladeKey, *, skip: Collection[MemoryId] = ()
    ) -> tuple[Region, ...]:
        await self._answer()
        found = (r for name, r in sorted(self.regions.items()) if name not in skip)
        return tuple(self._told(region) for region in found)

    async def get_region(self, ref: RegionRef) -> Region | None:
        await self._answer()
        region = self.regions.get(ref.memory_id)
        if region is None or (self.knows_owners and region.allocation_id != ref.allocation_id):
            return None
        return self._told(region)

    async def compose(self, request: ComposeRequest) -> Region:
        if request.resumed:
            for region in await self.list_regions(request.blade, skip=request.taken):
                if (
                    region.owner == request.owner
                    if self.knows_owners
                    else (region.size_mib == request.size_mib and not region.attachments)
                ):
                    return self._named(region, request)
        lost = await self._answer()
        if self.fails is not None:
            raise self.fails
        taken = sum(region.size_mib for region in self.regions.values())
        if taken + request.size_mib > self.total_mib:
            raise FabricConflict("no room")
        name = next(n for n in map(MemoryId, map(str, count())) if n not in self.regions)
        self.composed += 1
        region = Region(
            request.blade,
            name,
            AllocationId(f"allocation-{self.composed}") if self.knows_owners else AllocationId(""),
            request.size_mib,
            owner=request.owner if self.knows_owners else None,
        )
        region = self._named(region, request)
        self.regions[name] = region
        if self.knows_owners:
            for host in request.hosts[: request.shares]:
                region = self._attach(region, host)
        self._lose(lost)
        return region

    async def attach(self, region: Region, host_id: HostId) -> Region:
        lost = await self._answer()
        known = self.regions.get(region.memory_id)
        if known is None:
            raise FabricConflict(f"no region {region.memory_id}")
        attached = self._attach(replace(known, allocation_id=region.allocation_id), host_id)
        self._lose(lost)
        return attached

    async def detach(self, region: Region, host_id: HostId, *, fence: bool = False) -> Region:
        lost = await self._answer()
        self.detached += 1
        if fence:
            self.held.discard(region.allocation_id)
        self._remove_device(host_id, region.allocation_id)
        known = self.regions.get(region.memory_id)
        if known is not None and not (
            self.knows_owners and known.allocation_id != region.allocation_id
        ):
            self.regions[region.memory_id] = known.without_host(host_id)
        self._lose(lost)
        return region.without_host(host_id)

    async def free(
        self, ref: RegionRef, hosts: Collection[HostId] = (), *, fence: bool = False
    ) -> None:
        lost = await self._answer()
        region = self.regions.get(ref.memory_id)
        if region is None or (self.knows_owners and region.allocation_id != ref.allocation_id):
            return
        for host in region.ready_hosts:
            self._remove_device(host, ref.allocation_id)
        stale = [key for key, name in self.devices.items() if name == ref.memory_id]
        assert not stale, f"{ref} freed with devices on {stale}"
        del self.regions[ref.memory_id]
        self._lose(lost)

    async def resync(self, blade: BladeKey) -> None:
        await self._answer()

    async def aclose(self) -> None:
        await asyncio.sleep(0)

    def _blade(self) -> Blade:
        return Blade(
            key=BLADE,
            online=True,
            total_mib=self.total_mib,
            allocated_mib=sum(region.size_mib for region in self.regions.values()),
            block_mib=BLOCK_MIB,
            channels=1,
            ports=tuple(
                BladePort(PortId(f"port-{n}"), host, True) for n, host in enumerate(self.hosts)
            ),
        )

    def _named(self, region: Region, request: ComposeRequest) -> Region:
        if self.knows_owners:
            return region
        return replace(region, allocation_id=AllocationId(f"for-{request.owner}"))

    def _told(self, region: Region) -> Region:
        return region if self.knows_owners else replace(region, allocation_id=AllocationId(""))

    def _attach(self, region: Region, host: HostId) -> Region:
        others = {
            allocation
            for (device_host, allocation), name in self.devices.items()
            if device_host == host and name == region.memory_id
        }
        assert others <= {region.allocation_id}, f"{region.memory_id} has two owners on {host}"
        self.devices[host, region.allocation_id] = region.memory_id
        attached = region.with_attachment(Attachment(host, PortId(f"port-of-{host}"), True))
        self.regions[region.memory_id] = attached
        return attached

    def _remove_device(self, host: HostId, allocation_id: AllocationId) -> None:
        if (host, allocation_id) in self.devices and allocation_id in self.held:
            raise FabricConflict(f"{allocation_id} is in use on {host}")
        self.devices.pop((host, allocation_id), None)

    async def _answer(self) -> bool:
        """Whether the answer will be lost; raises where the request is."""
        await asyncio.sleep(0)
        fate = self.source.random()
        if fate < self.trouble_rate / 2:
            raise Unavailable("the request was lost")
        return fate < self.trouble_rate

    def _lose(self, lost: bool) -> None:
        if lost:
            raise Unavailable("the answer was lost")
