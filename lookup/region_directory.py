"""The objects of a shared region, for Python programs.

Engines hand addresses of their blocks to `RegionDirectory.core`; `put` and `get` are for programs
that have buffers. The protocol between processes is in docs/region-format.md.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from hymcache import _core
from hymcache._core import RegionStatus
from hymcache.chm_device.region import Region
from hymcache.lookup.keys import joined_keys


class RegionDirectory:
    """Finds, stores and loads objects of a region; thread-safe, and never waits for others.

    Counts as one participant of the region from here to `close`: its pins, and the slots that it
    is writing, are taken back when it is silent for the region's lease.
    """

    def __init__(
        self,
        region: Region,
        *,
        name: str = "",
        verify_checksums: bool = True,
        threads: int = 1,
        maintain: bool = True,
    ) -> None:
        """`threads` copy the objects of one call; `maintain` beats, reclaims and evicts beside.

        Raises Unavailable when all places for participants are taken.
        """
        self.region: Final = region
        self.core: Final = _core.RegionDirectory(
            region.core,
            name=name or f"{socket.gethostname()}:{os.getpid()}",
            verify_checksums=verify_checksums,
            threads=threads,
            maintain=maintain,
        )

    def lookup(self, keys: Sequence[bytes]) -> list[RegionStatus]:
        """OK, PENDING (somebody is storing it) or MISS for each key; plain loads, no lock."""
        return _statuses(self.core.lookup(joined_keys(keys)))

    def leading_hits(self, keys: Sequence[bytes]) -> int:
        """How many keys from the first on are there: the prefix that can be loaded."""
        found = self.core.lookup(joined_keys(keys))
        return len(found) - len(found.lstrip(bytes((RegionStatus.OK,))))

    def put(
        self, keys: Sequence[bytes], buffers: Sequence[Buffer], *, name_space: int = 0
    ) -> list[RegionStatus]:
        """Stores each buffer (contiguous, any type) under its key."""
        views = [_bytes_of(buffer) for buffer in buffers]
        return _statuses(self.core.store(joined_keys(keys), *_table(views), name_space))

    def get(self, keys: Sequence[bytes], into: Sequence[Buffer]) -> list[RegionStatus]:
        """Fills each writable buffer with the object of its key; it must have the object's size.

        The contents of a buffer whose answer is not OK are undefined.
        """
        views = [_bytes_of(buffer) for buffer in into]
        for place, view in enumerate(views):
            if not view.flags.writeable:
                raise ValueError(f"buffer {place} is read-only")
        return _statuses(self.core.load(joined_keys(keys), *_table(views)))

    @contextmanager
    def pinned(self, keys: Sequence[bytes]) -> Iterator[list[RegionStatus]]:
        """Keeps those objects that are there from being evicted; OK, MISS or FULL for each."""
        ticket, found = self.core.pin(joined_keys(keys))
        try:
            yield _statuses(found)
        finally:
            self.core.unpin(ticket)

    def remove(self, keys: Sequence[bytes]) -> list[RegionStatus]:
        """OK or MISS for each key; FULL where somebody has it pinned."""
        return _statuses(self.core.remove(joined_keys(keys)))

    def stats(self) -> dict[str, int]:
        """Counters of this object."""
        return self.core.stats()

    def close(self) -> None:
        """Leaves the region, with all pins."""
        self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()


def _statuses(raw: bytes) -> list[RegionStatus]:
    return [RegionStatus(status) for status in raw]


def _bytes_of(buffer: Buffer) -> NDArray[np.uint8]:
    return np.frombuffer(buffer, dtype=np.uint8)


def _table(views: Sequence[NDArray[np.uint8]]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    addresses = np.array([view.ctypes.data for view in views], dtype=np.uint64)
    sizes = np.array([view.nbytes for view in views], dtype=np.uint64)
    return addresses.reshape(-1, 1), sizes.reshape(-1, 1)
