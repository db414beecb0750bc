"""Finding and fetching a prefix: keys and namespaces, batched lookups, reads and writes.

`Client` is usable on its own. The C++ below it finds masters and nodes, keeps connections, starts
the prefetch with the first hit of a lookup, and moves blocks by the best transport that both ends
have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hymcache._core import BlockStatus
from hymcache.lookup.keys import KEY_BYTES, ObjectKey, object_key, object_keys
from hymcache.lookup.namespace import Fingerprint, Namespace

if TYPE_CHECKING:
    from hymcache.lookup.client import Client, Location

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


def __getattr__(name: str) -> Any:
    # Its configuration takes as long to import as all the rest; who reads a region needs none.
    if name in {"Client", "Location"}:
        from hymcache.lookup import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
