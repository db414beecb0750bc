"""A copy of a collection of the cluster that follows it: one list, then a watch.

list ─▶ watch ─┬─ ends, or its connection breaks ─▶ watch again from the newest version
  ▲            └─ 410: the version is too old ────▶ list again
  └──────────────────────────────────────────────────┘
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import aclosing
from typing import Final

from hymcache.dra.cluster import ClusterClient, JsonObject, ResourceKind, VersionGone
from hymcache.dra.cluster.errors import ClusterError
from hymcache.dra.retry import Backoff
from hymcache.errors import Unavailable

_log = logging.getLogger(__name__)

# Between attempts to reach a server that is away; the first is at once.
_BACKOFF: Final = Backoff(first_s=0.2, factor=2.0, longest_s=15.0, jitter=0.5)
# A watch that gave nothing for so long ended by itself: not a failure.
_HEALTHY_S: Final = 1.0

Handler = Callable[[JsonObject | None, JsonObject | None], None]
Name = tuple[str, str]


class Informer:
    """Objects of one kind, as small as `trim` makes them; where it says None, they are left out.

    `handler(before, after)` is called with each change, also with what a new list shows.
    """

    def __init__(
        self,
        client: ClusterClient,
        kind: ResourceKind,
        trim: Callable[[JsonObject], JsonObject | None],
        handler: Handler,
        *,
        namespace: str | None = None,
        label_selector: str = "",
    ) -> None:
        self._client = client
        self._kind = kind
        self._trim = trim
        self._handler = handler
        self._namespace = namespace
        self._label_selector = label_selector
        self._items: dict[Name, JsonObject] = {}
        self._version = ""
        self._source = random.Random()  # noqa: S311 - spreads reconnects
        self.synced = asyncio.Event()
        self.lists = 0
        self.watches = 0

    def get(self, namespace: str, name: str) -> JsonObject | None:
        """One object, None where there is none (or none that `trim` keeps)."""
        return self._items.get((namespace, name))

    def __iter__(self) -> Iterator[JsonObject]:
        return iter(tuple(self._items.values()))

    def remember(self, item: JsonObject) -> None:
        """Takes in what the server answered to a write: the watch may be behind."""
        self._take(item)

    async def run(self) -> None:
        """Until it is cancelled. Nothing that the server does ends it."""
        failures = 0
        while True:
            started = asyncio.get_running_loop().time()
            try:
                if not self._version:
                    await self._list()
                await self._watch()
                failures = 0 if self._lasted(started) else failures + 1
            except VersionGone:
                self._version = ""
                failures = 0 if self._lasted(started) else failures + 1
            except (Unavailable, ClusterError) as error:
                failures = 1 if self._lasted(started) else failures + 1
                _log.warning("watch of %s: %s", self._kind.plural, error)
            if failures:
                await asyncio.sleep(_BACKOFF.delay_s(failures, self._source))

    def _lasted(self, started: float) -> bool:
        return asyncio.get_running_loop().time() - started > _HEALTHY_S

    async def _list(self) -> None:
        found = await self._client.list_all(
            self._kind,
            self._namespace,
            label_selector=self._label_selector,
            trim=self._trim,
        )
        self.lists += 1
        present: set[Name] = set()
        for item in found.items:
            present.add(_name_of(item))
            self._put(item)
        for name in self._items.keys() - present:
            self._handler(self._items.pop(name), None)
        self._version = found.resource_version
        self.synced.set()

    async def _watch(self) -> None:
        self.watches += 1
        events = self._client.watch(
            self._kind, self._version, self._namespace, label_selector=self._label_selector
        )
        async with aclosing(events):
            async for event in events:
                self._version = event.item["metadata"]["resourceVersion"]
                if event.kind == "DELETED":
                    before = self._items.pop(_name_of(event.item), None)
                    if before is not None:
                        self._handler(before, None)
                elif event.kind != "BOOKMARK":
                    self._take(event.item)

    def _take(self, item: JsonObject) -> None:
        name = _name_of(item)
        before = self._items.get(name)
        if before is not None and _is_older(item, before):
            return
        after = self._trim(item)
        if after is not None:
            self._put(after)
        elif before is not None:
            del self._items[name]
            self._handler(before, None)

    def _put(self, after: JsonObject) -> None:
        """Takes in what is kept of an object."""
        name = _name_of(after)
        before = self._items.get(name)
        if before is not None and _is_older(after, before):
            return
        self._items[name] = after
        if before is None or _version_of(before) != _version_of(after):
            self._handler(before, after)


def _name_of(item: JsonObject) -> Name:
    metadata = item["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def _is_older(item: JsonObject, than: JsonObject) -> bool:
    """By version; they count up (since 1.35 that is part of the API's contract)."""
    try:
        return int(_version_of(item)) < int(_version_of(than))
    except ValueError:
        return False


def _version_of(item: JsonObject) -> str:
    version: str = item["metadata"]["resourceVersion"]
    return version
