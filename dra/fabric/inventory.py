"""Reads blades, ports and regions: what both dialects have in common."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from typing import Final

from hymcache.dra.fabric.errors import FabricConflict, FabricRejected
from hymcache.dra.fabric.models import (
    BladeBody,
    MemoryRegionBody,
    PortBody,
    ResourceBlockBody,
)
from hymcache.dra.fabric.topology import (
    ApplianceId,
    Blade,
    BladeId,
    BladeKey,
    BladePort,
    HostId,
    MemoryId,
    PortId,
)
from hymcache.dra.fabric.transport import FabricTransport, path_of
from hymcache.errors import Unavailable

_log = logging.getLogger(__name__)

# What cfm-service calls a blade whose state it knows. Older releases leave the status out.
_ONLINE: Final = frozenset({None, "", "online"})
_LINK_UP: Final = frozenset({None, "", "LinkUp"})


def blade_path(blade: BladeKey, *more: str) -> str:
    """The path of a blade, or of something on it."""
    return path_of("appliances", blade.appliance_id, "blades", blade.blade_id, *more)


class Inventory:
    """What a fabric manager has. What cannot change while a blade is online is asked once."""

    def __init__(self, transport: FabricTransport) -> None:
        self._transport = transport
        # Block size and channels of a blade, from its resource blocks: hundreds of requests.
        self._geometry: dict[BladeKey, tuple[int, int]] = {}

    async def list_blades(self) -> tuple[Blade, ...]:
        """All blades of all appliances, sorted by key."""
        keys: list[BladeKey] = []
        for appliance in await self._transport.list_names(path_of("appliances")):
            names = await self._transport.list_names(path_of("appliances", appliance, "blades"))
            keys += (BladeKey(ApplianceId(appliance), BladeId(name)) for name in names)
        blades = [await self._blade_or_offline(key) for key in sorted(keys)]
        return tuple(blade for blade in blades if blade is not None)

    async def _blade_or_offline(self, key: BladeKey) -> Blade | None:
        """A blade of which nothing can be learned is offline: the others go on."""
        try:
            return await self.get_blade(key)
        except (Unavailable, FabricConflict, FabricRejected) as error:
            _log.warning("blade %s: %s", key, error)
            return Blade(
                key, online=False, total_mib=0, allocated_mib=0, block_mib=0, channels=0, ports=()
            )

    async def get_blade(self, key: BladeKey) -> Blade | None:
        """A blade with its ports, None where there is none of that name."""
        body = await self._transport.find(blade_path(key), BladeBody)
        if body is None:
            return None
        online = body.status in _ONLINE
        ports: tuple[BladePort, ...] = ()
        block_mib, channels = self._geometry.get(key, (0, 0))
        if online:
            try:
                ports = await self.list_ports(key)
                block_mib, channels = await self.geometry(key)
            except Unavailable:
                # It went away between two answers.
                online = False
        # The service's word "available" is what is not allocated.
        allocated_mib = body.total_memory_allocated_mib or 0
        return Blade(
            key=key,
            online=online,
            total_mib=allocated_mib + (body.total_memory_available_mib or 0),
            allocated_mib=allocated_mib,
            block_mib=block_mib,
            channels=channels,
            ports=ports,
        )

    async def list_ports(self, key: BladeKey) -> tuple[BladePort, ...]:
        """The ports of a blade, each with the host that is cabled to it."""
        names = await self._transport.list_names(blade_path(key, "ports"))
        bodies = await self._transport.gather(
            names, lambda name: self._transport.get(blade_path(key, "ports", name), PortBody)
        )
        return tuple(_port(body) for body in sorted(bodies, key=lambda body: body.id))

    async def port_of(self, key: BladeKey, host_id: HostId, *, link_needed: bool = True) -> PortId:
        """The blade's port that is cabled to a host. FabricConflict: there is none."""
        for port in await self.list_ports(key):
            if port.host_id == host_id and (port.link_up or not link_needed):
                return port.port_id
        kind = "working link" if link_needed else "cable"
        raise FabricConflict(f"blade {key} has no port with a {kind} to {host_id}")

    async def list_memory_ids(self, key: BladeKey) -> frozenset[MemoryId]:
        """Names of the regions on a blade."""
        names = await self._transport.list_names(blade_path(key, "memory"))
        return frozenset(MemoryId(name) for name in names)

    async def list_memory(
        self, key: BladeKey, skip: Collection[MemoryId] = ()
    ) -> tuple[MemoryRegionBody, ...]:
        """The regions on a blade except some; those that go meanwhile are left out."""
        names = sorted((await self.list_memory_ids(key)).difference(skip))
        bodies = await self._transport.gather(names, lambda name: self.find_memory(key, name))
        return tuple(body for body in bodies if body is not None)

    async def find_memory(self, key: BladeKey, memory_id: MemoryId) -> MemoryRegionBody | None:
        """One region, None where there is none of that name."""
        return await self._transport.find(blade_path(key, "memory", memory_id), MemoryRegionBody)

    async def resync(self, key: BladeKey) -> None:
        """Has the service read a blade anew."""
        await self._transport.again(
            lambda: self._transport.send("PATCH", blade_path(key), BladeBody)
        )
        self._geometry.pop(key, None)

    async def geometry(self, key: BladeKey) -> tuple[int, int]:
        """MiB of a resource block, and how many channels a blade has."""
        known = self._geometry.get(key)
        if known is not None:
            return known
        names = await self._transport.list_names(blade_path(key, "resources"))
        blocks = await self._transport.gather(
            names,
            lambda name: self._transport.get(blade_path(key, "resources", name), ResourceBlockBody),
        )
        sizes = {block.capacity_mib for block in blocks if block.capacity_mib}
        # Of blocks of several sizes, what fits whichever of them the blade takes.
        block_mib = math.lcm(*sizes) if sizes else 0
        geometry = (block_mib, len({block.channel_id for block in blocks}))
        self._geometry[key] = geometry
        return geometry


def _port(body: PortBody) -> BladePort:
    host_id = None
    if body.linked_port_uri:
        # /cfm/v1/hosts/{hostId}/ports/{portId}
        parts = body.linked_port_uri.strip("/").split("/")
        if "hosts" in parts[:-1]:
            host_id = HostId(parts[parts.index("hosts") + 1])
    return BladePort(
        port_id=PortId(body.id),
        host_id=host_id,
        link_up=body.link_status in _LINK_UP and body.link_state != "Disabled",
    )
