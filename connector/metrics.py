"""What the connector counts, declared once, and its way into vLLM's own /metrics.

The halves of the connector fill a StoreStats; vLLM joins those of all ranks, carries them to the
process that serves /metrics, and hands them to StorePromMetrics there. docs/vllm.md shows this
table, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_PREFIX: Final = "vllm:hymcache_"
# From a lookup on one host (60 us) to the deadline of a load.
_SECONDS_BUCKETS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
# Of a kind between two scrapes of the stats by vLLM, which is a step: a bound, not a sample.
_OBSERVATIONS_MAX: Final = 1024
_SEPARATOR: Final = "|"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: a counter, or with `buckets` a histogram."""

    name: str
    documentation: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exported_name(self) -> str:
        """Its name in /metrics."""
        return f"{_PREFIX}{self.name}" + ("" if self.buckets else "_total")


_TABLE: Final = (
    Metric("blocks_asked", "Blocks of prompts that were looked up, beyond the local hit."),
    Metric("blocks_hit", "Of those, the blocks that the store holds from the front on."),
    Metric("lookups_failed", "Lookups that got no full answer; what they lacked is a miss."),
    Metric("blocks_loaded", "Blocks that were loaded, each rank and cache group counted."),
    Metric("blocks_load_failed", "Blocks that failed to load and were recomputed.", ("reason",)),
    Metric("blocks_saved", "Blocks that the store took, each rank and cache group counted."),
    Metric("blocks_skipped", "Blocks that were not saved.", ("reason",)),
    Metric("bytes", "Bytes moved, by direction (load, save).", ("direction", "transport")),
    Metric("verbs_fallbacks", "Calls whose bytes went over TCP although RDMA was to be used."),
    Metric("lookup_seconds", "From the start of a lookup to its answer.", (), _SECONDS_BUCKETS),
    Metric("load_seconds", "From the order of a load to its end.", (), _SECONDS_BUCKETS),
    Metric("save_seconds", "From the order of a save to its end.", (), _SECONDS_BUCKETS),
)
METRICS: Final[Mapping[str, Metric]] = {metric.name: metric for metric in _TABLE}


class StoreStats(KVConnectorStats):
    """Counts since the last report.

    `data` is made of plain dictionaries, lists and numbers: it crosses processes. A series is
    `name|label value|...`.
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = data or {"counts": {}, "values": {}}

    def add(self, name: str, count: int, *label_values: str) -> None:
        """Counts something; the label values in the order of the metric's labels."""
        if count:
            counts = self.data["counts"]
            key = _SEPARATOR.join((name, *label_values))
            counts[key] = counts.get(key, 0) + count

    def observe(self, name: str, value: float) -> None:
        """Notes one value of a histogram."""
        values = self.data["values"].setdefault(name, [])
        if len(values) < _OBSERVATIONS_MAX:
            values.append(value)

    def take(self) -> StoreStats | None:
        """What was counted so far, None for nothing; counting starts anew."""
        if self.is_empty():
            return None
        taken = StoreStats(self.data)
        self.reset()
        return taken

    def reset(self) -> None:
        """Forgets all counts."""
        self.data = {"counts": {}, "values": {}}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data["counts"] and not self.data["values"]

    def aggregate(self, other: KVConnectorStats) -> StoreStats:
        """Adds the counts of another rank or half."""
        for key, count in other.data["counts"].items():
            self.data["counts"][key] = self.data["counts"].get(key, 0) + count
        for name, values in other.data["values"].items():
            mine = self.data["values"].setdefault(name, [])
            mine += values[: max(0, _OBSERVATIONS_MAX - len(mine))]
        return self

    def reduce(self) -> dict[str, int | float]:
        """Counts and means, for vLLM's periodic log line."""
        reduced: dict[str, int | float] = {
            key.replace(_SEPARATOR, " "): count for key, count in self.data["counts"].items()
        }
        for name, values in self.data["values"].items():
            reduced[f"mean {name}"] = round(sum(values) / len(values), 6)
        return reduced


class StorePromMetrics(KVConnectorPromMetrics):
    """The metrics as Prometheus objects, for each engine behind one server."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._collectors: dict[str, Any] = {}
        for metric in METRICS.values():
            kind: Any = metric_types[Histogram if metric.buckets else Counter]
            buckets = {"buckets": metric.buckets} if metric.buckets else {}
            self._collectors[metric.name] = kind(
                name=metric.exported_name,
                documentation=f"HyMCache: {metric.documentation}",
                labelnames=[*labelnames, *metric.labels],
                **buckets,
            )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds one StoreStats' data to an engine's series."""
        engine = self.per_engine_labelvalues[engine_idx]
        for key, count in transfer_stats_data.get("counts", {}).items():
            name, *label_values = key.split(_SEPARATOR)
            self._collectors[name].labels(*engine, *label_values).inc(count)
        for name, values in transfer_stats_data.get("values", {}).items():
            series = self._collectors[name].labels(*engine)
            for value in values:
                series.observe(value)
