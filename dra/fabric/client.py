"""What the driver asks of a fabric manager, whichever dialect that speaks.

The order of calls for one region, each idempotent:

    compose ──▶ attach, once a host ──▶ (pods run) ──▶ free
                   │       ▲                            ▲
                   └ fails ┘ again, or detach           └ detach of each host is part of it

In the paper's dialect the fabric manager attaches the hosts within compose, so that the region
comes back with attachments; those that failed there (HTTP 206) are `materialised=False`, and
`attach` tries them again. In the public dialect a region comes back without attachments.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from hymcache.dra.fabric.topology import (
    Blade,
    BladeKey,
    HostId,
    MemoryId,
    Region,
    RegionRef,
)


@dataclass(frozen=True, slots=True)
class ComposeRequest:
    """A region that is to be.

    `owner` names it for good: the claim's UID, or "UID/shareID" where a claim has several. The
    same owner never gets a second region: with `resumed` (an earlier attempt may have reached
    the fabric manager) an existing one is looked for first. The public dialect carries no owner:
    there it is a region of this size that is attached nowhere and not among `taken`, the regions
    that were there before the first attempt and those that the ledger knows as another's.
    `hosts` are candidates; `share_count` of them get it (all of them if None).
    """

    blade: BladeKey
    size_mib: int
    qos: int
    hosts: tuple[HostId, ...]
    owner: str
    share_count: int | None = None
    resumed: bool = False
    taken: frozenset[MemoryId] = frozenset()

    def __post_init__(self) -> None:
        if self.size_mib < 1:
            raise ValueError(f"size_mib = {self.size_mib}: should be at least 1")
        if self.qos not in (1, 2, 4, 8):
            raise ValueError(f"qos = {self.qos}: should be 1, 2, 4 or 8")
        if not self.hosts:
            raise ValueError("hosts: should name at least one")

    @property
    def shares(self) -> int:
        """How many hosts get the region."""
        return len(self.hosts) if self.share_count is None else self.share_count


class FabricManager(Protocol):
    """A fabric manager. All calls have deadlines of their own.

    Each raises Unavailable (not there, too slow, or failing: try later), FabricConflict (409) or
    FabricRejected (400, 404, not our protocol).
    """

    @property
    def knows_owners(self) -> bool:
        """Whether regions carry `ComposeRequest.owner`; without, `taken` tells them apart."""

    async def list_blades(self) -> tuple[Blade, ...]:
        """All blades of all appliances, sorted by key."""

    async def get_blade(self, blade: BladeKey) -> Blade | None:
        """One blade, None where there is none of that name."""

    async def list_regions(
        self, blade: BladeKey, *, skip: Collection[MemoryId] = ()
    ) -> tuple[Region, ...]:
        """Regions composed on a blade except those in `skip`: to find orphans."""

    async def list_memory_ids(self, blade: BladeKey) -> frozenset[MemoryId]:
        """Names of the regions of a blade, in one call: `ComposeRequest.taken`."""

    async def get_region(self, ref: RegionRef) -> Region | None:
        """A region, None where the fabric manager has none of that name and allocation."""

    async def compose(self, request: ComposeRequest) -> Region:
        """Makes a region, or finds the one that an earlier attempt made."""

    async def attach(self, region: Region, host_id: HostId) -> Region:
        """Assigns the region to the host and has its agent make the device, if not yet done.

        Returns the region with the host among `ready_hosts`. FabricConflict: the host's port
        cannot take it now. Unavailable: fabric manager or host agent is away; try again.
        """

    async def detach(self, region: Region, host_id: HostId, *, fence: bool = False) -> Region:
        """Takes the device away from the host and unassigns the port, if not yet done.

        Raises FabricConflict with the holders while somebody has the device open; with `fence`
        the agent ends them first.
        """

    async def free(
        self, ref: RegionRef, hosts: Collection[HostId] = (), *, fence: bool = False
    ) -> None:
        """Detaches the region from all its hosts and gives its memory back to the blade.

        `hosts` are those that the ledger knows of. A region that is gone is no error. Raises
        FabricConflict with the holders while somebody has a device open, as `detach` does.
        """

    async def resync(self, blade: BladeKey) -> None:
        """Has the fabric manager read the blade's state anew, as after a power cycle."""

    async def aclose(self) -> None:
        """Closes connections."""
