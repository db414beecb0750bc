"""Finding and fetching a prefix: keys and namespaces, batched lookups, reads and writes.

`Client` is usable on its own. The C++ below it finds masters and nodes, keeps connections, starts
the prefetch with the first hit of a lookup, and moves blocks by the best transport that both ends
have.
"""

from __future__ import annotations

from hymcache._core import BlockStatus
from hymcache.lookup.client import Client, Location
from hymcache.lookup.keys import KEY_BYTES, ObjectKey, object_key, object_keys
from hymcache.lookup.namespace import Fingerprint, Namespace

__all__ = [
    "KEY_BYTES",
    "BlockStatus",
    "Client",
    "Fingerprint",
    "Location",
    "Namespace",
    "ObjectKey",
    "object_key",
    "object_keys",
]
