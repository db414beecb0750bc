"""The client of the store for Python programs."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from typing_extensions import Buffer

from hymcache import limits
from hymcache._core import BlockStatus, StoreClient
from hymcache.errors import ConfigError
from hymcache.lookup.keys import KEY_BYTES

# hymcache/csrc/entry.h: key, address, generation, name_space, length, node, crc32c, flags, epoch
# and a reserved word.
_ENTRY: Final = struct.Struct("<16sQQQIIIIII")
_ENTRY_VALID: Final = 1


@dataclass(frozen=True, slots=True)
class Location:
    """Where an object lies. A stale location is a miss when it is read, never a wrong byte."""

    node: int
    address: int
    length: int
    generation: int
    name_space: int


class Client:
    """Puts and gets objects: immutable blocks of bytes under 16-byte keys.

    `master` is "host:port", or several of them in order of preference. Connections are made when
    they are first needed. Thread-safe; no call takes longer than `deadline_s`.
    """

    def __init__(
        self,
        master: str | Sequence[str] = "127.0.0.1:7400",
        *,
        transport: str = "auto",
        deadline_s: float = limits.LOAD_DEADLINE_S,
        connect_timeout_s: float = limits.CONNECT_TIMEOUT_S,
        verify_checksums: bool = True,
        secret: bytes = b"",
    ) -> None:
        """Raises ConfigError for an address or a transport that cannot be."""
        masters = [master] if isinstance(master, str) else list(master)
        self._core = StoreClient(
            masters=masters,
            transport=transport,
            secret=secret,
            deadline_s=deadline_s,
            connect_timeout_s=connect_timeout_s,
            verify_checksums=verify_checksums,
            name=f"client {socket.gethostname()}:{os.getpid()}",
        )

    def put(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[Buffer],
        *,
        name_space: int = 0,
        prefix_order: bool = False,
    ) -> list[BlockStatus]:
        """Stores each buffer (contiguous, any type) under its key.

        The answer for each is OK, STORED_ALREADY, or why it was skipped or failed; the store
        never makes a writer wait for room. With `prefix_order` the buffers are consecutive blocks
        of one prefix, and nothing is stored behind the first that was not. Raises Unavailable
        when no master answers.
        """
        statuses = self._core.put(_joined(keys), buffers, name_space, prefix_order)
        return [BlockStatus(status) for status in statuses]

    def get(self, keys: Sequence[bytes], into: Sequence[Buffer]) -> list[BlockStatus]:
        """Fills each writable buffer with the object of its key; it must have the object's size.

        The contents of a buffer whose answer is not OK are undefined. Raises Unavailable when no
        master answers.
        """
        return [BlockStatus(status) for status in self._core.get(_joined(keys), into)]

    def lookup(self, keys: Sequence[bytes]) -> list[Location | None]:
        """Where the objects are; None for those that nobody holds.

        Any number of keys, asked for in batches of 32. Raises Unavailable when no master answers.
        """
        rows = self._core.lookup(_joined(keys))
        return [_location(row) for row in _ENTRY.iter_unpack(rows)]

    def stats(self) -> dict[str, Any]:
        """Counters since the start: keys asked and found, blocks by outcome, bytes by transport."""
        return self._core.stats()

    def close(self) -> None:
        """Closes all connections."""
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()


def _location(row: tuple[Any, ...]) -> Location | None:
    _key, address, generation, name_space, length, node, _crc32c, flags, *_rest = row
    if not flags & _ENTRY_VALID:
        return None
    return Location(node, address, length, generation, name_space)


def _joined(keys: Sequence[bytes]) -> bytes:
    for index, key in enumerate(keys):
        if len(key) != KEY_BYTES:
            raise ConfigError(
                f"key {index} has {len(key)} bytes, a key has {KEY_BYTES}; "
                "make keys with hymcache.lookup.object_key"
            )
    return b"".join(keys)
