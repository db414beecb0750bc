"""The keys of a request's blocks, made once as its hashes appear."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hymcache.connector.cache_groups import CacheGroup
from hymcache.connector.shard_namespaces import ShardNamespaces
from hymcache.lookup.keys import KEY_BYTES, object_keys

if TYPE_CHECKING:
    from vllm.v1.request import Request


class RequestKeys:
    """Keys of one request by shard, group and block."""

    def __init__(
        self, request: Request, groups: tuple[CacheGroup, ...], namespaces: ShardNamespaces
    ) -> None:
        self._request = request
        self._groups = groups
        self._namespaces = namespaces
        self._keys: dict[tuple[int, int], bytearray] = {}
        self._hashes_used = 0
        self._last_hash = b""

    def blocks(self, group: int) -> int:
        """How many blocks of a group are full and hashed."""
        return len(self._request.block_hashes) // self._groups[group].hashes_per_block

    def span(self, shard: int, group: int, first: int, end: int) -> bytes:
        """The keys of blocks `first...end-1`, 16 bytes each."""
        self._forget_rewritten()
        keys = self._keys.setdefault((shard, group), bytearray())
        known = len(keys) // KEY_BYTES
        if end > known:
            per_block = self._groups[group].hashes_per_block
            # The last hash of a block covers all its tokens and those before.
            hashes = self._request.block_hashes[
                (known + 1) * per_block - 1 : end * per_block : per_block
            ]
            keys += object_keys(self._namespaces.of(shard, group).fingerprint, hashes)
            self._remember(end * per_block)
        return bytes(keys[first * KEY_BYTES : end * KEY_BYTES])

    def each(self, shard: int, group: int, first: int, end: int) -> list[bytes]:
        """The same keys one by one."""
        keys = self.span(shard, group, first, end)
        return [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]

    def clear(self) -> None:
        """Forgets all keys: the namespaces have changed."""
        self._keys.clear()
        self._hashes_used = 0

    def _remember(self, hashes_used: int) -> None:
        if hashes_used > self._hashes_used:
            self._hashes_used = hashes_used
            self._last_hash = self._request.block_hashes[hashes_used - 1]

    def _forget_rewritten(self) -> None:
        # A session that takes further input replaces the hashes after what it has computed.
        hashes = self._request.block_hashes
        if self._hashes_used and (
            len(hashes) < self._hashes_used or hashes[self._hashes_used - 1] != self._last_hash
        ):
            self.clear()
