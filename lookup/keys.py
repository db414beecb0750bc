"""Object keys: 16 bytes from a namespace and the engine's hash of a block.

A key is the first half of SHA-256 over the namespace's fingerprint (8 bytes, little-endian) and
the block hash. The engine's hash covers all tokens up to and with the block, so one key stands
for a whole prefix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final, NewType

from hymcache.errors import ConfigError
from hymcache.lookup.namespace import Fingerprint

ObjectKey = NewType("ObjectKey", bytes)
"""16 bytes that name an object."""

KEY_BYTES: Final = 16


def object_keys(fingerprint: Fingerprint, block_hashes: Iterable[bytes]) -> bytes:
    """The keys of blocks, one after the other: `KEY_BYTES` for each hash, in its order."""
    seeded = hashlib.sha256(fingerprint.to_bytes(8, "little"))
    parts = []
    for block_hash in block_hashes:
        digest = seeded.copy()
        digest.update(block_hash)
        parts.append(digest.digest()[:KEY_BYTES])
    return b"".join(parts)


def object_key(fingerprint: Fingerprint, block_hash: bytes) -> ObjectKey:
    """The key of one block."""
    return ObjectKey(object_keys(fingerprint, (block_hash,)))


def joined_keys(keys: Sequence[bytes]) -> bytes:
    """Keys one after the other, as the core takes them. Raises ConfigError for one of another
    length."""
    for index, key in enumerate(keys):
        if len(key) != KEY_BYTES:
            raise ConfigError(
                f"key {index} has {len(key)} bytes, a key has {KEY_BYTES}; "
                "make keys with hymcache.lookup.object_key"
            )
    return b"".join(keys)
