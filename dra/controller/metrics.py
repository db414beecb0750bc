"""What the controller says of itself in /metrics, declared once; docs/metrics.md shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from hymcache.metric_table import Reading, TableRow


@dataclass(frozen=True)
class BladeNumbers:
    """One blade, in MiB."""

    total: int
    published: int
    allocated: int
    leaking: int
    foreign: int
    online: bool


@dataclass(frozen=True)
class ControllerSnapshot:
    """All that metrics show, at one moment."""

    leading: bool = False
    fabric_reachable: bool = False
    numbers: Mapping[str, float] = field(default_factory=dict)
    regions: Mapping[str, int] = field(default_factory=dict)
    free_failures: Mapping[str, int] = field(default_factory=dict)
    blades: Mapping[tuple[str, str], BladeNumbers] = field(default_factory=dict)


_Row = TableRow[ControllerSnapshot]
_PREFIX: Final = "hymcache_dra_"


def _number(name: str) -> Callable[[ControllerSnapshot], Reading]:
    return lambda snapshot: snapshot.numbers.get(name, 0.0)


def _counter(name: str, documentation: str) -> _Row:
    return _Row("counter", _PREFIX + name, documentation, _number(name))


def _gauge(name: str, documentation: str) -> _Row:
    return _Row("gauge", _PREFIX + name, documentation, _number(name))


def _blade(name: str, documentation: str, read: Callable[[BladeNumbers], float]) -> _Row:
    def readings(snapshot: ControllerSnapshot) -> Reading:
        return {key: float(read(blade)) for key, blade in snapshot.blades.items()}

    return _Row("gauge", _PREFIX + name, documentation, readings, ("appliance", "blade"))


def _labelled(mapping: Mapping[str, int]) -> Reading:
    return {(key,): float(value) for key, value in mapping.items()}


METRICS: Final[tuple[_Row, ...]] = (
    _Row("gauge", _PREFIX + "leading", "1 while this controller acts.", lambda s: s.leading),
    _Row(
        "gauge",
        _PREFIX + "fabric_reachable",
        "1 when the fabric manager answered the last look.",
        lambda s: s.fabric_reachable,
    ),
    _Row(
        "gauge",
        _PREFIX + "regions",
        "Records of the ledger by state; those that are being freed are capacity that leaks.",
        lambda s: _labelled(s.regions),
        ("state",),
    ),
    _blade("blade_mib", "Memory of a blade.", lambda b: b.total),
    _blade("blade_published_mib", "Capacity that its slice offers.", lambda b: b.published),
    _blade("blade_allocated_mib", "What regions of claims take.", lambda b: b.allocated),
    _blade("blade_leaking_mib", "What no claim has and is not freed yet.", lambda b: b.leaking),
    _blade(
        "blade_foreign_mib", "What regions take that are not the driver's.", lambda b: b.foreign
    ),
    _blade("blade_online", "1 while the fabric manager knows its state.", lambda b: b.online),
    _counter("composed", "Regions composed."),
    _counter("freed", "Regions freed."),
    _counter("attached", "Claims' devices attached."),
    _counter("attach_seconds", "From allocation seen to attached, added up."),
    _counter("attach_own_seconds", "Of that, what did not pass at the fabric manager."),
    _counter("attach_failures", "Devices reported as failed, so that pods go elsewhere."),
    _Row(
        "counter",
        _PREFIX + "free_failures",
        "Frees that did not succeed: held (somebody has the device open), fabric.",
        lambda s: _labelled(s.free_failures),
        ("reason",),
    ),
    _counter("given_up", "Claims let go although their memory could not be freed."),
    _counter("lost_regions", "Regions that blades lost, e.g. by a power cycle."),
    _counter("orphans", "Regions of no claim that were collected."),
    _counter("resyncs", "Resyncs of blades asked for."),
    _counter("fabric_looks", "Looks at all blades."),
    _counter("fabric_look_failures", "Looks that the fabric manager did not answer."),
    _counter("fabric_seconds", "Time that requests to the fabric manager took, added up."),
    _counter("lists", "Lists read from the API server."),
    _counter("watches", "Watches opened at the API server."),
    _counter("slice_writes", "ResourceSlices written."),
    _counter("reconcile_errors", "Passes over a claim that ended in an error."),
    _gauge("queue_length", "Claims that wait for a worker."),
)
