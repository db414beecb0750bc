"""What one half of an engine tells of its region's upkeep: who was evicted, how full it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hymcache.connector.shared_region.attachment import Attachment
    from hymcache.connector.shared_region.metrics import RegionStats
    from hymcache.lookup.region_directory import RegionDirectory

_INTERVAL_S: Final = 1.0
_STATES: Final = ("free", "writing", "valid", "dying")

# The counters of RegionDirectory.stats() that are told: the metric, and its label values.
_COUNTERS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "evicted_for_room": ("region_evicted", ("room",)),
    "evicted_by_watermark": ("region_evicted", ("watermark",)),
    "reclaimed": ("region_reclaimed", ()),
    "buried": ("region_buried", ()),
    "loads_overtaken": ("region_loads_overtaken", ()),
}


class RegionCounts:
    """Adds to the stats, each second, what the directory has counted since."""

    def __init__(
        self,
        attachment: Attachment,
        stats: RegionStats,
        *,
        slots: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `slots` also how many slots are in which state; one process of an engine does."""
        self._attachment = attachment
        self._stats = stats
        self._clock = clock
        self._told_at = clock()
        self._directory: RegionDirectory | None = None
        self._counted: Mapping[str, int] = {}
        # Walking a large region takes longer than the scheduler's step may: a thread does.
        self._walker = ThreadPoolExecutor(1, "hymcache-slots") if slots else None
        self._walk: Future[Mapping[str, int] | None] | None = None

    def report(self) -> None:
        """Never waits."""
        if self._walk is not None and self._walk.done():
            self._stats.set_gauges("region_slots", self._walk.result() or {})
            self._walk = None
        now = self._clock()
        if now - self._told_at < _INTERVAL_S:
            return
        self._told_at = now
        self._report_counters()
        if self._walker is not None and self._walk is None:
            self._walk = self._walker.submit(self._slots_by_state)

    def close(self) -> None:
        """Ends the thread. What is counted after that is not told."""
        if self._walker is not None:
            self._walker.shutdown(cancel_futures=True)

    def _report_counters(self) -> None:
        directory = self._attachment.directory
        counted = {} if directory is None else directory.stats()
        # One that was attached anew counts from zero.
        before = self._counted if directory is self._directory else {}
        for name in counted.keys() & _COUNTERS.keys():
            metric, labels = _COUNTERS[name]
            self._stats.add(metric, counted[name] - before.get(name, 0), *labels)
        self._directory, self._counted = directory, counted

    def _slots_by_state(self) -> Mapping[str, int] | None:
        slots = self._attachment.use(lambda directory: directory.core.slots_by_state())
        return None if slots is None else {state: slots[state] for state in _STATES}
