"""The node's side: it registers its memory and lets each peer at what was granted to it.

The C++ node calls it from its event loop (transport/csrc/verbs_python.h); one call may take as long
as the device needs to make a queue pair, or to bind a batch of windows.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from hymcache.config import VerbsConfig
from hymcache.errors import DeviceError, HymcacheError, Unavailable
from hymcache.transport.verbs.adapter import Adapter, has_successor, is_alive, is_up
from hymcache.transport.verbs.connection import Connection
from hymcache.transport.verbs.connection_data import ConnectionData
from hymcache.transport.verbs.library import Access, MemoryRegion, VerbsLibrary
from hymcache.transport.verbs.registration import ProgressLog

logger = logging.getLogger("hymcache.verbs")

# A session's window is 128 MiB, so this many are in use only where blocks are tiny.
WINDOWS_PER_PEER_MAX: Final = 4096
# A local operation of microseconds; all peers of the node wait for it.
_BIND_TIMEOUT_S: Final = 0.1
_WIRE_READ, _WIRE_WRITE = 1, 2

Region = tuple[int, int, int, int]
"""Offset in the node's memory, bytes, remote key (0: none), access: bit 0 READ, bit 1 WRITE."""


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """Where the node's memory lies; from `read_write_offset` on clients may write."""

    base: int
    size_bytes: int
    read_write_offset: int


class Acceptor:
    """One for a node. All calls but `close` come from the node's event loop."""

    def __init__(
        self,
        library: Callable[[], VerbsLibrary],
        config: VerbsConfig,
        mode: Literal["auto", "on"],
    ) -> None:
        """Nothing is opened yet."""
        self._library = library
        self._config = config
        self._required = mode == "on"
        self._lock = threading.Lock()  # guards the adapter, which comes back in another thread
        self._adapter: Adapter | None = None
        self._memory = NodeMemory(0, 0, 0)
        self._peers: dict[int, Connection] = {}
        self._reopening: threading.Thread | None = None
        self._closed = False

    def prepare(self, base: int, size_bytes: int, read_write_offset: int) -> bool:
        """Registers the node's memory. False: this node does without RDMA, and has said why.

        Raises ConfigError, DeviceError or Unavailable where the configuration insists on RDMA.
        """
        self._memory = NodeMemory(base, size_bytes, read_write_offset)
        try:
            self._adapter = self._open_adapter(self._library(), self._memory)
        except HymcacheError as error:
            if self._required:
                raise type(error)(f'node.verbs = "on": {error}') from error
            logger.warning("no RDMA on this node: %s", error)
            return False
        logger.info(
            "RDMA on %s, keys for %s",
            self._adapter.name,
            "one block each (memory windows)" if self._adapter.windows else "the whole memory",
        )
        return True

    def accept(self, peer: int, endpoint: bytes) -> tuple[bytes, bool, list[Region]]:
        """A connection for a peer, in place of the one that it had.

        Returns the node's end, whether keys come with each block, and the node's regions. Raises
        Unavailable where the peer has to do without.
        """
        self.drop(peer)
        data = ConnectionData.unpack(endpoint)
        adapter = self._current_adapter()
        try:
            connection = Connection(adapter, Access.REMOTE_READ | Access.REMOTE_WRITE, data)
            connection.connect(data)
        except HymcacheError:
            if not is_up(adapter):
                self._reopen(adapter)
            raise
        self._peers[peer] = connection
        return connection.data.pack(), adapter.windows, self._regions(adapter)

    def bind(self, peer: int, ranges: Sequence[tuple[int, int]], writable: bool) -> list[int]:
        """A key for each (offset, length); 0 for those that must go another way."""
        memory = self._memory
        known = self._peers.get(peer)
        if known is None:
            return [0] * len(ranges)
        access = Access.REMOTE_WRITE if writable else Access.REMOTE_READ
        room = WINDOWS_PER_PEER_MAX - known.windows
        wanted: list[tuple[MemoryRegion, int, int]] = []
        places: list[int] = []  # of those in `ranges`
        for place, (offset, length) in enumerate(ranges):
            chunk = known.adapter.find(memory.base + offset, length, Access.WINDOW_BIND)
            if chunk is not None and len(wanted) < room:
                wanted.append((chunk.region, memory.base + offset, length))
                places.append(place)
        keys = [0] * len(ranges)
        try:
            bound = known.bind(wanted, access, _BIND_TIMEOUT_S) if wanted else []
        except HymcacheError as error:
            logger.warning("no RDMA for one client any more: %s", error)
            self.drop(peer)
            return keys
        for place, key in zip(places, bound, strict=True):
            keys[place] = key
        return keys

    def unbind(self, peer: int, keys: Sequence[int]) -> bool:
        """None of the keys is good for anything when it returns.

        False: the device would not end one of them, so that the peer's connection had to go.
        """
        known = self._peers.get(peer)
        if known is None:  # they went with its connection
            return True
        try:
            known.unbind(keys)
        except DeviceError as error:
            logger.warning("no RDMA for one client any more: %s", error)
            self.drop(peer)
            return False
        return True

    def drop(self, peer: int) -> None:
        """Ends a peer's connection and windows; it cannot reach the memory any more."""
        known = self._peers.pop(peer, None)
        if known is not None:
            known.close()

    def close(self) -> None:
        """Ends all connections, then the registration of the memory. Idempotent."""
        with self._lock:
            self._closed = True
            reopening = self._reopening
        if reopening is not None:
            reopening.join()
        for peer in list(self._peers):
            self.drop(peer)
        if self._adapter is not None:
            self._adapter.close()
            self._adapter = None

    def _current_adapter(self) -> Adapter:
        with self._lock:
            adapter = self._adapter
        if adapter is None:
            self._reopen(None)
            raise Unavailable("the node's RDMA device is not there at the moment")
        return adapter

    def _open_adapter(self, library: VerbsLibrary, memory: NodeMemory) -> Adapter:
        adapter = Adapter(library, self._config)
        told = ProgressLog()
        split = memory.read_write_offset
        try:
            if adapter.windows:
                only_bind = Access.LOCAL_WRITE | Access.WINDOW_BIND
                adapter.register(memory.base, memory.size_bytes, only_bind, told)
            else:
                adapter.register(memory.base, split, Access.REMOTE_READ, told)
                both = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE
                adapter.register(memory.base + split, memory.size_bytes - split, both, told)
        except BaseException:
            adapter.close()
            raise
        return adapter

    def _regions(self, adapter: Adapter) -> list[Region]:
        rows = []
        for chunk in adapter.chunks():
            allowed = _WIRE_READ * (Access.REMOTE_READ in chunk.access)
            allowed |= _WIRE_WRITE * (Access.REMOTE_WRITE in chunk.access)
            key = chunk.region.remote_key if allowed else 0
            offset = chunk.region.address - self._memory.base
            rows.append((offset, chunk.region.length, key, allowed))
        return rows

    def _reopen(self, old: Adapter | None) -> None:
        """Opens a device again, in a thread: registering the memory takes its time."""
        if old is not None and not is_alive(old):
            for peer in list(self._peers):
                self.drop(peer)
        with self._lock:
            busy = self._reopening is not None and self._reopening.is_alive()
            if self._closed or busy:
                return
            self._reopening = threading.Thread(
                target=self._open_again, args=(old,), name="hymcache-rdma", daemon=True
            )
            self._reopening.start()

    def _open_again(self, old: Adapter | None) -> None:
        try:
            library = self._library()
            if old is not None:
                if not has_successor(old, library):
                    return  # its port is down, and the only one
                with self._lock:
                    if self._adapter is old:
                        self._adapter = None
                old.close()
            adapter = self._open_adapter(library, self._memory)
        except HymcacheError as error:
            logger.warning("the RDMA device is not back: %s", error)
            return
        with self._lock:
            if not self._closed:
                self._adapter = adapter
                logger.warning("RDMA on %s is back", adapter.name)
                return
        adapter.close()
