"""Devices on hosts, made and removed by the hosts' agents: what the fabric manager does not do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hymcache.address import Address
from hymcache.dra.fabric.errors import FabricConflict, FabricRejected
from hymcache.dra.fabric.models import HostBody
from hymcache.dra.fabric.topology import HostId, Region
from hymcache.dra.fabric.transport import FabricTransport, path_of
from hymcache.dra.host_agent import DaxConflict, DaxRegion, HostAgentClient
from hymcache.errors import ConfigError, ProtocolError
from hymcache.limits import MIB

_HOST_PLACE: Final = "{host}"


@dataclass(frozen=True, slots=True)
class HostAgentSettings:
    """How agents are reached, all with the same credentials.

    `url` has `{host}` where the host's name goes, e.g. `https://{host}:8443`. Without it the
    fabric manager says where each agent is, and `scheme` whether it speaks HTTPS.
    """

    user_name: str
    password: str
    url: str | None = None
    scheme: str = "https"
    ca_file: Path | None = None

    def __post_init__(self) -> None:
        if self.url is not None and _HOST_PLACE not in self.url:
            raise ConfigError(
                f"{self.url}: not the agents' URL; write {_HOST_PLACE} for the host's name, "
                f"e.g. https://{_HOST_PLACE}:8443"
            )


class HostDevices:
    """Asks each host's agent. Raises as `FabricManager` does."""

    def __init__(self, transport: FabricTransport, settings: HostAgentSettings) -> None:
        self._transport = transport
        self._settings = settings
        self._clients: dict[HostId, tuple[str, HostAgentClient]] = {}

    async def windows(self, host_id: HostId) -> tuple[DaxRegion, ...]:
        """The host's ranges of CXL memory: one for each blade that it is cabled to."""
        try:
            return await (await self._agent(host_id)).list_regions()
        except (ConfigError, ProtocolError) as error:
            raise FabricRejected(str(error)) from error

    async def make(self, region: Region, host_id: HostId, physical_start: int) -> None:
        """The region's device, made if it is not there yet."""
        try:
            agent = await self._agent(host_id)
            await agent.materialize(region.allocation_id, physical_start, region.size_mib * MIB)
        except DaxConflict as error:
            raise FabricConflict(str(error)) from error
        except (ConfigError, ProtocolError) as error:
            raise FabricRejected(str(error)) from error

    async def is_made(self, region: Region, host_id: HostId) -> bool:
        """Whether the host has a device of the region."""
        try:
            allocations = await (await self._agent(host_id)).list_allocations()
        except (ConfigError, ProtocolError) as error:
            raise FabricRejected(str(error)) from error
        return any(device.allocation_id == region.allocation_id for device in allocations)

    async def remove(
        self, region: Region, host_id: HostId, *, fence: bool, wait_s: float = 0.0
    ) -> None:
        """Takes the region's device away, if there is one.

        FabricConflict while it is held, after a wait of `wait_s` for those who do.
        """
        try:
            agent = await self._agent(host_id)
            result = await agent.unmaterialize(region.allocation_id, fence=fence, wait_s=wait_s)
        except (ConfigError, ProtocolError) as error:
            raise FabricRejected(str(error)) from error
        if not result.done:
            holders = ", ".join(str(holder) for holder in result.holders)
            raise FabricConflict(
                f"region {region.memory_id} of blade {region.blade} is in use on {host_id} "
                f"by {holders}"
            )

    async def aclose(self) -> None:
        """Closes all connections."""
        while self._clients:
            _, (_, client) = self._clients.popitem()
            await client.aclose()

    async def _agent(self, host_id: HostId) -> HostAgentClient:
        settings = self._settings
        if settings.url is not None:
            url = settings.url.replace(_HOST_PLACE, host_id)
        else:
            # Asked each time: an agent may move, and this is cheap beside what follows.
            body = await self._transport.get(path_of("hosts", host_id), HostBody)
            url = f"{settings.scheme}://{Address(body.ip_address, body.port)}"
        known = self._clients.get(host_id)
        if known is not None and known[0] == url:
            return known[1]
        client = HostAgentClient(
            url,
            user_name=settings.user_name,
            password=settings.password,
            ca_file=str(settings.ca_file) if settings.ca_file else None,
        )
        self._clients[host_id] = (url, client)
        if known is not None:
            await known[1].aclose()
        return client
