"""How the simulated fabric manager reaches the agents of its hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from hymcache.address import Address
from hymcache.dra.host_agent import HostAgentClient
from hymcache.dra.host_agent.service import HostAgentService
from hymcache.dra.simulator.hardware import Assignment, SimulatedHost, SimulatedRegion
from hymcache.dra.simulator.refusal import Refusal, conflict, failure
from hymcache.errors import HymcacheError, Unavailable
from hymcache.limits import GIB, MIB

# A host that is registered with this back end has no agent: its devices are only said to be.
NO_AGENT: Final = "simulated"
# Where such a host would map a blade's memory.
_WINDOW_START: Final = 4 * GIB


class HostAgents:
    """Makes and removes devices on hosts. An agent can be cut off, to see what happens then."""

    def __init__(
        self, ca_file: str | None = None, local: Mapping[str, HostAgentService] | None = None
    ) -> None:
        """`ca_file` is PEM, for agents that speak HTTPS; `local` are those of this process."""
        self._ca_file = ca_file
        self._local = local or {}
        self._clients: dict[str, HostAgentClient] = {}
        self._window_starts: dict[str, int] = {}
        self.cut_off: set[str] = set()

    async def materialise(
        self, host: SimulatedHost, region: SimulatedRegion, assignment: Assignment
    ) -> None:
        """Has the device made. A failure is left in the assignment's details, not raised."""
        try:
            start = await self._window_start(host) + region.offset_mib * MIB
            if host.credentials.backend != NO_AGENT:
                await self._client(host).materialize(
                    region.allocation_id, start, region.size_mib * MIB
                )
        except HymcacheError as error:
            # The host may come back with its memory elsewhere.
            self._window_starts.pop(host.id, None)
            assignment.materialised = False
            assignment.details = str(error)
            return
        assignment.materialised, assignment.physical_start = True, start
        assignment.details = ""

    async def unmaterialise(
        self, host: SimulatedHost, allocation_id: str, *, fence: bool = False
    ) -> None:
        """Has the device removed. Refuses: 409 while it is held, 500 without its agent."""
        try:
            self._require_reachable(host)
            if host.credentials.backend == NO_AGENT:
                return
            result = await self._client(host).unmaterialize(allocation_id, fence=fence)
        except HymcacheError as error:
            raise failure(f"host [{host.id}]: {error}") from error
        if not result.done:
            holders = ", ".join(str(holder) for holder in result.holders)
            raise conflict(f"host [{host.id}]: the device is in use by {holders}")

    async def try_unmaterialise(self, host: SimulatedHost, allocation_id: str) -> None:
        """Has a device removed whose memory is lost; where that fails it is the host's to do."""
        with suppress(Refusal):
            await self.unmaterialise(host, allocation_id)

    async def set_up(self, host_id: str, up: bool) -> None:
        """Cuts an agent off, or no longer. Those of this process are away for everybody then."""
        agent = self._local.get(host_id)
        if not up:
            self.cut_off.add(host_id)
        if agent is not None:
            await asyncio.to_thread(agent.start if up else agent.stop)
        if up:
            self.cut_off.discard(host_id)

    async def forget(self, host_id: str) -> None:
        """The host is gone, or has another address now."""
        self._window_starts.pop(host_id, None)
        client = self._clients.pop(host_id, None)
        if client is not None:
            await client.aclose()

    async def aclose(self) -> None:
        """Closes all connections."""
        for host_id in list(self._clients):
            await self.forget(host_id)

    async def _window_start(self, host: SimulatedHost) -> int:
        self._require_reachable(host)
        if host.credentials.backend == NO_AGENT:
            return _WINDOW_START
        start = self._window_starts.get(host.id)
        if start is None:
            start = (await self._client(host).window()).physical_start
            self._window_starts[host.id] = start
        return start

    def _require_reachable(self, host: SimulatedHost) -> None:
        if host.id in self.cut_off:
            raise Unavailable(f"host {host.id}: its agent is cut off")

    def _client(self, host: SimulatedHost) -> HostAgentClient:
        client = self._clients.get(host.id)
        if client is None:
            credentials = host.credentials
            address = Address(credentials.ip_address, credentials.port)
            client = self._clients[host.id] = HostAgentClient(
                f"{credentials.protocol}://{address}",
                user_name=credentials.username,
                password=credentials.password,
                ca_file=self._ca_file,
            )
        return client
