"""An RDMA device in use: one port of it, one protection domain, and what is registered there.

Adapter -- regions (pinned memory, until the adapter is closed)
   \\------ connections (queue pairs; each is closed before the adapter is)

The kernel may wait with the removal of a device until nobody has it open, and tell nobody. So a
thread of the adapter looks whether it is still listed, and ends everything when it is not.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from hymcache.config import VerbsConfig
from hymcache.errors import DeviceError, Unavailable
from hymcache.transport.verbs.connection_data import ConnectionData
from hymcache.transport.verbs.library import (
    Access,
    DeviceLimits,
    GidEntry,
    MemoryRegion,
    PortState,
    ProtectionDomain,
    VerbsLibrary,
)
from hymcache.transport.verbs.ports import choose_gid, choose_port, gid_order, survey_ports
from hymcache.transport.verbs.registration import register_chunks

logger = logging.getLogger("hymcache.verbs")

# READs and WRITEs of more connections than this would thrash the context caches of today's NICs.
CONNECTIONS_MAX: Final = 16_384

# How often to look whether the device is still there.
PRESENCE_CHECK_S: Final = 1.0

Progress = Callable[[int, int], None]


class Closable(Protocol):
    """What an adapter ends when its device is removed."""

    def close(self) -> None:
        """From any thread; waits for a batch that is under way."""


class _Registration:
    """Memory that is being registered: its adapter stays up until that has ended."""

    def close(self) -> None:
        """It ends by itself."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of memory that was registered as one region."""

    region: MemoryRegion
    access: Access

    def covers(self, address: int, length: int) -> bool:
        """Whether all of it lies inside."""
        start = self.region.address
        return start <= address and address + length <= start + self.region.length


class Adapter:
    """Thread-safe, but for its connections, each of which is for one thread at a time."""

    def __init__(self, library: VerbsLibrary, config: VerbsConfig) -> None:
        """Raises ConfigError where no port can be used, DeviceError where one cannot be opened."""
        report = choose_port(library, config)
        self.config = config
        self._device = library.open(report.device)
        try:
            self.domain: ProtectionDomain = self._device.open_domain()
        except BaseException:
            self._device.close()
            raise
        self._port_number = report.port.number
        self._lock = threading.Lock()
        self._use = threading.Lock()  # held where the device is used beside connections
        self._chunks: list[Chunk] = []
        self._connections: set[Closable] = set()
        self._closing = False
        self._gone = threading.Event()
        self._ended = threading.Event()
        self._watch = threading.Thread(
            target=self._watch_device, name="hymcache-rdma-watch", daemon=True
        )
        self._watch.start()

    @property
    def limits(self) -> DeviceLimits:
        """Of the device."""
        return self._device.limits

    @property
    def name(self) -> str:
        """Device and port."""
        return f"{self._device.name}/{self._port_number}"

    @property
    def windows(self) -> bool:
        """Whether keys are to be for one block only."""
        return self.config.windows == "auto" and self._device.limits.windows

    def port(self) -> PortState:
        """The port as it is now. Raises DeviceError when the device is gone."""
        with self._use:
            self._check_in_use()
            return self._device.port(self._port_number)

    def _check_in_use(self) -> None:
        if self._ended.is_set():
            raise DeviceError(f"the RDMA device {self.name} is closed", errno.ENODEV)

    def gid_for(self, peer: ConnectionData | None) -> GidEntry:
        """The address to use, for this peer if it is known. Raises DeviceError or Unavailable."""
        with self._use:
            self._check_in_use()
            # Asked each time: addresses of an interface come and go while the device stays.
            rows = self._device.gids(self._port_number)
        known = None if peer is None else (peer.gid_type, peer.gid)
        entry = choose_gid(tuple(sorted(rows, key=gid_order)), self.config, known)
        if entry is None:
            raise Unavailable(
                f"{self.name} has no GID of the kind of the peer's; set verbs.gid_index on both "
                "ends to rows of the same kind"
            )
        return entry

    def register(
        self, address: int, length: int, access: Access, progress: Progress | None = None
    ) -> list[Chunk]:
        """Registers memory until the adapter is closed, huge memory in chunks.

        `progress(done_bytes, all_bytes)` is called after each. Raises DeviceError that names the
        limit to raise, or Unavailable; nothing is registered then.
        """
        registration = _Registration()
        self.adopt(registration)
        try:
            regions = register_chunks(
                self.domain,
                address,
                length,
                access,
                region_bytes_max=self._device.limits.region_bytes_max,
                progress=progress,
            )
            chunks = [Chunk(region, access) for region in regions]
            with self._lock:
                if not self._closing:
                    self._chunks += chunks
                    return chunks
            for chunk in chunks:
                chunk.region.close()
            raise Unavailable("the RDMA device is closed")
        finally:
            self.abandon(registration)

    def chunks(self) -> list[Chunk]:
        """What is registered."""
        with self._lock:
            return list(self._chunks)

    def find(self, address: int, length: int, access: Access) -> Chunk | None:
        """The registered chunk that covers this memory and allows this."""
        with self._lock:
            for chunk in self._chunks:
                if chunk.covers(address, length) and access in chunk.access:
                    return chunk
        return None

    def adopt(self, connection: Closable) -> None:
        """A connection begins. Raises Unavailable when there are too many, or it is closed."""
        with self._lock:
            if self._closing:
                raise Unavailable("the RDMA device is closed")
            if len(self._connections) >= CONNECTIONS_MAX:
                raise Unavailable(f"{self.name} has {CONNECTIONS_MAX} connections already")
            self._connections.add(connection)

    def abandon(self, connection: Closable) -> None:
        """A connection has ended; the last one of a closed adapter takes it down."""
        with self._lock:
            self._connections.discard(connection)
            last = self._closing and not self._connections
        if last:
            self._take_down()

    def close(self) -> None:
        """Ends it, as soon as the last connection has ended: regions outlive posted work."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            idle = not self._connections
        if idle:
            self._take_down()

    @property
    def is_gone(self) -> bool:
        """Whether the device was removed: whatever uses it has to end."""
        return self._gone.is_set()

    def _watch_device(self) -> None:
        while not self._ended.wait(PRESENCE_CHECK_S):
            if self._device.is_present():
                continue
            logger.warning("%s was removed", self.name)
            self._gone.set()
            self.close()
            with self._lock:
                connections = list(self._connections)
            for connection in connections:
                connection.close()
            return

    def _take_down(self) -> None:
        with self._use:
            self._ended.set()
            for chunk in self._chunks:
                chunk.region.close()
            self._chunks.clear()
            self.domain.close()
            self._device.close()


def is_alive(adapter: Adapter) -> bool:
    """False once its device was removed: another one has to be opened."""
    if adapter.is_gone:
        return False
    try:
        adapter.port()
    except DeviceError:
        return False
    return True


def is_up(adapter: Adapter) -> bool:
    """Whether connections can be made over it as it is."""
    try:
        return not adapter.is_gone and adapter.port().active
    except DeviceError:
        return False


def has_successor(adapter: Adapter, library: VerbsLibrary) -> bool:
    """Whether to open a device anew: this one was removed, or its port is down and another is up.

    Takes as long as it takes to open each device.
    """
    if not is_alive(adapter):
        return True
    if is_up(adapter):
        return False
    return bool(survey_ports(library, adapter.config).usable)
