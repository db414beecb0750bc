"""What an engine counts about its region, declared once; vLLM shows it in its own /metrics.

docs/shared-region.md shows this table, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from hymcache.connector.metrics import Metric

# From a lookup's microseconds to the deadline of a load.
_SECONDS_BUCKETS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)

_COUNTERS: Final = (
    Metric("region_blocks_loaded", "Blocks that were loaded, each rank and group counted."),
    Metric("region_blocks_load_failed", "Blocks that failed to load.", ("reason",)),
    Metric("region_blocks_stored", "Blocks that were stored, each rank and group counted."),
    Metric("region_blocks_not_stored", "Blocks that were not stored.", ("reason",)),
    Metric("region_bytes", "Bytes moved, by direction (load, store).", ("direction",)),
    Metric("region_evicted", "Objects that this engine evicted (room, watermark).", ("cause",)),
    Metric("region_reclaimed", "Slots that this engine took back from the dead."),
    Metric("region_buried", "Users of the region that this engine found dead."),
    Metric("region_loads_overtaken", "Loads whose object was replaced during the copy."),
    Metric("region_handoffs", "Requests that waited for another engine's KV.", ("outcome",)),
)
_HISTOGRAMS: Final = (
    Metric("region_load_seconds", "From the order of a load to its end.", (), _SECONDS_BUCKETS),
    Metric("region_store_seconds", "From the order of a store to its end.", (), _SECONDS_BUCKETS),
    Metric("region_handoff_seconds", "How long a handed-off request waited.", (), _SECONDS_BUCKETS),
)
_GAUGES: Final = (
    Metric("region_slots", "Slots of the region by state, as all of its hosts see it.", ("state",)),
)
METRICS: Final[tuple[Metric, ...]] = (*_COUNTERS, *_HISTOGRAMS, *_GAUGES)


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """The metrics as vLLM's OffloadingConnector wants them declared."""
    definitions: dict[str, OffloadingMetricMetadata] = {}
    for metric in _COUNTERS:
        definitions[_vllm_name(metric.name)] = OffloadingCounterMetadata(
            f"HyMCache: {metric.documentation}", metric.labels
        )
    for metric in _GAUGES:
        definitions[_vllm_name(metric.name)] = OffloadingGaugeMetadata(
            f"HyMCache: {metric.documentation}", metric.labels
        )
    for metric in _HISTOGRAMS:
        definitions[_vllm_name(metric.name)] = OffloadingHistogramMetadata(
            f"HyMCache: {metric.documentation}", metric.labels, metric.buckets
        )
    return definitions


class RegionStats:
    """Counts since the last report of one half."""

    def __init__(self) -> None:
        self._stats = OffloadingConnectorStats()

    def add(self, name: str, count: int, *label_values: str) -> None:
        """Counts something; the label values in the order of the metric's labels."""
        if count:
            self._stats.increase_counter(_vllm_name(name), count, label_values)

    def observe(self, name: str, value: float) -> None:
        """Notes one value of a histogram."""
        self._stats.observe_histogram(_vllm_name(name), value)

    def set_gauges(self, name: str, values: Mapping[str, int]) -> None:
        """Sets a gauge for each value of its label."""
        for label, value in values.items():
            self._stats.set_gauge(_vllm_name(name), value, (label,))

    def take(self) -> OffloadingConnectorStats | None:
        """What was counted so far, None for nothing; counting starts anew."""
        if self._stats.is_empty():
            return None
        taken, self._stats = self._stats, OffloadingConnectorStats()
        return taken


def _vllm_name(name: str) -> str:
    return f"vllm:hymcache_{name}"
