"""Where the plugin reads claims: at the API server, one at a time, by name."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from typing import Final, Protocol

from hymcache.dra import cluster
from hymcache.dra.cluster import ClusterClient, JsonObject, ObjectMissing, VersionGone
from hymcache.dra.retry import Backoff
from hymcache.errors import Unavailable

# A watch that ends at once every time would make a loop of requests.
_AGAIN: Final = Backoff(first_s=0.5, longest_s=10.0)


class ClaimSource(Protocol):
    """Reads claims."""

    def follow(self, namespace: str, name: str) -> AsyncGenerator[JsonObject, None]:
        """The claim as it is, then after each change. Ends when it is deleted.

        Raises Unavailable or ClusterError where the first cannot be read.
        """


class ClusterClaims:
    """Claims of an API server."""

    def __init__(self, client: ClusterClient) -> None:
        self._client = client
        # Not a secret: it spreads requests.
        self._random = random.Random()  # noqa: S311

    async def follow(self, namespace: str, name: str) -> AsyncGenerator[JsonObject, None]:
        """See ClaimSource."""
        claim = await self._client.get(cluster.RESOURCE_CLAIM, name, namespace)
        yield claim
        failures = 0
        while True:
            try:
                async for changed in self._changes(claim):
                    failures = 0
                    yield changed
                    claim = changed
            except (Unavailable, VersionGone):
                pass  # read anew below, after a while
            failures += 1
            await asyncio.sleep(_AGAIN.delay_s(failures, self._random))
            try:
                current = await self._client.get(cluster.RESOURCE_CLAIM, name, namespace)
            except ObjectMissing:
                return
            except Unavailable:
                continue
            if current["metadata"]["resourceVersion"] != claim["metadata"]["resourceVersion"]:
                claim = current
                yield claim

    async def _changes(self, claim: JsonObject) -> AsyncGenerator[JsonObject, None]:
        metadata = claim["metadata"]
        events = self._client.watch(
            cluster.RESOURCE_CLAIM,
            metadata["resourceVersion"],
            metadata["namespace"],
            field_selector=f"metadata.name={metadata['name']}",
        )
        try:
            async for event in events:
                if event.kind in {"ADDED", "MODIFIED"}:
                    yield event.item
                elif event.kind == "DELETED":
                    raise VersionGone(f"claim {metadata['name']} is deleted", 410)
        finally:
            await events.aclose()
