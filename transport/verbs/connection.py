"""A queue pair from its birth to its end, and batches of work on it.

    open --------> connect(peer) --------> run(batch)* ------> close
    (INIT)         (RTR, then RTS)             \\--- any failure --^

The work of a connection that failed is ended at once: when `run` raises, the device touches no
memory for it any more, so that the caller may use its buffers for something else. The windows that
were bound by it end first: a device may wait with the end of a queue pair for theirs.

A batch is for one thread at a time; another one may end the connection meanwhile (`close`).
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from hymcache.errors import DeviceError, HymcacheError, Unavailable
from hymcache.transport.verbs import completion_status
from hymcache.transport.verbs.adapter import PRESENCE_CHECK_S, Adapter
from hymcache.transport.verbs.connection_data import ConnectionData
from hymcache.transport.verbs.library import (
    PACKET_NUMBER_BITS,
    Access,
    BindRequest,
    Completion,
    LinkLayer,
    MemoryRegion,
    MemoryWindow,
    Mtu,
    ReceiveAttributes,
    SendAttributes,
    WorkRequest,
)
from hymcache.transport.verbs.registration import register_region

_HOP_LIMIT: Final = 64
_REQUEST = TypeVar("_REQUEST", bound=WorkRequest | BindRequest)

Clock = Callable[[], float]


class Connection:
    """One reliable connection."""

    def __init__(
        self, adapter: Adapter, access: Access, peer: ConnectionData | None = None
    ) -> None:
        """A queue pair in INIT. `access` is what the peer may do, `peer` what is known of it.

        Raises DeviceError or Unavailable.
        """
        self._adapter = adapter
        self._config = adapter.config
        self._lock = threading.RLock()
        self._open = True
        self._adopted = False
        self._windows: dict[int, MemoryWindow] = {}  # by key
        self._binding: list[MemoryWindow] = []
        self._to_error: Callable[[], None] | None = None
        self._closers: list[Callable[[], None]] = []
        with self._lock:  # whoever ends it waits until it is whole
            adapter.adopt(self)
            self._adopted = True
            try:
                self._make(access, peer)
            except BaseException:
                self.close()
                raise

    def _make(self, access: Access, peer: ConnectionData | None) -> None:
        adapter = self._adapter
        limits = adapter.limits
        port = adapter.port()
        if not port.active:
            raise Unavailable(f"{adapter.name}: the port is {port.state}")
        self._gid = adapter.gid_for(peer)
        self._depth = min(self._config.queue_depth, limits.queue_depth_max)
        # Each request may complete, with an error, whether it is signalled or not.
        depth = min(self._depth + 1, limits.completions_max)
        self._queue = adapter.domain.open_completion_queue(depth)
        self._closers.append(self._queue.close)
        self._pair = adapter.domain.open_queue_pair(self._queue, self._depth)
        self._to_error = self._pair.to_error
        self._closers.append(self._pair.close)
        self._pair.to_init(port.number, access)
        self.message_bytes_max = port.message_bytes_max
        self.data = ConnectionData(
            gid=self._gid.gid,
            queue_pair=self._pair.number,
            first_packet=secrets.randbits(PACKET_NUMBER_BITS),
            lid=port.lid,
            link_layer=port.link_layer,
            gid_type=self._gid.kind,
            mtu=_mtu(port.mtu_active, self._config.mtu),
            reads_out=min(self._config.max_rd_atomic, limits.reads_out_max, 255),
            reads_in=min(self._config.max_rd_atomic, limits.reads_in_max, 255),
        )

    @property
    def adapter(self) -> Adapter:
        """What it was made over; the one in use may be another by now."""
        return self._adapter

    @property
    def depth(self) -> int:
        """Requests that may be under way at once."""
        return self._depth

    def connect(self, peer: ConnectionData) -> None:
        """Ready to serve, and to send. Raises DeviceError or Unavailable; it is closed then."""
        try:
            with self._lock:
                self._check_open()
                self._connect(peer)
        except BaseException:
            self.close()
            raise

    def _check_open(self) -> None:
        if not self._open:
            raise Unavailable("the RDMA connection is closed")

    def _connect(self, peer: ConnectionData) -> None:
        self._check_peer(peer)
        self._pair.to_receive(
            ReceiveAttributes(
                mtu=min(self.data.mtu, peer.mtu),
                peer_queue_pair=peer.queue_pair,
                peer_first_packet=peer.first_packet,
                reads_in=max(1, min(self.data.reads_in, peer.reads_out)),
                port=self._gid.port,
                peer_gid=peer.gid,
                peer_lid=peer.lid,
                has_global_route=self._has_global_route(peer),
                gid_index=self._gid.index,
                hop_limit=_HOP_LIMIT,
                traffic_class=self._config.traffic_class,
                service_level=self._config.service_level,
            )
        )
        self._pair.to_send(
            SendAttributes(
                first_packet=self.data.first_packet,
                timeout=self._config.timeout,
                retry_count=self._config.retry_count,
                rnr_retry=self._config.rnr_retry,
                reads_out=max(1, min(self.data.reads_out, peer.reads_in)),
            )
        )

    def _has_global_route(self, peer: ConnectionData) -> bool:
        """Whether packets to the peer carry a global route header: in RoCE always."""
        if peer.link_layer is LinkLayer.ETHERNET:
            return True
        return self._gid.gid[:8] != peer.gid[:8]  # in another InfiniBand subnet

    def _check_peer(self, peer: ConnectionData) -> None:
        mine = self.data
        if (peer.link_layer, peer.gid_type) == (mine.link_layer, mine.gid_type):
            return
        raise Unavailable(
            f"{self._adapter.name} speaks {mine.link_layer.name} with {mine.gid_type.name} "
            f"addresses, the peer {peer.link_layer.name} with {peer.gid_type.name}: "
            "choose ports of one fabric on both ends (verbs.device, verbs.gid_index)"
        )

    def run(
        self,
        requests: Sequence[WorkRequest] | Sequence[BindRequest],
        timeout_s: float,
        clock: Clock = time.monotonic,
    ) -> None:
        """Does all of them, in order, and returns when the last one has ended.

        As many are posted at once as the queue takes, with one completion for the lot. Raises
        Unavailable when one fails or the time is over; its work is ended then.
        """
        limit = clock() + timeout_s
        with self._lock:
            self._check_open()
            try:
                for lot in _lots(requests, self._depth):
                    self._pair.post(lot)
                    self._await_last(limit, timeout_s, clock)
            except HymcacheError as error:
                self.halt()
                raise Unavailable(f"RDMA over {self._adapter.name}: {error}") from error
            except BaseException:
                self.halt()
                raise

    @property
    def windows(self) -> int:
        """How many are bound."""
        return len(self._windows)

    def bind(
        self, ranges: Sequence[tuple[MemoryRegion, int, int]], access: Access, timeout_s: float
    ) -> list[int]:
        """A key for each (region, address, bytes), good for the peer alone.

        The windows end with the connection at the latest. Raises DeviceError or Unavailable.
        """
        with self._lock:
            self._check_open()
            opened: list[MemoryWindow] = []
            self._binding = opened
            try:
                requests = []
                for region, address, length in ranges:
                    opened.append(self._adapter.domain.open_window())
                    requests.append(BindRequest(opened[-1], region, address, length, access))
                self.run(requests, timeout_s)
            except BaseException:
                self.halt()
                raise
            self._windows.update({window.remote_key: window for window in opened})
            self._binding = []
            return [window.remote_key for window in opened]

    def unbind(self, keys: Sequence[int]) -> None:
        """None of the keys is good for anything when it returns.

        Raises DeviceError when the device would not end one; the connection is ended then.
        """
        with self._lock:
            try:
                for key in keys:
                    if key in self._windows:
                        self._windows[key].close()
                        del self._windows[key]
            except DeviceError:
                self.halt()
                raise

    def register(self, address: int, length: int) -> MemoryRegion:
        """Memory for the connection's own work, registered until its end.

        Raises DeviceError or Unavailable.
        """
        with self._lock:
            self._check_open()
            region = register_region(self._adapter.domain, address, length, Access.LOCAL_WRITE)
            self._closers.insert(0, region.close)  # the last to go
            return region

    def _close_windows(self) -> None:
        for window in (*self._windows.values(), *self._binding):
            with suppress(DeviceError):  # it is good for nothing without the queue pair
                window.close()
        self._windows.clear()
        self._binding = []

    def _await_last(self, limit: float, timeout_s: float, clock: Clock) -> None:
        spin_until = clock() + self._config.spin_us * 1e-6
        while True:
            for completion in self._queue.poll(self._depth):
                _check(completion)
                return  # only the last of a lot completes when all goes well
            if self._adapter.is_gone:
                raise Unavailable("the device was removed")
            now = clock()
            if now >= limit:
                raise Unavailable(f"a batch was not done within {timeout_s:.3g} s")
            if now >= spin_until:
                self._queue.wait(min(limit - now, PRESENCE_CHECK_S))

    def halt(self) -> None:
        """Ends the work: no memory is touched for it any more, here or by the peer. Idempotent."""
        with self._lock:
            self._open = False
            if self._to_error is not None:
                with suppress(DeviceError):  # its device is gone: nothing is under way any more
                    self._to_error()
                self._to_error = None
            self._close_windows()
            while self._closers:
                self._closers.pop()()

    def close(self) -> None:
        """Ends the work, and lets go of the adapter. Idempotent."""
        with self._lock:
            self.halt()
            adopted, self._adopted = self._adopted, False
        if adopted:
            self._adapter.abandon(self)


def _mtu(active: Mtu, wanted_bytes: int) -> Mtu:
    if wanted_bytes == 0:
        return active
    return min(active, Mtu((wanted_bytes // 128).bit_length() - 1))


def _check(completion: Completion) -> None:
    if completion.status != completion_status.SUCCESS:
        raise Unavailable(completion_status.describe(completion.status, completion.vendor_error))


def _lots(requests: Sequence[_REQUEST], depth: int) -> Iterator[list[_REQUEST]]:
    for start in range(0, len(requests), depth):
        lot = list(requests[start : start + depth])
        lot[-1] = dataclasses.replace(lot[-1], signalled=True)
        yield lot
