"""Measures the master: the memory that an object costs, and a lookup of 32 keys.

The index is filled to the size of a 10 TB device by a node that holds nothing; lookups go to that
index, with keys from all over it, so that they pay for cache misses as they would there.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final

from hymcache import _core
from hymcache.bench.cost import Cost, measure, resident_bytes
from hymcache.bench.reference import RunningEcho
from hymcache.bench.samples import SampleLog
from hymcache.bench.service import RunningService
from hymcache.errors import HymcacheError
from hymcache.limits import ENTRY_BYTES, LOOKUP_KEYS_MAX

_NODE: Final = 0x62656E63
_KEY_BYTES: Final = 16
_SETTLE_S: Final = 0.5


class IndexRefused(HymcacheError):
    """The master did not take or find all objects: the numbers would mean nothing."""


class IndexBench:
    """A master that is filled, and asked."""

    def __init__(self, master: RunningService, echo: RunningEcho, log: SampleLog) -> None:
        self._master = master
        self._echo = echo
        self._log = log
        self._filler = _core.IndexFiller(master.master, "filler", _NODE)
        self._client = _core.StoreClient(masters=[master.master], name="bench")
        self._keys: list[bytes] = []

    def fill(self, objects: int) -> None:
        """Publishes the objects, and notes by how much the master grew."""
        time.sleep(_SETTLE_S)
        before = resident_bytes(self._master.master_pid)
        taken = self._filler.publish(objects)
        self._filler.heartbeat()
        time.sleep(_SETTLE_S)
        after = resident_bytes(self._master.master_pid)
        if taken != objects:
            raise IndexRefused(f"the master took {taken} of {objects} objects")
        self._log.add(
            "metadata", objects=objects, resident_before_bytes=before, resident_after_bytes=after
        )
        self._keys = self._filler.last_keys(objects)

    def run_round(self, round_index: int, calls: int) -> None:
        """Lookups and echoes of the same bytes, in turn."""
        rng = random.Random(round_index)
        batches = [b"".join(rng.sample(self._keys, LOOKUP_KEYS_MAX)) for _ in range(256)]
        position = 0

        def look_up() -> None:
            nonlocal position
            self._client.lookup(batches[position % len(batches)])
            position += 1

        sides: list[tuple[str, Callable[[], None], int]] = [
            ("echo", self._echo.client.round_trip, self._echo.server_pid),
            ("ours", look_up, self._master.master_pid),
        ]
        for side, call, pid in sides if round_index % 2 == 0 else sides[::-1]:
            self._filler.heartbeat()  # or its lease lapses, and with it what it published
            measure(call, calls // 10, [pid])
            self._add(side, round_index, measure(call, calls, [pid]))
        self._check_found(batches[0])

    def _check_found(self, keys: bytes) -> None:
        rows = self._client.lookup(keys)
        found = [rows[i : i + _KEY_BYTES] for i in range(0, len(rows), ENTRY_BYTES)]
        if b"".join(found) != keys:
            raise IndexRefused("the master does not find what it took")

    def _add(self, side: str, round_index: int, cost: Cost) -> None:
        self._log.add(
            "lookup",
            side=side,
            round=round_index,
            calls=cost.calls,
            p50_us=cost.p50_s * 1e6,
            server_cpu_us=cost.server_cpu_s_per_call * 1e6,
            client_cpu_us=cost.client_cpu_s / cost.calls * 1e6,
        )
