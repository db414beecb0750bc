"""What a host agent says of itself in /metrics; docs/metrics.md is made from it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from hymcache.dra.host_agent.allocations import AllocationCounts, HostAllocations
from hymcache.dra.host_agent.backend import MemoryRegion
from hymcache.dra.host_agent.resources import AllocationPhase, DaxDevice
from hymcache.metric_table import TableRow


@dataclass(frozen=True, slots=True)
class HostSnapshot:
    """A host at one moment."""

    devices: tuple[DaxDevice, ...]
    regions: tuple[MemoryRegion, ...]
    counts: AllocationCounts

    @classmethod
    def of(cls, allocations: HostAllocations) -> HostSnapshot:
        """That of now."""
        return cls(allocations.list_all(), allocations.regions(), allocations.counts)


_Row = TableRow[HostSnapshot]
_PREFIX: Final = "hymcache_dra_host_"

METRICS: Final[tuple[_Row, ...]] = (
    _Row(
        "counter",
        f"{_PREFIX}materialized",
        "Devices made, again after a restart not included.",
        lambda snapshot: snapshot.counts.materialized,
    ),
    _Row(
        "counter",
        f"{_PREFIX}unmaterialized",
        "Devices taken away.",
        lambda snapshot: snapshot.counts.unmaterialized,
    ),
    _Row(
        "counter",
        f"{_PREFIX}recovered",
        "Devices found or made again when the agent started.",
        lambda snapshot: snapshot.counts.recovered,
    ),
    _Row(
        "counter",
        f"{_PREFIX}failures",
        "Devices that could not be made.",
        lambda snapshot: snapshot.counts.failed,
    ),
    _Row(
        "counter",
        f"{_PREFIX}held",
        "Times that a device was not taken away because a process held it.",
        lambda snapshot: snapshot.counts.held,
    ),
    _Row(
        "counter",
        f"{_PREFIX}fenced",
        "Processes killed, on request, because they held a device.",
        lambda snapshot: snapshot.counts.fenced,
    ),
    _Row(
        "gauge",
        f"{_PREFIX}allocations",
        "Allocations by phase: Materializing, Ready, Draining, Failed.",
        lambda snapshot: _count_phases(snapshot.devices),
        ("phase",),
    ),
    _Row(
        "gauge",
        f"{_PREFIX}allocated_bytes",
        "Bytes of all allocations.",
        lambda snapshot: sum(device.size_bytes for device in snapshot.devices),
    ),
    _Row(
        "gauge",
        f"{_PREFIX}region_bytes",
        "Size of each region that devices are made of.",
        lambda snapshot: {(region.name,): region.size_bytes for region in snapshot.regions},
        ("region",),
    ),
    _Row(
        "gauge",
        f"{_PREFIX}region_available_bytes",
        "Bytes of each region that no device has.",
        lambda snapshot: {(region.name,): region.available_bytes for region in snapshot.regions},
        ("region",),
    ),
)


def _count_phases(devices: tuple[DaxDevice, ...]) -> dict[tuple[str, ...], float]:
    counted = Counter(device.phase for device in devices)
    return {(phase.value,): counted[phase] for phase in AllocationPhase}
