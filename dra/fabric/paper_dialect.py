"""The dialect of arXiv 2609.10790: one call composes a region and attaches it to hosts.

The fabric manager has the hosts' agents make and remove the devices: at compose and `assign`, at
`unassign` and DELETE. Regions carry the UID of their claim, so that an attempt whose answer was
lost is found again.
"""

from __future__ import annotations

from collections.abc import Collection

import httpx

from hymcache.dra.fabric.client import ComposeRequest
from hymcache.dra.fabric.errors import FabricRejected
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


class PaperFabricManager:
    """A `FabricManager` that composes and attaches in one call."""

    def __init__(self, transport: FabricTransport, devices: HostDevices | None = None) -> None:
        """`devices` are for hosts that still have one of a region which is no more."""
        self._transport = transport
        self._devices = devices
        self._inventory = Inventory(transport)

    @property
    def knows_owners(self) -> bool:
        """See FabricManager."""
        return True

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
        """See FabricManager. Regions that others made have no allocation and are left out."""
        bodies = await self._inventory.list_memory(blade, skip)
        return tuple(_region(blade, body) for body in bodies if body.allocation_id)

    async def get_region(self, ref: RegionRef) -> Region | None:
        """See FabricManager."""
        body = await self._inventory.find_memory(ref.blade, ref.memory_id)
        # The name may be another region's by now.
        if body is None or body.allocation_id != ref.allocation_id:
            return None
        return _region(ref.blade, body)

    async def compose(self, request: ComposeRequest) -> Region:
        """See FabricManager.

        A request that got no answer may still be under way, so it is not sent again within this
        call: Unavailable, and the next call (`resumed`) looks for the region first.
        """
        if request.resumed:
            found = await self._find(request)
            if found is not None:
                return found
        body = ComposeBody(
            memory_size_mib=request.size_mib,
            qos=Qos(request.qos),
            share_count=request.shares,
            candidate_hosts=list(request.hosts),
            claim_uid=request.owner,
        )
        answer = await self._transport.send(
            "POST",
            blade_path(request.blade, "memory"),
            MemoryRegionBody,
            body,
            timeout_s=self._transport.timeouts.compose_s,
        )
        return self._checked(request.blade, answer)

    async def attach(self, region: Region, host_id: HostId) -> Region:
        """See FabricManager."""
        attachment = region.attachment(host_id)
        port_id = (
            attachment.port_id
            if attachment
            else await self._inventory.port_of(region.blade, host_id)
        )
        answer = await self._change(region.ref, port_id, PortOperation.ASSIGN)
        changed = self._checked(region.blade, answer)
        if changed.allocation_id != region.allocation_id:
            raise _gone(region.ref)
        attachment = changed.attachment(host_id)
        if attachment is None or not attachment.materialised:
            details = attachment.details if attachment else "not assigned"
            raise Unavailable(
                f"region {region.memory_id} of blade {region.blade} has no device on "
                f"{host_id} yet: {details or 'its agent did not make it'}"
            )
        return changed

    async def detach(self, region: Region, host_id: HostId, *, fence: bool = False) -> Region:
        """See FabricManager."""
        known = await self.get_region(region.ref)
        attachment = known.attachment(host_id) if known else None
        if known is None or attachment is None:
            return region.without_host(host_id)
        await self._change(region.ref, attachment.port_id, PortOperation.UNASSIGN, fence=fence)
        return known.without_host(host_id)

    async def free(
        self, ref: RegionRef, hosts: Collection[HostId] = (), *, fence: bool = False
    ) -> None:
        """See FabricManager. The fabric manager knows the hosts of a region that it has."""
        if await self.get_region(ref) is None:
            # Freed by an attempt before, or lost with the blade's power: devices may be left.
            if self._devices is not None:
                lost = Region(ref.blade, ref.memory_id, ref.allocation_id, 0)
                for host_id in sorted(hosts):
                    await self._devices.remove(lost, host_id, fence=fence)
            return

        async def attempt() -> None:
            await self._transport.send(
                "DELETE",
                blade_path(ref.blade, "memory", ref.memory_id),
                Body,
                parameters=_fenced(fence),
                timeout_s=self._transport.timeouts.compose_s,
            )

        try:
            await self._transport.again(attempt)
        except FabricRejected as error:
            if error.status != httpx.codes.NOT_FOUND:
                raise

    async def resync(self, blade: BladeKey) -> None:
        """See FabricManager."""
        await self._inventory.resync(blade)

    async def aclose(self) -> None:
        """See FabricManager."""
        if self._devices is not None:
            await self._devices.aclose()
        await self._transport.aclose()

    async def _find(self, request: ComposeRequest) -> Region | None:
        """The owner's region. An attempt that was slow may have made one beside it: that goes."""
        regions = [
            region
            for region in await self.list_regions(request.blade, skip=request.taken)
            if region.owner == request.owner
        ]
        for surplus in regions[1:]:
            await self.free(surplus.ref)
        return regions[0] if regions else None

    async def _change(
        self, ref: RegionRef, port_id: PortId, operation: PortOperation, *, fence: bool = False
    ) -> MemoryRegionBody:
        async def attempt() -> MemoryRegionBody:
            return await self._transport.send(
                "PATCH",
                blade_path(ref.blade, "memory", ref.memory_id),
                MemoryRegionBody,
                AssignBody(port=port_id, operation=operation),
                parameters=_fenced(fence),
                timeout_s=self._transport.timeouts.compose_s,
            )

        try:
            return await self._transport.again(attempt)
        except FabricRejected as error:
            if error.status == httpx.codes.NOT_FOUND:
                raise _gone(ref) from error
            raise

    def _checked(self, blade: BladeKey, body: MemoryRegionBody) -> Region:
        if not body.allocation_id:
            raise FabricRejected(
                f"fabric manager {self._transport.url}: a region without allocationId: "
                "it speaks the public dialect; set the dialect to public"
            )
        return _region(blade, body)


def _gone(ref: RegionRef) -> FabricRejected:
    return FabricRejected(
        f"region {ref.memory_id} (allocation {ref.allocation_id}) is gone from blade {ref.blade}",
        httpx.codes.NOT_FOUND,
    )


def _fenced(fence: bool) -> dict[str, str] | None:
    return {"fence": "true"} if fence else None


def _region(blade: BladeKey, body: MemoryRegionBody) -> Region:
    attachments = (
        Attachment(
            host_id=HostId(mapped.host_id),
            port_id=PortId(mapped.port_id),
            materialised=mapped.materialized,
            physical_start=mapped.physical_start,
            details=mapped.details,
        )
        for mapped in body.mapped_hosts or ()
    )
    return Region(
        blade=blade,
        memory_id=MemoryId(body.id),
        allocation_id=AllocationId(body.allocation_id or ""),
        size_mib=body.size_mib,
        attachments=tuple(sorted(attachments, key=lambda mapped: mapped.host_id)),
        owner=body.claim_uid,
        offset_mib=body.address_range_offset_mib,
    )
