"""The dialect of the public cfm-service: compose, assign each port, ask each host's agent.

The service neither carries a claim's UID nor speaks to hosts, so that allocations are named here
(from the owner, always the same name) and devices are asked for at the agents. The bytes are the
same on all hosts because all map the region's offset, each counted from where CXL memory begins
on that host.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from collections.abc import Collection
from typing import Final

import httpx

from hymcache.dra.fabric.client import ComposeRequest
from hymcache.dra.fabric.errors import FabricConflict, FabricRejected
from hymcache.dra.fabric.host_devices import HostDevices
from hymcache.dra.fabric.inventory import Inventory, blade_path
from hymcache.dra.fabric.models import (
    AssignBody,
    Body,
    ComposeBody,
    MemoryRegionBody,
    PortOperation,
    Qos,
)
from hymcache.dra.fabric.topology import (
    AllocationId,
    Attachment,
    Blade,
    BladeKey,
    HostId,
    MemoryId,
    PortId,
    Region,
    RegionRef,
)
from hymcache.dra.fabric.transport import FabricTransport
from hymcache.errors import Unavailable
from hymcache.limits import MIB

# Names allocations from their owners (RFC 9562, version 5). Changing it would orphan devices.
_ALLOCATIONS: Final = uuid.UUID("6d5d3a2e-3f0e-5c0b-9b0e-6f1f0c7a9a10")

# A pod that ends lets go of its device within seconds; whoever asks again does so much later.
_HOLDERS_WAIT_S: Final = 5.0


def allocation_id_of(owner: str) -> AllocationId:
    """What an owner's allocation is called, now and after any restart."""
    return AllocationId(str(uuid.uuid5(_ALLOCATIONS, owner)))


class PublicFabricManager:
    """A `FabricManager` in steps, with the hosts' agents."""

    def __init__(self, transport: FabricTransport, devices: HostDevices) -> None:
        self._transport = transport
        self._inventory = Inventory(transport)
        self._devices = devices
        # Composed here for whom: two who look for theirs must not find the same.
        self._owners: dict[tuple[BladeKey, MemoryId], str] = {}
        self._composing: defaultdict[BladeKey, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def knows_owners(self) -> bool:
        """See FabricManager."""
        return False

    async def list_blades(self) -> tuple[Blade, ...]:
        """See FabricManager."""
        return await self._inventory.list_blades()

    async def get_blade(self, blade: BladeKey) -> Blade | None:
        """See FabricManager."""
        return await self._inventory.get_blade(blade)

    async def list_memory_ids(self, blade: BladeKey) -> frozenset[MemoryId]:
        """See FabricManager."""
        return await self._inventory.list_memory_ids(blade)

    async def list_regions(
        self, blade: BladeKey, *, skip: Collection[MemoryId] = ()
    ) -> tuple[Region, ...]:
        """See FabricManager.

        All regions of the blade, those that others made included: without owner, and with an
        empty allocation ID where this process did not make them.
        """
        bodies = await self._inventory.list_memory(blade, skip)
        return tuple(self._region(blade, body) for body in bodies)

    async def get_region(self, ref: RegionRef) -> Region | None:
        """See FabricManager. By name alone: the service knows no allocations."""
        body = await self._inventory.find_memory(ref.blade, ref.memory_id)
        return None if body is None else self._region(ref.blade, body, ref.allocation_id)

    async def compose(self, request: ComposeRequest) -> Region:
        """See FabricManager. One at a time on each blade."""
        allocation_id = allocation_id_of(request.owner)
        async with self._composing[request.blade]:
            body = await self._find(request) if request.resumed else None
            if body is None:
                body = await self._transport.send(
                    "POST",
                    blade_path(request.blade, "memory"),
                    MemoryRegionBody,
                    ComposeBody(memory_size_mib=request.size_mib, qos=Qos(request.qos)),
                    timeout_s=self._transport.timeouts.compose_s,
                )
            region = self._region(request.blade, body, allocation_id)
            if region.offset_mib is None:
                await self._require_alone(region)
            self._owners[region.blade, region.memory_id] = request.owner
        return region

    async def attach(self, region: Region, host_id: HostId) -> Region:
        """See FabricManager."""
        port_id = await self._inventory.port_of(region.blade, host_id)
        body = await self._assign(region, port_id, host_id)
        offset_mib = body.address_range_offset_mib or 0  # see _require_alone
        start = await self._window_start(region.blade, host_id) + offset_mib * MIB
        await self._devices.make(region, host_id, start)
        return region.with_attachment(Attachment(host_id, port_id, True, start))

    async def detach(self, region: Region, host_id: HostId, *, fence: bool = False) -> Region:
        """See FabricManager. The device goes first: nobody may be left with a dead mapping."""
        await self._devices.remove(region, host_id, fence=fence, wait_s=_HOLDERS_WAIT_S)
        attachment = region.attachment(host_id)
        try:
            port_id = (
                attachment.port_id
                if attachment
                else await self._inventory.port_of(region.blade, host_id, link_needed=False)
            )
        except FabricConflict:
            # The cable is gone, and the assignment with it as far as that host goes.
            return region.without_host(host_id)
        try:
            await self._change(region, port_id, PortOperation.UNASSIGN)
        except FabricConflict:
            # It was not assigned. If it still is, freeing the region will say so.
            pass
        except FabricRejected as error:
            if error.status != httpx.codes.NOT_FOUND:
                raise
        return region.without_host(host_id)

    async def free(
        self, ref: RegionRef, hosts: Collection[HostId] = (), *, fence: bool = False
    ) -> None:
        """See FabricManager."""
        region = await self.get_region(ref)
        known = region or Region(ref.blade, ref.memory_id, ref.allocation_id, 0)
        reported = (attachment.host_id for attachment in known.attachments)
        for host_id in sorted({*hosts, *reported}):
            if region is None:
                # Freed by an attempt before, or lost with the blade's power: devices may be left.
                await self._devices.remove(known, host_id, fence=fence)
            else:
                region = await self.detach(region, host_id, fence=fence)
        if region is not None:
            await self._delete(ref)
        self._owners.pop((ref.blade, ref.memory_id), None)

    async def resync(self, blade: BladeKey) -> None:
        """See FabricManager."""
        await self._inventory.resync(blade)

    async def aclose(self) -> None:
        """See FabricManager."""
        await self._devices.aclose()
        await self._transport.aclose()

    async def _find(self, request: ComposeRequest) -> MemoryRegionBody | None:
        """What an earlier attempt for the owner made; see ComposeRequest."""
        others = {
            memory_id
            for (blade, memory_id), owner in self._owners.items()
            if blade == request.blade and owner != request.owner
        }
        block_mib, _ = await self._inventory.geometry(request.blade)
        sizes_mib = range(request.size_mib, request.size_mib + max(1, request.qos * block_mib))
        for body in await self._inventory.list_memory(request.blade, request.taken | others):
            if body.size_mib in sizes_mib and not body.mapped_host_id:
                return body
        return None

    async def _assign(self, region: Region, port_id: PortId, host_id: HostId) -> MemoryRegionBody:
        try:
            return await self._change(region, port_id, PortOperation.ASSIGN)
        except (FabricConflict, Unavailable) as refusal:
            body = await self._inventory.find_memory(region.blade, region.memory_id)
            if body is not None and body.memory_appliance_port == port_id:
                # By an attempt before.
                return body
            if body is None or isinstance(refusal, Unavailable):
                raise
            if await self._devices.is_made(region, host_id):
                return body
            # The service shows one port of a region, so this may be another of its ports all the
            # same: where no device is there yet, it is taken off and put on again.
            try:
                await self._change(region, port_id, PortOperation.UNASSIGN)
            except (FabricConflict, FabricRejected):
                raise refusal from None
            return await self._change(region, port_id, PortOperation.ASSIGN)

    async def _require_alone(self, region: Region) -> None:
        """A region whose offset is not told begins where its blade does, if it was alone there."""
        others = await self._inventory.list_memory_ids(region.blade) - {region.memory_id}
        if others:
            await self._delete(region.ref)
            raise FabricRejected(
                f"fabric manager {self._transport.url} does not tell where regions begin "
                f"(addressRangeOffsetMiB), so blade {region.blade} can have one at a time: "
                f"free {', '.join(sorted(others))}, or update the service"
            )

    async def _window_start(self, key: BladeKey, host_id: HostId) -> int:
        """Where the host has the blade's memory: its only CXL memory, or the one of that size."""
        windows = await self._devices.windows(host_id)
        if len(windows) > 1:
            blade = await self._inventory.get_blade(key)
            size_bytes = blade.total_mib * MIB if blade else 0
            windows = tuple(window for window in windows if window.size_bytes == size_bytes)
        if len(windows) != 1:
            raise FabricRejected(
                f"host {host_id} has {len(windows)} ranges of CXL memory of the size of blade "
                f"{key}: which one it is cannot be told; use the paper's dialect for such hosts"
            )
        if windows[0].physical_start is None:
            raise FabricRejected(f"host {host_id} does not tell where its CXL memory begins")
        return windows[0].physical_start

    async def _change(
        self, region: Region, port_id: PortId, operation: PortOperation
    ) -> MemoryRegionBody:
        return await self._transport.again(
            lambda: self._transport.send(
                "PATCH",
                blade_path(region.blade, "memory", region.memory_id),
                MemoryRegionBody,
                AssignBody(port=port_id, operation=operation),
            )
        )

    async def _delete(self, ref: RegionRef) -> None:
        try:
            await self._transport.again(
                lambda: self._transport.send(
                    "DELETE",
                    blade_path(ref.blade, "memory", ref.memory_id),
                    Body,
                    timeout_s=self._transport.timeouts.compose_s,
                )
            )
        except FabricRejected as error:
            if error.status != httpx.codes.NOT_FOUND:
                raise

    def _region(
        self, blade: BladeKey, body: MemoryRegionBody, allocation_id: AllocationId | None = None
    ) -> Region:
        memory_id = MemoryId(body.id)
        if allocation_id is None:
            owner = self._owners.get((blade, memory_id))
            allocation_id = allocation_id_of(owner) if owner else AllocationId("")
        attachments: tuple[Attachment, ...] = ()
        if body.mapped_host_id and body.memory_appliance_port:
            attachments = (
                # Whether the device is there, the agent knows.
                Attachment(HostId(body.mapped_host_id), PortId(body.memory_appliance_port), False),
            )
        return Region(
            blade=blade,
            memory_id=memory_id,
            allocation_id=allocation_id,
            size_mib=body.size_mib,
            attachments=attachments,
            offset_mib=body.address_range_offset_mib,
        )
