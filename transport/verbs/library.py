"""What HyMCache asks of a verbs library, in the terms of the InfiniBand Architecture.

The values of the enums are those of the kernel's interface (include/uapi/rdma/ib_user_verbs.h and
rdma-core's verbs.h), which never change. `pyverbs_library.py` is the implementation over pyverbs.
Whatever the system refuses is raised as DeviceError with its errno.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

PACKET_NUMBER_BITS = 24


class Access(enum.IntFlag):
    """What a registered region, a window or a queue pair lets others do."""

    NONE = 0
    LOCAL_WRITE = 1
    REMOTE_WRITE = 2
    REMOTE_READ = 4
    WINDOW_BIND = 16


class QueuePairState(enum.IntEnum):
    """The states of a queue pair (IBA 1.5, section 10.3.1)."""

    RESET = 0
    INIT = 1
    READY_TO_RECEIVE = 2
    READY_TO_SEND = 3
    ERROR = 6


class Opcode(enum.IntEnum):
    """What a work request does."""

    WRITE = 0
    READ = 4


class LinkLayer(enum.IntEnum):
    """What a port speaks below the transport."""

    UNKNOWN = 0
    INFINIBAND = 1
    ETHERNET = 2


class GidType(enum.IntEnum):
    """How packets that leave by a GID are addressed."""

    INFINIBAND = 0
    ROCE_V1 = 1
    ROCE_V2 = 2


class Mtu(enum.IntEnum):
    """Bytes of payload in a packet."""

    MTU_256 = 1
    MTU_512 = 2
    MTU_1024 = 3
    MTU_2048 = 4
    MTU_4096 = 5

    @property
    def size_bytes(self) -> int:
        """256 to 4096."""
        return 128 << self


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What a device can do at most."""

    ports: int
    queue_depth_max: int
    completions_max: int
    reads_out_max: int  # READs that one queue pair has under way
    reads_in_max: int  # READs of its peer that it answers at once
    region_bytes_max: int
    windows: bool  # memory windows of type 2
    firmware: str


@dataclass(frozen=True, slots=True)
class PortState:
    """One port of a device, as it is now."""

    number: int
    active: bool
    state: str
    link_layer: LinkLayer
    mtu_active: Mtu
    mtu_max: Mtu
    lid: int
    message_bytes_max: int
    bits_per_second: int  # 0: not known


@dataclass(frozen=True, slots=True)
class GidEntry:
    """A row of a port's table of addresses."""

    port: int
    index: int
    gid: bytes  # 16 bytes
    kind: GidType
    interface: str  # the network device it belongs to; "" when there is none


@dataclass(frozen=True, slots=True)
class WorkRequest:
    """One READ or WRITE between registered memory here and there."""

    opcode: Opcode
    local_address: int
    local_key: int
    remote_address: int
    remote_key: int
    length: int
    signalled: bool = False  # a completion is wanted also when all goes well
    fenced: bool = False  # starts after all READs before it have ended


@dataclass(frozen=True, slots=True)
class BindRequest:
    """Opens a window on part of a region: whoever has its key may do what `access` says."""

    window: MemoryWindow
    region: MemoryRegion
    address: int
    length: int
    access: Access
    signalled: bool = False


@dataclass(frozen=True, slots=True)
class Completion:
    """How a work request ended. 0 is success; see completion_status.py."""

    status: int
    vendor_error: int


@dataclass(frozen=True, slots=True)
class ReceiveAttributes:
    """What INIT -> READY_TO_RECEIVE needs to know of the peer and the way to it."""

    mtu: Mtu
    peer_queue_pair: int
    peer_first_packet: int
    reads_in: int
    port: int
    peer_gid: bytes
    peer_lid: int
    has_global_route: bool
    gid_index: int
    hop_limit: int
    traffic_class: int
    service_level: int


@dataclass(frozen=True, slots=True)
class SendAttributes:
    """What READY_TO_RECEIVE -> READY_TO_SEND needs to know."""

    first_packet: int
    timeout: int
    retry_count: int
    rnr_retry: int
    reads_out: int


class MemoryRegion(Protocol):
    """Registered memory: pinned, and known to the device until it is closed."""

    @property
    def address(self) -> int:
        """Where it starts, here and for the peer."""

    @property
    def length(self) -> int:
        """Its bytes."""

    @property
    def local_key(self) -> int:
        """For work requests of this process."""

    @property
    def remote_key(self) -> int:
        """For those of a peer, as far as the access that it was registered with goes."""

    def close(self) -> None:
        """Ends the registration. May be called again."""


class MemoryWindow(Protocol):
    """A key of its own on part of a region, for the peer of one queue pair."""

    @property
    def remote_key(self) -> int:
        """What the peer needs, once it is bound; another one after every bind."""

    def close(self) -> None:
        """The key is worth nothing when this returns. May be called again.

        Raises DeviceError when the device refuses.
        """


class CompletionQueue(Protocol):
    """Where a queue pair tells how its work ended. For one thread at a time."""

    def poll(self, count_max: int) -> list[Completion]:
        """What has ended since, at most so many."""

    def wait(self, timeout_s: float) -> None:
        """Returns when there may be something to poll, or the time is over. Releases the GIL."""

    def close(self) -> None:
        """After the queue pairs that use it. May be called again."""


class QueuePair(Protocol):
    """A reliable connection. The states are driven by its owner."""

    @property
    def number(self) -> int:
        """24 bits that name it on this device."""

    def to_init(self, port: int, access: Access) -> None:
        """RESET -> INIT."""

    def to_receive(self, attributes: ReceiveAttributes) -> None:
        """INIT -> READY_TO_RECEIVE."""

    def to_send(self, attributes: SendAttributes) -> None:
        """READY_TO_RECEIVE -> READY_TO_SEND."""

    def to_error(self) -> None:
        """Any state -> ERROR: what is posted ends, with an error."""

    def post(self, requests: Sequence[WorkRequest | BindRequest]) -> None:
        """Starts them, in order. Memory and keys must stay until they have ended."""

    def close(self) -> None:
        """When it returns the device touches no memory for it any more. May be called again."""


class ProtectionDomain(Protocol):
    """Regions, windows and queue pairs that may work together."""

    def register(self, address: int, length: int, access: Access) -> MemoryRegion:
        """Pins memory of this process and makes it known to the device."""

    def open_window(self) -> MemoryWindow:
        """A window of type 2, not bound yet."""

    def open_completion_queue(self, depth: int) -> CompletionQueue:
        """For at most `depth` completions that nobody has polled."""

    def open_queue_pair(self, queue: CompletionQueue, depth: int) -> QueuePair:
        """In RESET; at most `depth` work requests of it may be under way."""

    def close(self) -> None:
        """After everything that was made from it. May be called again."""


class Device(Protocol):
    """An open device."""

    @property
    def name(self) -> str:
        """As the kernel calls it, e.g. "mlx5_0"."""

    @property
    def limits(self) -> DeviceLimits:
        """As it said when it was opened."""

    def is_present(self) -> bool:
        """Whether the kernel still lists it; False while its removal waits for us to close it."""

    def port(self, number: int) -> PortState:
        """Its state now. Ports count from 1."""

    def gids(self, port: int) -> list[GidEntry]:
        """The port's addresses that are set."""

    def open_domain(self) -> ProtectionDomain:
        """A new one."""

    def close(self) -> None:
        """After everything that was made from it. May be called again."""


class VerbsLibrary(Protocol):
    """The way in."""

    @property
    def description(self) -> str:
        """Which library, from where."""

    def device_names(self) -> list[str]:
        """The devices of this machine; none is not an error."""

    def open(self, name: str) -> Device:
        """Raises DeviceError where there is no such device, or it cannot be opened."""
