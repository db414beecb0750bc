"""The client of the store for Python programs."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from typing_extensions import Buffer

from hymcache import limits
from hymcache._core import BlockStatus, StoreClient
from hymcache.config import VerbsConfig
from hymcache.lookup.keys import joined_keys
from hymcache.transport.verbs import make_initiator

# hymcache/csrc/entry.h: key, address, generation, name_space, length, node, crc32c, flags, epoch
# and a reserved word.
_ENTRY: Final = struct.Struct("<16sQQQIIIIII")
_ENTRY_VALID: Final = 1
# Looked up: an enumeration's own call takes ten times as long, for every block.
_STATUSES: Final = {status.value: status for status in BlockStatus}


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
        verbs: VerbsConfig | None = None,
    ) -> None:
        """Raises ConfigError for an address or a transport that cannot be.

        `verbs` is the section [verbs] of a configuration, where RDMA is to differ from its
        defaults.
        """
        masters = [master] if isinstance(master, str) else list(master)
        self._registered: list[memoryview] = []
        self._core = StoreClient(
            masters=masters,
            transport=transport,
            secret=secret,
            deadline_s=deadline_s,
            connect_timeout_s=connect_timeout_s,
            verify_checksums=verify_checksums,
            name=f"client {socket.gethostname()}:{os.getpid()}",
            verbs=make_initiator(transport, verbs or VerbsConfig()),
        )

    def register_memory(self, buffer: Buffer) -> None:
        """Lets RDMA read into, and write from, a writable buffer without a copy in between.

        It is pinned, and kept, until the client is closed; what other transports move needs no
        registration, and this does nothing. Nor does it where `transport` is `auto` and there is
        no RDMA device to use. Raises DeviceError that names the limit to raise.
        """
        view = memoryview(buffer).cast("B")
        address = int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
        self._core.register_memory(address, view.nbytes)
        self._registered.append(view)

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
        statuses = self._core.put(joined_keys(keys), buffers, name_space, prefix_order)
        return [_STATUSES[status] for status in statuses]

    def get(self, keys: Sequence[bytes], into: Sequence[Buffer]) -> list[BlockStatus]:
        """Fills each writable buffer with the object of its key; it must have the object's size.

        The contents of a buffer whose answer is not OK are undefined. Raises Unavailable when no
        master answers.
        """
        return [_STATUSES[status] for status in self._core.get(joined_keys(keys), into)]

    def lookup(self, keys: Sequence[bytes]) -> list[Location | None]:
        """Where the objects are; None for those that nobody holds.

        Any number of keys, asked for in batches of 32. Raises Unavailable when no master answers.
        """
        rows = self._core.lookup(joined_keys(keys))
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
