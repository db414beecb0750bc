"""What a kubelet plugin says of itself in /metrics; docs/metrics.md is made from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hymcache.dra.kubelet_plugin.preparer import PrepareCounts
from hymcache.metric_table import TableRow


@dataclass(frozen=True, slots=True)
class PluginSnapshot:
    """A plugin at one moment."""

    counts: PrepareCounts
    prepared_claims: int
    is_registered: bool
    health_followers: int


_Row = TableRow[PluginSnapshot]
_PREFIX: Final = "hymcache_dra_plugin_"

METRICS: Final[tuple[_Row, ...]] = (
    _Row(
        "counter",
        f"{_PREFIX}prepares",
        "Claims that the kubelet asked to prepare, by result: done, failed.",
        lambda snapshot: {
            ("done",): snapshot.counts.prepared,
            ("failed",): snapshot.counts.failed,
        },
        ("result",),
    ),
    _Row(
        "counter",
        f"{_PREFIX}prepare_seconds",
        "Time taken to prepare claims, waiting for the controller included.",
        lambda snapshot: snapshot.counts.prepare_s,
    ),
    _Row(
        "counter",
        f"{_PREFIX}unprepares",
        "Claims unprepared.",
        lambda snapshot: snapshot.counts.unprepared,
    ),
    _Row(
        "gauge",
        f"{_PREFIX}prepared_claims",
        "Claims that are prepared on this node, by any plugin of the driver.",
        lambda snapshot: snapshot.prepared_claims,
    ),
    _Row(
        "gauge",
        f"{_PREFIX}registered",
        "1 when the kubelet has registered this plugin.",
        lambda snapshot: snapshot.is_registered,
    ),
    _Row(
        "gauge",
        f"{_PREFIX}health_streams",
        "Streams on which the kubelet follows the health of devices.",
        lambda snapshot: snapshot.health_followers,
    ),
)
