"""Keeps the ResourceSlices what they should be: written when something changed, not by the clock.

What others do to them (delete, edit) comes back by the informer and is mended.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from typing import Final

from hymcache.dra.cluster import (
    RESOURCE_SLICE,
    ClusterClient,
    ClusterError,
    JsonObject,
    ObjectConflict,
    ObjectMissing,
)
from hymcache.dra.controller.blades import BladeBook
from hymcache.dra.controller.settings import ControllerSettings
from hymcache.dra.controller.slices import Features, Taint, learn, make_slice, same
from hymcache.dra.fabric import BladeKey
from hymcache.dra.retry import Backoff
from hymcache.errors import Unavailable

_log = logging.getLogger(__name__)

# What changes together is written once.
_GATHER_S: Final = 0.05
_BACKOFF: Final = Backoff(first_s=1.0, factor=2.0, longest_s=30.0, jitter=0.5)
_ROUNDS_MAX: Final = 5


class SlicePublisher:
    """One task writes; `wake` tells it that something changed."""

    def __init__(
        self,
        client: ClusterClient,
        book: BladeBook,
        settings: ControllerSettings,
        taint_of: Callable[[BladeKey], Taint | None],
    ) -> None:
        self._client = client
        self._book = book
        self._settings = settings
        self._taint_of = taint_of
        self._stored: dict[str, JsonObject] = {}
        self._source = random.Random()  # noqa: S311 - spreads retries
        self._changed = asyncio.Event()
        self._quiet = asyncio.Event()
        self.features = Features()
        self.writes = 0

    def wake(self) -> None:
        """Something changed that slices may show."""
        self._quiet.clear()
        self._changed.set()

    def note(self, before: JsonObject | None, after: JsonObject | None) -> None:
        """A change of a slice in the cluster."""
        if after is not None:
            name = after["metadata"]["name"]
            known = self._stored.get(name)
            self._stored[name] = _newer(known, after)
        elif before is not None:
            self._stored.pop(before["metadata"]["name"], None)
        self.wake()

    async def publish(self, timeout_s: float) -> bool:
        """Writes what changed; whether that was done in time."""
        self.wake()
        try:
            async with asyncio.timeout(timeout_s):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Until it is cancelled."""
        failures = 0
        while True:
            await self._changed.wait()
            await asyncio.sleep(_GATHER_S)
            self._changed.clear()
            try:
                await self._write_all()
            except (ClusterError, Unavailable) as error:
                _log.warning("slices: %s", error)
                self._changed.set()
                failures += 1
                await asyncio.sleep(_BACKOFF.delay_s(failures, self._source))
            else:
                failures = 0
            if not self._changed.is_set():
                self._quiet.set()

    async def _write_all(self) -> None:
        wanted: Mapping[str, JsonObject] = {}
        for _ in range(_ROUNDS_MAX):
            wanted = self._wanted()
            features = self.features
            for name, body in wanted.items():
                await self._write(name, body)
            if self.features == features:
                break
        if not self._book.complete:
            # Slices of a life before stay as long as it is not known which blades there are.
            return
        for name in self._stored.keys() - wanted.keys():
            try:
                await self._client.delete(RESOURCE_SLICE, name)
                self.writes += 1
            except ObjectMissing:
                pass
            self._stored.pop(name, None)

    def _wanted(self) -> Mapping[str, JsonObject]:
        wanted = {}
        for state in self._book.states:
            taint = self._taint_of(state.blade.key)
            body = make_slice(state, self._book, self._settings, self.features, taint)
            if body is not None:
                wanted[body["metadata"]["name"]] = body
        return wanted

    async def _write(self, name: str, body: JsonObject) -> None:
        stored = self._stored.get(name)
        if stored is not None and same(body, stored):
            return
        pool = body["spec"]["pool"]
        generation = stored["spec"]["pool"].get("generation", 0) + 1 if stored else 1
        spec = {**body["spec"], "pool": {**pool, "generation": generation}}
        sent = {**body, "spec": spec}
        try:
            if stored is None:
                result = await self._client.create(RESOURCE_SLICE, sent)
            else:
                sent["metadata"] = {
                    **body["metadata"],
                    "resourceVersion": stored["metadata"]["resourceVersion"],
                }
                result = await self._client.replace(RESOURCE_SLICE, sent)
        except (ObjectConflict, ObjectMissing):
            await self._reload(name)
            self.wake()
            return
        self.writes += 1
        self._stored[name] = result
        self._learn(sent, result)

    def _learn(self, sent: JsonObject, stored: JsonObject) -> None:
        kept = learn(sent, stored)
        features = Features(
            self.features.capacity and kept.capacity,
            self.features.conditions and kept.conditions,
            self.features.taints and kept.taints,
        )
        if features != self.features:
            _log.warning("the API server drops fields of devices: %s", features)
            self.features = features

    async def _reload(self, name: str) -> None:
        try:
            self._stored[name] = await self._client.get(RESOURCE_SLICE, name)
        except ObjectMissing:
            self._stored.pop(name, None)


def trim_slice(item: JsonObject, driver: str) -> JsonObject | None:
    """What of a slice is kept; None for one that is not the controller's."""
    spec = item["spec"]
    if spec.get("driver") != driver or spec.get("nodeName"):
        return None
    metadata = {key: item["metadata"][key] for key in ("name", "resourceVersion")}
    return {"metadata": metadata, "spec": spec}


def _newer(known: JsonObject | None, seen: JsonObject) -> JsonObject:
    """The later of two versions; a watch may bring what was overwritten since."""
    if known is None:
        return seen
    versions = (known["metadata"]["resourceVersion"], seen["metadata"]["resourceVersion"])
    try:
        return known if int(versions[0]) > int(versions[1]) else seen
    except ValueError:
        return seen
