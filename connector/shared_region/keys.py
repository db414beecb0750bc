"""From vLLM's keys to those of a region.

vLLM names a chunk of `blocks_per_chunk` blocks by its OffloadKey: the hash of its last block, and
the index of its KV cache group. A region holds single blocks, one for each shard of an engine's
KV, so a chunk has `blocks_per_chunk` keys in each of `shards` namespaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from hymcache.lookup.keys import object_keys
from hymcache.lookup.namespace import Namespace

_GROUP_BYTES: Final = 4


def group_of(chunk: bytes) -> int:
    """The KV cache group that a chunk is of."""
    return int.from_bytes(chunk[-_GROUP_BYTES:], "big")


class RegionKeys:
    """The keys of one engine's blocks."""

    def __init__(
        self, facts: Mapping[str, str | int], *, shards: int, blocks_per_chunk: int
    ) -> None:
        """`facts` are what the bytes of blocks depend on beside tokens and shard."""
        spaces = [
            Namespace.of({**facts, "shard": shard, "shards": shards}) for shard in range(shards)
        ]
        self._fingerprints = [space.fingerprint for space in spaces]
        self._blocks_per_chunk = blocks_per_chunk

    def name_space(self, shard: int) -> int:
        """The fingerprint of a shard's namespace, by which `hymcache region` counts objects."""
        return self._fingerprints[shard]

    def of_chunk(self, chunk: bytes) -> bytes:
        """All keys that must be present for a chunk to be."""
        parts = list(self._parts(chunk))
        return b"".join(object_keys(fingerprint, parts) for fingerprint in self._fingerprints)

    def of_shard(self, shard: int, chunks: Iterable[bytes]) -> bytes:
        """The keys of a shard's blocks of some chunks, in order."""
        parts = (part for chunk in chunks for part in self._parts(chunk))
        return object_keys(self._fingerprints[shard], parts)

    def _parts(self, chunk: bytes) -> Iterable[bytes]:
        # The last block of a chunk has its own hash, and so the same key for every chunk size.
        for before_last in range(self._blocks_per_chunk - 1, 0, -1):
            yield chunk + before_last.to_bytes(4, "big")
        yield chunk
