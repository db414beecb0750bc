"""The client's side: it reads and writes the memory of nodes, and lets nobody into its own.

The C++ client calls it (transport/csrc/verbs_python.h): once to open a link, once for each batch.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from hymcache.config import VerbsConfig
from hymcache.errors import ConfigError, HymcacheError, Unavailable
from hymcache.transport.verbs.adapter import Adapter, has_successor, is_up
from hymcache.transport.verbs.connection import Connection
from hymcache.transport.verbs.connection_data import ConnectionData
from hymcache.transport.verbs.library import Access, Opcode, VerbsLibrary, WorkRequest
from hymcache.transport.verbs.registration import ProgressLog

logger = logging.getLogger("hymcache.verbs")

# Enough to import pyverbs and open a device; who has to wait longer takes another way.
OPEN_WAIT_S: Final = 0.5
# A thread that the end of the interpreter has stopped never ends.
CLOSE_WAIT_S: Final = 10.0

# local address, local key, remote address, remote key, bytes, fenced
Piece = tuple[int, int, int, int, int, bool]


class Link:
    """A connection to one node, and the memory that belongs to it. For one thread at a time."""

    def __init__(self, adapter: Adapter) -> None:
        """Raises DeviceError or Unavailable."""
        self._adapter = adapter
        self._connection = Connection(adapter, Access.NONE)
        self._own: list[mmap.mmap] = []

    @property
    def endpoint(self) -> bytes:
        """What the node needs to know: LinkEndpoint of the wire protocol."""
        return self._connection.data.pack()

    def connect(self, endpoint: bytes) -> None:
        """Connects to the node's end. Raises ProtocolError, DeviceError or Unavailable."""
        self._connection.connect(ConnectionData.unpack(endpoint))

    def regions(self) -> list[tuple[int, int, int]]:
        """(address, bytes, local key) of the memory that was registered with the initiator."""
        return [
            (chunk.region.address, chunk.region.length, chunk.region.local_key)
            for chunk in self._adapter.chunks()
        ]

    def allocate(self, size_bytes: int) -> tuple[int, int]:
        """(address, local key) of new registered memory that lives as long as the link."""
        memory = mmap.mmap(-1, size_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._own.append(memory)
        return address, self._connection.register(address, size_bytes).local_key

    def transfer(self, opcode: int, pieces: Sequence[Piece], timeout_s: float) -> None:
        """One batch; returns when all of it is done. Raises Unavailable, and is closed then."""
        self._connection.run(
            list(work_requests(Opcode(opcode), pieces, self._connection.message_bytes_max)),
            timeout_s,
        )

    def close(self) -> None:
        """Ends the connection, then the registration of the link's memory. Idempotent."""
        self._connection.close()
        self._own.clear()


def work_requests(
    opcode: Opcode, pieces: Sequence[Piece], message_bytes_max: int
) -> Iterator[WorkRequest]:
    """The pieces as work requests, cut where a port takes no longer messages."""
    for local, local_key, remote, remote_key, length, fenced in pieces:
        for offset in range(0, length, message_bytes_max):
            yield WorkRequest(
                opcode,
                local + offset,
                local_key,
                remote + offset,
                remote_key,
                min(message_bytes_max, length - offset),
                fenced=fenced and offset == 0,
            )


class Initiator:
    """Opens links, over an adapter that is opened when it is first needed. Thread-safe."""

    def __init__(
        self,
        library: Callable[[], VerbsLibrary],
        config: VerbsConfig,
        *,
        required: bool = True,
    ) -> None:
        """Nothing is opened yet. Unless RDMA is required, `register` does without a device."""
        self._library = library
        self._config = config
        self._required = required
        # Held while the device is opened or memory is registered: for seconds, so never by `open`.
        self._changing = threading.Lock()
        self._memory: list[tuple[int, int]] = []
        self._lock = threading.Lock()  # guards what follows
        self._adapter: Adapter | None = None
        self._opening: threading.Thread | None = None
        self._problem = ""
        self._closed = False

    @property
    def bounce_bytes(self) -> int:
        """Registered memory that a link may have for memory that is not."""
        return self._config.bounce

    def check(self) -> None:
        """Opens the device. Raises ConfigError or DeviceError where there is none to use."""
        with self._changing:
            self._ready_adapter()

    def open(self) -> Link:
        """A link that is not connected. Raises DeviceError or Unavailable.

        A device that is not open yet, or not any more, is opened in a thread, and all memory
        registered; this waits for at most OPEN_WAIT_S, and is to be tried again later.
        """
        adapter = self._adapter_in_use()
        if adapter is None:
            self._start_opening().join(OPEN_WAIT_S)
            adapter = self._adapter_in_use()
        if adapter is None:
            raise Unavailable(self._problem or "the RDMA device is still being opened")
        return Link(adapter)

    def register(self, address: int, length: int) -> None:
        """Memory for blocks, which must stay until the initiator is closed.

        Registered now and, should its device come back after it was gone, again. Raises
        DeviceError that names the limit to raise, and ConfigError where RDMA is required and there
        is no device to use; where it is not required, one that comes later will do.
        """
        with self._changing:
            try:
                adapter = self._ready_adapter()
            except ConfigError as error:
                if self._required:
                    raise
                logger.warning("memory is not registered for RDMA: %s", error)
            else:
                adapter.register(address, length, Access.LOCAL_WRITE, self._progress())
            self._memory.append((address, length))

    def tell_fallbacks(self, calls: int, reason: str) -> None:
        """Says that RDMA was not used; the core calls it once a minute at most."""
        logger.warning(
            "%d calls went over TCP instead of RDMA, the last because: %s", calls, reason
        )

    def close(self) -> None:
        """No more links; what there are keep the device until they end. Idempotent."""
        with self._lock:
            self._closed = True
            adapter, self._adapter = self._adapter, None
            opening = self._opening
        if opening is not None:
            opening.join(CLOSE_WAIT_S)  # it gives up after the chunk of memory that it is at
        if adapter is not None:
            adapter.close()

    def _adapter_in_use(self) -> Adapter | None:
        with self._lock:
            self._check_open()
            adapter = self._adapter
        return adapter if adapter is not None and is_up(adapter) else None

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the client is closed")

    def _start_opening(self) -> threading.Thread:
        with self._lock:
            self._check_open()
            if self._opening is None or not self._opening.is_alive():
                self._problem = ""
                self._opening = threading.Thread(
                    target=self._open_adapter, name="hymcache-rdma", daemon=True
                )
                self._opening.start()
            return self._opening

    def _open_adapter(self) -> None:
        try:
            with self._changing:
                adapter = self._ready_adapter()
            if not is_up(adapter):
                self._problem = f"{adapter.name}: the port is down, and no other can be used"
        except HymcacheError as error:
            self._problem = str(error)

    def _ready_adapter(self) -> Adapter:
        """With `_changing` held: the adapter in use, or another one if that is better."""
        with self._lock:
            self._check_open()
            adapter = self._adapter
        library = self._library()
        if adapter is not None:
            if not has_successor(adapter, library):
                return adapter
            with self._lock:
                self._adapter = None
            adapter.close()
        adapter = Adapter(library, self._config)
        try:
            for address, length in self._memory:
                adapter.register(address, length, Access.LOCAL_WRITE, self._progress())
            with self._lock:
                self._check_open()
                self._adapter = adapter
        except BaseException:
            adapter.close()
            raise
        return adapter

    def _progress(self) -> Callable[[int, int], None]:
        log = ProgressLog()

        def told(done_bytes: int, all_bytes: int) -> None:
            log(done_bytes, all_bytes)
            with self._lock:
                self._check_open()

        return told
