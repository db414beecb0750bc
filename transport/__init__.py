"""Moving control messages and blocks between processes: one-sided where memory is shared.

The wire protocol (docs/wire-protocol.md) is spoken by C++ on both ends: an event loop without
locks on the serving side, blocking calls with deadlines on the asking side. Blocks go through
shared memory on one host (`shm`: the client copies, past its caches from 256 KiB up, and the
node's CPU stays idle) and otherwise in the stream itself (`tcp`: straight from and into the places
where they belong). What is exported here is what the C++ offers to Python on its own.
"""

from __future__ import annotations

from hymcache._core import copy_implementation, crc32c

__all__ = ["copy_implementation", "crc32c"]
