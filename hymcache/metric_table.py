"""Metrics declared in tables: a process's /metrics and docs/metrics.md are made from them.

A room declares each of its metrics once, with how to read it from a snapshot of what the room
knows. A scrape takes one snapshot, so that the numbers of a page belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from prometheus_client import CollectorRegistry, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from hymcache.version import __version__

Snapshot = TypeVar("Snapshot")
# One number, or one for each combination of label values.
Reading = float | Mapping[tuple[str, ...], float]


@dataclass(frozen=True)
class TableRow(Generic[Snapshot]):
    """One metric. The name carries prefix and unit, but not the `_total` of counters."""

    kind: Literal["counter", "gauge"]
    name: str
    documentation: str
    read: Callable[[Snapshot], Reading]
    labels: tuple[str, ...] = ()

    @property
    def exported_name(self) -> str:
        """Its name in /metrics."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    def family(self, snapshot: Snapshot) -> Metric:
        """The metric with its values in this snapshot."""
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = kind(self.name, self.documentation, labels=self.labels)
        reading = self.read(snapshot)
        values = reading if isinstance(reading, Mapping) else {(): reading}
        for label_values, value in values.items():
            family.add_metric(label_values, value)
        return family


class StatRows(Generic[Snapshot]):
    """Makes rows of what stands in the core's statistics under the metric's own name."""

    def __init__(self, prefix: str, stats_of: Callable[[Snapshot], Mapping[str, Any]]) -> None:
        self._prefix = prefix
        self._stats_of = stats_of

    def __call__(
        self, kind: Literal["counter", "gauge"], key: str, documentation: str
    ) -> TableRow[Snapshot]:
        """The row `{prefix}_{key}`."""
        stats_of = self._stats_of
        return TableRow(
            kind,
            f"{self._prefix}_{key}",
            documentation,
            lambda snapshot: float(stats_of(snapshot)[key]),
        )


class TableCollector(Collector, Generic[Snapshot]):
    """The metrics of a table, for a Prometheus registry."""

    def __init__(
        self, table: Sequence[TableRow[Snapshot]], take_snapshot: Callable[[], Snapshot]
    ) -> None:
        self._table = table
        self._take_snapshot = take_snapshot

    def describe(self) -> Iterable[Metric]:
        """Their names, without a snapshot: it may be taken only while the service runs."""
        for row in self._table:
            kind = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
            yield kind(row.name, row.documentation, labels=row.labels)

    def collect(self) -> Iterator[Metric]:
        """All metrics, from one snapshot."""
        snapshot = self._take_snapshot()
        for row in self._table:
            yield row.family(snapshot)


def make_registry(*collectors: Collector) -> CollectorRegistry:
    """A registry with these collectors, the version, and the process's memory, CPU time, files."""
    registry = CollectorRegistry()
    build = Info("hymcache_build", "What runs here.", registry=registry)
    build.info({"version": __version__})
    for collector in collectors:
        registry.register(collector)
    ProcessCollector(registry=registry)
    return registry


def table_markdown(table: Sequence[TableRow[Snapshot]]) -> str:
    """The table as docs/metrics.md shows it."""
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for row in table:
        labels = ", ".join(f"`{label}`" for label in row.labels)
        lines.append(f"| `{row.exported_name}` | {row.kind} | {labels} | {row.documentation} |")
    return "\n".join(lines) + "\n"
