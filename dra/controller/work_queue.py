"""Keys that wait to be worked on: each at most once in the queue, and never by two workers.

A key that comes while it is worked on is worked on once more afterwards. A key may be put off;
the earliest of its times counts.
"""

from __future__ import annotations

import asyncio
import heapq
from typing import Generic, TypeVar

Key = TypeVar("Key")


class WorkQueue(Generic[Key]):
    """Unbounded in principle, bounded by the number of distinct keys."""

    def __init__(self) -> None:
        self._ready: dict[Key, None] = {}
        self._active: set[Key] = set()
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._counter = 0
        self._changed = asyncio.Event()
        self._failures: dict[Key, int] = {}

    def __len__(self) -> int:
        """Keys that could be worked on now."""
        return len(self._ready)

    @property
    def idle(self) -> bool:
        """Whether nothing is ready or being worked on; keys that are put off do not count."""
        return not self._ready and not self._active

    def add(self, key: Key) -> None:
        """Works on the key as soon as a worker is free."""
        self._due.pop(key, None)
        self._ready[key] = None
        self._changed.set()

    def add_after(self, key: Key, delay_s: float) -> None:
        """Works on the key in `delay_s`, or earlier where it comes earlier."""
        if key in self._ready and key not in self._active:
            return
        due = asyncio.get_running_loop().time() + delay_s
        if self._due.get(key, due + 1) <= due:
            return
        self._due[key] = due
        self._counter += 1
        heapq.heappush(self._heap, (due, self._counter, key))
        self._changed.set()

    def failed(self, key: Key) -> int:
        """Counts a failure of the key: how many in a row."""
        self._failures[key] = self._failures.get(key, 0) + 1
        return self._failures[key]

    def succeeded(self, key: Key) -> None:
        """Forgets the failures of the key."""
        self._failures.pop(key, None)

    async def take(self) -> Key:
        """The next key; it is nobody else's until `done`."""
        while True:
            now = asyncio.get_running_loop().time()
            self._ripen(now)
            for key in self._ready:
                if key not in self._active:
                    del self._ready[key]
                    self._active.add(key)
                    return key
            self._changed.clear()
            timeout = max(0.0, self._heap[0][0] - now) if self._heap else None
            try:
                async with asyncio.timeout(timeout):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def done(self, key: Key) -> None:
        """The worker has finished with the key."""
        self._active.discard(key)
        if key in self._ready:
            self._changed.set()

    def _ripen(self, now: float) -> None:
        while self._heap and self._heap[0][0] <= now:
            due, _, key = heapq.heappop(self._heap)
            if self._due.get(key) == due:
                del self._due[key]
                self._ready[key] = None
