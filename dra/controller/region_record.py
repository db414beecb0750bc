"""A record of the ledger: one region, from the intent to compose it until it is free again.

    INTENDED ─▶ COMPOSED ─▶ PUBLISHED ─▶ FREEING ─▶ DETACHED ─▶ FREED ─▶ (no record)
        │           └──────────────────────▲ ▲
        └──────────── a region was made ─────┘

Every change of the world outside has its record written before it (INTENDED, FREEING, DETACHED)
and after it (COMPOSED, FREED), so that whoever reads the ledger after a crash knows what may
exist. From DETACHED on the region may be gone, and its name be that of a newer one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Final, Self

from hymcache.dra.claim import AllocatedDevice, Claim, RegionKey
from hymcache.dra.fabric import (
    AllocationId,
    ApplianceId,
    BladeId,
    BladeKey,
    HostId,
    MemoryId,
    RegionRef,
)
from hymcache.errors import Corrupt

FORMAT_VERSION: Final = 1


class RecordState(StrEnum):
    """See the diagram."""

    INTENDED = "intended"
    COMPOSED = "composed"
    PUBLISHED = "published"
    FREEING = "freeing"
    DETACHED = "detached"
    FREED = "freed"


# States in which a claim has the region or is about to.
LIVE: Final = frozenset({RecordState.INTENDED, RecordState.COMPOSED, RecordState.PUBLISHED})


@dataclass(frozen=True, kw_only=True)
class RegionRecord:
    """One region. Immutable: `with_...` methods give the next version.

    request_mib   what the scheduler counted for it
    size_mib      what it takes of the blade: at least that
    hosts         which hosts are to have it, and `ready_hosts` those that do
    taken         regions that were on the blade before it was composed
    since         when it came into this state, seconds since 1970
    lost          the blade lost it
    abandoned     its claim was let go although it is not free
    """

    key: RegionKey
    claim_namespace: str
    claim_name: str
    request: str
    pool: str
    device: str
    blade: BladeKey
    request_mib: int
    size_mib: int
    qos: int
    share_count: int | None = None
    hosts: tuple[HostId, ...] = ()
    state: RecordState = RecordState.INTENDED
    taken: frozenset[MemoryId] = frozenset()
    memory_id: MemoryId | None = None
    allocation_id: AllocationId | None = None
    ready_hosts: tuple[HostId, ...] = ()
    since: float = 0.0
    lost: bool = False
    abandoned: bool = False
    resource_version: str = ""

    @classmethod
    def intended(
        cls,
        claim: Claim,
        device: AllocatedDevice,
        blade: BladeKey,
        *,
        size_mib: int,
        qos: int,
        share_count: int | None,
        hosts: tuple[HostId, ...],
    ) -> Self:
        """The first record of a region for what a claim was allocated."""
        return cls(
            key=device.key,
            claim_namespace=claim.namespace,
            claim_name=claim.name,
            request=device.request,
            pool=device.pool,
            device=device.device,
            blade=blade,
            request_mib=device.counted_mib or 0,
            size_mib=size_mib,
            qos=qos,
            share_count=share_count,
            hosts=hosts,
        )

    @property
    def live(self) -> bool:
        """Whether a claim has it or is about to."""
        return self.state in LIVE

    @property
    def ref(self) -> RegionRef | None:
        """Its teardown data; None while none is known to exist."""
        if self.memory_id is None or self.allocation_id is None:
            return None
        return RegionRef(self.blade, self.memory_id, self.allocation_id)

    def moved(self, state: RecordState, now: float, **changes: Any) -> Self:
        """The record in another state."""
        return replace(self, state=state, since=now, **changes)

    def to_json(self) -> str:
        """As the ledger keeps it."""
        fields = asdict(self)
        fields.pop("resource_version")
        fields["key"] = list(self.key)
        fields["blade"] = [self.blade.appliance_id, self.blade.blade_id]
        fields["taken"] = sorted(self.taken)
        return json.dumps({"version": FORMAT_VERSION, **fields}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, resource_version: str) -> Self:
        """Reads what `to_json` wrote. Raises Corrupt."""
        try:
            fields = json.loads(text)
            version = fields.pop("version")
            if version != FORMAT_VERSION:
                raise Corrupt(f"ledger: a record of format {version}; this is {FORMAT_VERSION}")
            return cls(
                **{
                    **fields,
                    "key": RegionKey(*fields["key"]),
                    "blade": _blade(fields["blade"]),
                    "taken": frozenset(fields["taken"]),
                    "hosts": tuple(fields["hosts"]),
                    "ready_hosts": tuple(fields["ready_hosts"]),
                    "state": RecordState(fields["state"]),
                    "resource_version": resource_version,
                }
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Corrupt(f"ledger: not a record: {error}") from error


def _blade(parts: list[str]) -> BladeKey:
    appliance_id, blade_id = parts
    return BladeKey(ApplianceId(appliance_id), BladeId(blade_id))
