"""Verbs without a device: it checks what kernel and NIC would, and moves bytes by memmove.

A `Fabric` is a network of devices. Work runs as soon as it is posted, unless the fabric is held.
Whatever would corrupt memory on real hardware is recorded in `Fabric.violations`.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hymcache.errors import DeviceError
from hymcache.transport.verbs.library import (
    Access,
    BindRequest,
    Completion,
    CompletionQueue,
    DeviceLimits,
    GidEntry,
    GidType,
    LinkLayer,
    Mtu,
    Opcode,
    PortState,
    QueuePairState,
    ReceiveAttributes,
    SendAttributes,
    WorkRequest,
)

SUCCESS, LENGTH, PROTECTION, FLUSHED, BIND = 0, 1, 4, 5, 6
REMOTE_INVALID, REMOTE_ACCESS, RETRIES = 9, 10, 12

LIMITS = DeviceLimits(
    ports=1,
    queue_depth_max=1024,
    completions_max=4096,
    reads_out_max=16,
    reads_in_max=16,
    region_bytes_max=1 << 40,
    windows=True,
    firmware="fake 1.0",
)


PORT = PortState(
    number=1,
    active=True,
    state="active",
    link_layer=LinkLayer.ETHERNET,
    mtu_active=Mtu.MTU_1024,
    mtu_max=Mtu.MTU_4096,
    lid=0,
    message_bytes_max=1 << 20,
    bits_per_second=100_000_000_000,
)


def ipv4_gid(text: str) -> bytes:
    return bytes(10) + b"\xff\xff" + bytes(int(part) for part in text.split("."))


@dataclass
class Card:
    """A device of the fabric as it is plugged in."""

    name: str
    gids: list[GidEntry]
    limits: DeviceLimits = LIMITS
    port: PortState = PORT
    lock_bytes_max: int = 1 << 40
    locked_bytes: int = 0
    life: int = 0  # counts how often it was plugged in
    listed: bool = True  # False while its removal waits for those who have it open


class Fabric:
    """Devices that reach each other, and what went wrong between them."""

    def __init__(self) -> None:
        self.cards: dict[str, Card] = {}
        self.pairs: dict[int, FakeQueuePair] = {}
        self.keys: dict[int, FakeRegion | FakeWindow] = {}
        self.open_objects: dict[str, int] = {}
        self.violations: list[str] = []
        self.held: deque[tuple[FakeQueuePair, WorkRequest]] | None = None
        self.fail_next: int | None = None  # status that the next request of data ends with
        self.batches = 0  # calls of post()
        self.signalled = 0
        self._numbers = itertools.count(0x11)
        self._keys = itertools.count(0x1000, 0x101)
        self.lock = threading.RLock()

    def plug(self, name: str, address: str = "10.0.0.1", **changes: object) -> Card:
        gids = [
            GidEntry(
                1, 0, bytes.fromhex("fe80000000000000025056fffea00001"), GidType.ROCE_V2, "e0"
            ),
            GidEntry(1, 1, ipv4_gid(address), GidType.ROCE_V2, "e0"),
        ]
        card = replace(Card(name, gids), **changes)  # type: ignore[arg-type]
        before = self.cards.get(name)
        card.life = 0 if before is None else before.life + 1
        self.cards[name] = card
        return card

    def unplug(self, name: str) -> None:
        with self.lock:
            card = self.cards.pop(name)
            self.cards[f"{name} (gone)"] = card
            card.life += 1
            for pair in list(self.pairs.values()):
                if pair.device.card is card:
                    pair.state = QueuePairState.ERROR
                    del self.pairs[pair.number]

    def withdraw(self, name: str) -> None:
        """Begins to remove it; it works on for those who have it open."""
        self.cards[name].listed = False

    def set_link(self, name: str, *, up: bool) -> None:
        card = self.cards[name]
        card.port = replace(card.port, active=up, state="active" if up else "down")

    def next_number(self) -> int:
        return next(self._numbers)

    def next_key(self) -> int:
        return next(self._keys)

    def hold(self) -> None:
        self.held = deque()

    def let_go(self) -> None:
        with self.lock:
            waiting, self.held = self.held or deque(), None
            for pair, request in waiting:
                pair.carry_out(request)

    def opened(self, kind: str) -> None:
        self.open_objects[kind] = self.open_objects.get(kind, 0) + 1

    def closed(self, kind: str) -> None:
        self.open_objects[kind] -= 1

    @property
    def leaks(self) -> dict[str, int]:
        return {kind: count for kind, count in self.open_objects.items() if count}


@dataclass
class FakeLibrary:
    """One machine's view: the cards that are named."""

    fabric: Fabric
    names: list[str]
    description: str = "fake"

    def device_names(self) -> list[str]:
        cards = self.fabric.cards
        return [name for name in self.names if name in cards and cards[name].listed]

    def open(self, name: str) -> FakeDevice:
        if name not in self.device_names():
            raise DeviceError(f"cannot open the RDMA device {name}", errno.ENODEV)
        return FakeDevice(self.fabric, self.fabric.cards[name])


class _Closable:
    kind = ""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.is_open = True
        self.children = 0
        fabric.opened(self.kind)

    def close(self) -> None:
        with self.fabric.lock:
            if not self.is_open:
                return
            if self.children:
                self.fabric.violations.append(f"a {self.kind} was closed before what it made")
                raise DeviceError(f"cannot close a {self.kind}", errno.EBUSY)
            self.is_open = False
            self.fabric.closed(self.kind)
            self._on_close()

    def _on_close(self) -> None:
        pass


class FakeDevice(_Closable):
    kind = "device"

    def __init__(self, fabric: Fabric, card: Card) -> None:
        super().__init__(fabric)
        self.card = card
        self.life = card.life
        self.name = card.name
        self.limits = card.limits

    def check(self) -> None:
        if not self.is_open or self.card.life != self.life:
            raise DeviceError(f"the device {self.name} is gone", errno.EIO)

    @property
    def is_gone(self) -> bool:
        return self.card.life != self.life

    def is_present(self) -> bool:
        return self.card.listed and not self.is_gone

    def port(self, number: int) -> PortState:
        self.check()
        assert number == 1
        return self.card.port

    def gids(self, port: int) -> list[GidEntry]:
        self.check()
        return [entry for entry in self.card.gids if entry.port == port]

    def open_domain(self) -> FakeDomain:
        self.check()
        return FakeDomain(self)


class FakeDomain(_Closable):
    kind = "domain"

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(device.fabric)
        self.device = device
        device.children += 1

    def register(self, address: int, length: int, access: Access) -> FakeRegion:
        self.device.check()
        card = self.device.card
        if length <= 0 or length > card.limits.region_bytes_max:
            raise DeviceError(f"cannot register {length} bytes of memory", errno.EINVAL)
        if Access.REMOTE_WRITE in access and Access.LOCAL_WRITE not in access:
            raise DeviceError("cannot register memory for writing by others only", errno.EINVAL)
        if card.locked_bytes + length > card.lock_bytes_max:
            raise DeviceError(f"cannot register {length} bytes of memory", errno.ENOMEM)
        return FakeRegion(self, address, length, access)

    def open_window(self) -> FakeWindow:
        self.device.check()
        if not self.device.limits.windows:
            raise DeviceError("cannot allocate a memory window", errno.EOPNOTSUPP)
        return FakeWindow(self)

    def open_completion_queue(self, depth: int) -> FakeCompletionQueue:
        self.device.check()
        return FakeCompletionQueue(self.device, depth)

    def open_queue_pair(self, queue: CompletionQueue, depth: int) -> FakeQueuePair:
        self.device.check()
        assert isinstance(queue, FakeCompletionQueue)
        return FakeQueuePair(self, queue, depth)

    def _on_close(self) -> None:
        self.device.children -= 1


class FakeRegion(_Closable):
    kind = "region"

    def __init__(self, domain: FakeDomain, address: int, length: int, access: Access) -> None:
        super().__init__(domain.fabric)
        self.domain = domain
        self.address = address
        self.length = length
        self.access = access
        self.local_key = self.remote_key = self.fabric.next_key()
        self.fabric.keys[self.local_key] = self
        domain.device.card.locked_bytes += length
        domain.children += 1

    def covers(self, address: int, length: int) -> bool:
        return self.address <= address and address + length <= self.address + self.length

    def allows(self, pair: FakeQueuePair, address: int, length: int, access: Access) -> bool:
        return pair.domain is self.domain and self.covers(address, length) and access in self.access

    def _on_close(self) -> None:
        del self.fabric.keys[self.local_key]
        self.domain.device.card.locked_bytes -= self.length
        self.domain.children -= 1
        if self.fabric.held and any(r.local_key == self.local_key for _p, r in self.fabric.held):
            self.fabric.violations.append("a region was deregistered under posted work")


class FakeWindow(_Closable):
    kind = "window"

    def __init__(self, domain: FakeDomain) -> None:
        super().__init__(domain.fabric)
        self.domain = domain
        self.remote_key = self.fabric.next_key()
        self.bound: tuple[FakeQueuePair, BindRequest] | None = None
        domain.children += 1

    def bind(self, pair: FakeQueuePair, request: BindRequest) -> bool:
        region = request.region
        assert isinstance(region, FakeRegion)
        good = (
            self.is_open
            and self.bound is None
            and region.is_open
            and request.length > 0
            and region.covers(request.address, request.length)
            and Access.WINDOW_BIND in region.access
            and (Access.REMOTE_WRITE not in request.access or Access.LOCAL_WRITE in region.access)
        )
        if good:
            self.bound = (pair, request)
            pair.children += 1
            self.remote_key += 1
            self.fabric.keys[self.remote_key] = self
        return good

    def allows(self, pair: FakeQueuePair, address: int, length: int, access: Access) -> bool:
        if self.bound is None or self.bound[0] is not pair or access not in self.bound[1].access:
            return False
        start, size = self.bound[1].address, self.bound[1].length
        return start <= address and address + length <= start + size

    def _on_close(self) -> None:
        self.fabric.keys.pop(self.remote_key, None)
        self.domain.children -= 1
        if self.bound is not None:
            self.bound[0].children -= 1


class FakeCompletionQueue(_Closable):
    kind = "completion queue"

    def __init__(self, device: FakeDevice, depth: int) -> None:
        super().__init__(device.fabric)
        self.device = device
        self.depth = depth
        self.done: deque[Completion] = deque()
        self.armed = False
        self.changed = threading.Condition()
        self.waits = 0
        device.children += 1

    def push(self, completion: Completion) -> None:
        with self.changed:
            if len(self.done) >= self.depth:
                self.fabric.violations.append("a completion queue overflowed")
            self.done.append(completion)
            self.changed.notify_all()

    def poll(self, count_max: int) -> list[Completion]:
        with self.changed:
            return [self.done.popleft() for _ in range(min(count_max, len(self.done)))]

    def wait(self, timeout_s: float) -> None:
        self.device.check()
        self.waits += 1
        if not self.armed:
            self.armed = True
            return
        with self.changed:
            self.armed = not self.changed.wait_for(lambda: bool(self.done), timeout_s)

    def _on_close(self) -> None:
        self.device.children -= 1


@dataclass
class _Progress:
    """What a queue pair knows of its peer."""

    receive: ReceiveAttributes | None = None
    send: SendAttributes | None = None
    posted: int = 0
    flushed: list[WorkRequest] = field(default_factory=list)


class FakeQueuePair(_Closable):
    kind = "queue pair"

    def __init__(self, domain: FakeDomain, queue: FakeCompletionQueue, depth: int) -> None:
        super().__init__(domain.fabric)
        if depth > domain.device.limits.queue_depth_max:
            raise DeviceError("cannot open a queue pair", errno.EINVAL)
        self.domain = domain
        self.device = domain.device
        self.queue = queue
        self.depth = depth
        self.number = self.fabric.next_number()
        self.state = QueuePairState.RESET
        self.access = Access.NONE
        self.progress = _Progress()
        self.fabric.pairs[self.number] = self
        domain.children += 1
        queue.children += 1

    def to_init(self, port: int, access: Access) -> None:
        self._step(QueuePairState.RESET, QueuePairState.INIT, port == 1)
        self.access = access

    def to_receive(self, attributes: ReceiveAttributes) -> None:
        card = self.device.card
        row = [entry for entry in card.gids if entry.index == attributes.gid_index]
        good = (
            attributes.mtu <= card.port.mtu_active
            and 1 <= attributes.reads_in <= card.limits.reads_in_max
            and len(attributes.peer_gid) == 16
            and (bool(row) or not attributes.has_global_route)
        )
        self._step(QueuePairState.INIT, QueuePairState.READY_TO_RECEIVE, good)
        self.progress.receive = attributes

    def to_send(self, attributes: SendAttributes) -> None:
        good = 1 <= attributes.reads_out <= self.device.limits.reads_out_max
        self._step(QueuePairState.READY_TO_RECEIVE, QueuePairState.READY_TO_SEND, good)
        self.progress.send = attributes

    def _step(self, before: QueuePairState, after: QueuePairState, good: bool) -> None:
        self.device.check()
        if self.state is not before or not good:
            raise DeviceError(f"cannot bring a queue pair into {after.name}", errno.EINVAL)
        self.state = after

    def to_error(self) -> None:
        self.device.check()
        self.state = QueuePairState.ERROR

    def post(self, requests: Sequence[WorkRequest | BindRequest]) -> None:
        self.device.check()
        if self.state not in (QueuePairState.READY_TO_SEND, QueuePairState.ERROR):
            raise DeviceError("cannot post work to a queue pair", errno.EINVAL)
        with self.fabric.lock:
            self.fabric.batches += 1
            self.fabric.signalled += sum(request.signalled for request in requests)
            for request in requests:
                if self.progress.posted >= self.depth:
                    raise DeviceError("cannot post work to a queue pair", errno.ENOMEM)
                self.progress.posted += 1
                if isinstance(request, BindRequest):
                    self._bind(request)
                elif self.fabric.held is not None:
                    self.fabric.held.append((self, request))
                else:
                    self.carry_out(request)

    def _bind(self, request: BindRequest) -> None:
        assert isinstance(request.window, FakeWindow)
        if self.state is QueuePairState.ERROR:
            self._complete(FLUSHED, signalled=request.signalled)
        elif request.window.bind(self, request):
            self._complete(SUCCESS, signalled=request.signalled)
        else:
            self._complete(BIND, signalled=request.signalled)

    def carry_out(self, request: WorkRequest) -> None:
        if not self.is_open:
            return
        status = FLUSHED if self.state is QueuePairState.ERROR else self._status_of(request)
        if status == SUCCESS:
            pair = (request.local_address, request.remote_address)
            to, source = pair if request.opcode is Opcode.READ else pair[::-1]
            ctypes.memmove(to, source, request.length)
        self._complete(status, signalled=request.signalled)

    def _complete(self, status: int, *, signalled: bool) -> None:
        if status != SUCCESS:
            self.state = QueuePairState.ERROR
            self.progress.posted -= 1
            self.queue.push(Completion(status, 0))
        elif signalled:
            self.progress.posted = 0  # with it, all before it
            self.queue.push(Completion(SUCCESS, 0))

    def _status_of(self, request: WorkRequest) -> int:
        fabric = self.fabric
        if fabric.fail_next is not None:
            status, fabric.fail_next = fabric.fail_next, None
            return status
        if request.length > self.device.card.port.message_bytes_max:
            return LENGTH
        needed = Access.LOCAL_WRITE if request.opcode is Opcode.READ else Access.NONE
        local = fabric.keys.get(request.local_key)
        if not isinstance(local, FakeRegion) or not local.allows(
            self, request.local_address, request.length, needed
        ):
            return PROTECTION
        peer = self._peer()
        return RETRIES if peer is None else self._status_at(peer, request)

    def _status_at(self, peer: FakeQueuePair, request: WorkRequest) -> int:
        reading = request.opcode is Opcode.READ
        assert self.progress.send is not None
        assert peer.progress.receive is not None
        if reading and self.progress.send.reads_out > peer.progress.receive.reads_in:
            return REMOTE_INVALID
        wanted = Access.REMOTE_READ if reading else Access.REMOTE_WRITE
        remote = self.fabric.keys.get(request.remote_key)
        if (
            wanted in peer.access
            and remote is not None
            and remote.allows(peer, request.remote_address, request.length, wanted)
        ):
            return SUCCESS
        peer.state = QueuePairState.ERROR
        return REMOTE_ACCESS

    def _peer(self) -> FakeQueuePair | None:
        """The other end, if packets reach it and it knows this one."""
        me, send = self.progress.receive, self.progress.send
        if me is None or send is None or not self.device.card.port.active:
            return None
        peer = self.fabric.pairs.get(me.peer_queue_pair)
        if peer is None or peer.progress.receive is None or not peer.device.card.port.active:
            return None
        theirs = peer.progress.receive
        matched = (
            peer.state in (QueuePairState.READY_TO_RECEIVE, QueuePairState.READY_TO_SEND)
            and theirs.peer_queue_pair == self.number
            and theirs.peer_first_packet == send.first_packet
            and any(entry.gid == me.peer_gid for entry in peer.device.card.gids)
            and theirs.mtu == me.mtu
        )
        return peer if matched else None

    def _on_close(self) -> None:
        self.fabric.pairs.pop(self.number, None)
        self.domain.children -= 1
        self.queue.children -= 1
        if self.fabric.held:
            self.fabric.held = deque(one for one in self.fabric.held if one[0] is not self)
