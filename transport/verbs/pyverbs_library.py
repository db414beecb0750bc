"""The verbs library over pyverbs, rdma-core's own Python binding.

pyverbs has no type stubs and is an optional dependency, so its modules are looked up when they are
first needed and are Any here. Numbers of the kernel's interface are those of library.py. Objects of
pyverbs close their children; here, too, who made an object closes it after what was made from it.
"""

from __future__ import annotations

import importlib
import ipaddress
import itertools
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from hymcache.errors import ConfigError, DeviceError
from hymcache.transport.verbs.library import (
    Access,
    BindRequest,
    Completion,
    DeviceLimits,
    GidEntry,
    GidType,
    LinkLayer,
    MemoryRegion,
    Mtu,
    PortState,
    ReceiveAttributes,
    SendAttributes,
    WorkRequest,
)

_ENUM = TypeVar("_ENUM", LinkLayer, Mtu)

_PORT_ACTIVE: Final = 4
_PORT_STATES: Final = {1: "down", 2: "initializing", 3: "armed", 4: "active", 5: "active, deferred"}
_WINDOW_FLAGS: Final = 1 << 23 | 1 << 24  # IBV_DEVICE_MEM_WINDOW_TYPE_2A, _2B
_WINDOW_TYPE_2: Final = 2
_RELIABLE_CONNECTION: Final = 2  # IBV_QPT_RC
_OPCODE_BIND: Final = 8
_SEND_FENCED, _SEND_SIGNALLED = 1, 2
_RNR_TIMER: Final = 12  # 0.64 ms; nothing is ever received here, so nobody is ever not ready
_GIDS_MAX: Final = 2000  # an answer of the kernel has 64 KiB at most
_SLEEP_S: Final = 0.0005  # between polls where events cannot be waited for
_SYSFS: Final = Path("/sys/class/infiniband")
_SYSFS_VERBS: Final = Path("/sys/class/infiniband_verbs")
_EVENT_FILE: Final = "anon_inode:[infinibandevent]"


def load_library() -> PyverbsLibrary:
    """Raises ConfigError that says how to install pyverbs where it is missing."""
    try:
        package = importlib.import_module("pyverbs")
        importlib.import_module("pyverbs.device")
    except ImportError as error:
        raise ConfigError(
            f"RDMA needs pyverbs, which cannot be imported ({error}): install Debian's "
            "python3-pyverbs and link it into the environment, or `pip install hymcache[verbs]` "
            "beside rdma-core's headers; docs/rdma.md shows both"
        ) from error
    return PyverbsLibrary(str(Path(str(package.__file__)).parent))


@contextmanager
def _translated(action: str) -> Iterator[None]:
    """Raises what pyverbs raises as DeviceError: `cannot <action>: <reason>`."""
    errors = importlib.import_module("pyverbs.pyverbs_error")
    try:
        yield
    except errors.PyverbsRDMAError as error:
        raise DeviceError(f"cannot {action}: {error}", error.error_code or 0) from error
    except errors.PyverbsError as error:
        raise DeviceError(f"cannot {action}: {error}") from error


def _closed(made: Any) -> None:
    # A device that was unplugged refuses to take anything down; the kernel has done it by itself.
    with suppress(DeviceError), _translated("close it"):
        made.close()


class _Region:
    def __init__(self, made: Any, address: int, length: int) -> None:
        self.made = made
        self.address = address
        self.length = length
        self.local_key: int = made.lkey
        self.remote_key: int = made.rkey

    def close(self) -> None:
        _closed(self.made)


class _Window:
    def __init__(self, made: Any) -> None:
        self.made = made
        self.remote_key: int = made.rkey

    def close(self) -> None:
        with _translated("end a memory window"):
            self.made.close()


class _CompletionQueue:
    def __init__(self, context: Any, depth: int) -> None:
        module = importlib.import_module("pyverbs.cq")
        with _translated("open a completion queue"):
            self._channel, self._descriptor = _open_channel(module, context)
            self.made = module.CQ(context, depth, None, self._channel)
        self._armed = False
        self._poller = select.poll()
        if self._descriptor is not None:
            self._poller.register(self._descriptor, select.POLLIN)

    def poll(self, count_max: int) -> list[Completion]:
        with _translated("poll a completion queue"):
            _count, completions = self.made.poll(count_max)
        return [Completion(one.status, one.vendor_err) for one in completions]

    def wait(self, timeout_s: float) -> None:
        if self._descriptor is None:
            time.sleep(min(timeout_s, _SLEEP_S))
            return
        if not self._armed:
            # What came before this call makes no event: whoever waits looks once more first.
            with _translated("ask for completion events"):
                self.made.req_notify()
            self._armed = True
            return
        if not self._poller.poll(max(0.0, timeout_s) * 1e3):
            return
        self._armed = False
        with _translated("read a completion event"):
            self._channel.get_cq_event(self.made)
            self.made.ack_events(1)

    def close(self) -> None:
        _closed(self.made)
        with _event_files:
            _closed(self._channel)


# Held by whoever opens or closes a file of events, those of devices among them: a channel's is
# known by being the one that is new.
_event_files = threading.Lock()


def _open_channel(module: Any, context: Any) -> tuple[Any, int | None]:
    """A channel of completion events and its descriptor, which pyverbs keeps to itself.

    None for the descriptor when somebody else opened one in the same moment.
    """
    with _event_files:
        before = _event_descriptors()
        channel = module.CompChannel(context)
        new = _event_descriptors() - before
    return channel, new.pop() if len(new) == 1 else None


def _event_descriptors() -> set[int]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if str(entry.readlink()) == _EVENT_FILE:
                found.add(int(entry.name))
    return found


class _QueuePair:
    def __init__(self, domain: Any, queue: _CompletionQueue, depth: int) -> None:
        self._qp = importlib.import_module("pyverbs.qp")
        self._wr = importlib.import_module("pyverbs.wr")
        self._mr = importlib.import_module("pyverbs.mr")
        self._addr = importlib.import_module("pyverbs.addr")
        capabilities = self._qp.QPCap(max_send_wr=depth, max_recv_wr=1)
        attributes = self._qp.QPInitAttr(
            qp_type=_RELIABLE_CONNECTION,
            scq=queue.made,
            rcq=queue.made,
            cap=capabilities,
            sq_sig_all=0,  # by itself pyverbs makes every request complete with a signal
        )
        with _translated("open a queue pair"):
            self.made = self._qp.QP(domain, attributes)
        self.number: int = self.made.qp_num

    def to_init(self, port: int, access: Access) -> None:
        attributes = self._qp.QPAttr(port_num=port)
        attributes.qp_access_flags = int(access)
        with _translated("bring a queue pair into INIT"):
            self.made.to_init(attributes)

    def to_receive(self, attributes: ReceiveAttributes) -> None:
        address = self._addr.AHAttr(
            gr=self._addr.GlobalRoute(
                dgid=self._addr.GID(str(ipaddress.IPv6Address(attributes.peer_gid).exploded)),
                sgid_index=attributes.gid_index,
                hop_limit=attributes.hop_limit,
                traffic_class=attributes.traffic_class,
            ),
            dlid=attributes.peer_lid,
            sl=attributes.service_level,
            is_global=int(attributes.has_global_route),
            port_num=attributes.port,
        )
        asked = self._qp.QPAttr(port_num=attributes.port)
        asked.path_mtu = int(attributes.mtu)
        asked.dest_qp_num = attributes.peer_queue_pair
        asked.rq_psn = attributes.peer_first_packet
        asked.max_dest_rd_atomic = attributes.reads_in
        asked.min_rnr_timer = _RNR_TIMER
        asked.ah_attr = address
        with _translated("bring a queue pair into RTR"):
            self.made.to_rtr(asked)

    def to_send(self, attributes: SendAttributes) -> None:
        asked = self._qp.QPAttr()
        asked.sq_psn = attributes.first_packet
        asked.timeout = attributes.timeout
        asked.retry_cnt = attributes.retry_count
        asked.rnr_retry = attributes.rnr_retry
        asked.max_rd_atomic = attributes.reads_out
        with _translated("bring a queue pair into RTS"):
            self.made.to_rts(asked)

    def to_error(self) -> None:
        with _translated("bring a queue pair into ERR"):
            self.made.modify(self._qp.QPAttr(qp_state=6, cur_qp_state=6), 1)

    def post(self, requests: Sequence[WorkRequest | BindRequest]) -> None:
        chain = [
            self._bind(request) if isinstance(request, BindRequest) else self._move(request)
            for request in requests
        ]
        for request, following in itertools.pairwise(chain):
            request.next_wr = following
        with _translated("post work to a queue pair"):
            self.made.post_send(chain[0])

    def _move(self, request: WorkRequest) -> Any:
        piece = self._wr.SGE(request.local_address, request.length, request.local_key)
        flags = _SEND_SIGNALLED * request.signalled | _SEND_FENCED * request.fenced
        made = self._wr.SendWR(opcode=int(request.opcode), num_sge=1, sg=[piece], send_flags=flags)
        made.set_wr_rdma(request.remote_key, request.remote_address)
        return made

    def _bind(self, request: BindRequest) -> Any:
        window: Any = request.window  # those of this library
        region: Any = request.region
        made = self._wr.SendWR(
            opcode=_OPCODE_BIND, num_sge=0, send_flags=_SEND_SIGNALLED * request.signalled
        )
        made.set_bind_wr(
            window.made,
            self._mr.MWBindInfo(region.made, request.address, request.length, int(request.access)),
        )
        window.remote_key = made.rkey
        return made

    def close(self) -> None:
        _closed(self.made)


class _Domain:
    def __init__(self, context: Any) -> None:
        self._context = context
        with _translated("allocate a protection domain"):
            self.made = importlib.import_module("pyverbs.pd").PD(context)

    def register(self, address: int, length: int, access: Access) -> MemoryRegion:
        module = importlib.import_module("pyverbs.mr")
        with _translated(f"register {length} bytes of memory"):
            return _Region(
                module.MR(self.made, length, int(access), address=address), address, length
            )

    def open_window(self) -> _Window:
        module = importlib.import_module("pyverbs.mr")
        with _translated("allocate a memory window"):
            return _Window(module.MW(self.made, _WINDOW_TYPE_2))

    def open_completion_queue(self, depth: int) -> _CompletionQueue:
        return _CompletionQueue(self._context, depth)

    def open_queue_pair(self, queue: Any, depth: int) -> _QueuePair:
        return _QueuePair(self.made, queue, depth)

    def close(self) -> None:
        _closed(self.made)


def _known(kind: type[_ENUM], value: int, where: str) -> _ENUM:
    try:
        return kind(value)
    except ValueError as error:
        raise DeviceError(f"{where} has a {kind.__name__} that cannot be: {value}") from error


def _listed(name: str) -> Path | None:
    """The kernel's entry of an RDMA device for programs; it goes when the removal begins."""
    for entry in _SYSFS_VERBS.glob("uverbs*"):
        with suppress(OSError):  # another one, that goes just now
            if (entry / "ibdev").read_text().strip() == name:
                return entry
    return None


class _Device:
    def __init__(self, name: str) -> None:
        self.name = name
        with _event_files, _translated(f"open the RDMA device {name}"):
            self._context = importlib.import_module("pyverbs.device").Context(name=name)
        self._listed = _listed(name)
        self._rates: dict[int, int] = {}  # of ports, in bits per second
        with _translated(f"query the RDMA device {name}"):
            found = self._context.query_device()
        self.limits = DeviceLimits(
            ports=found.phys_port_cnt,
            queue_depth_max=found.max_qp_wr,
            completions_max=found.max_cqe,
            reads_out_max=found.max_qp_init_rd_atom,
            reads_in_max=found.max_qp_rd_atom,
            region_bytes_max=found.max_mr_size,
            windows=found.max_mw > 0 and found.device_cap_flags & _WINDOW_FLAGS != 0,
            firmware=str(found.fw_version),
        )

    def is_present(self) -> bool:
        return self._listed is None or self._listed.exists()

    def port(self, number: int) -> PortState:
        with _translated(f"query port {number} of {self.name}"):
            found = self._context.query_port(number)
        return PortState(
            number=number,
            active=found.state == _PORT_ACTIVE,
            state=_PORT_STATES.get(found.state, f"state {found.state}"),
            link_layer=_known(LinkLayer, found.link_layer, f"port {number} of {self.name}"),
            mtu_active=_known(Mtu, found.active_mtu, f"port {number} of {self.name}"),
            mtu_max=_known(Mtu, found.max_mtu, f"port {number} of {self.name}"),
            lid=found.lid,
            message_bytes_max=found.max_msg_sz,
            bits_per_second=self._rate(number),
        )

    def _rate(self, port: int) -> int:
        # As it was first: what connects asks for the port each time, and has no use for this.
        if port not in self._rates:
            self._rates[port] = _rate(self.name, port)
        return self._rates[port]

    def gids(self, port: int) -> list[GidEntry]:
        with _translated(f"query the addresses of {self.name}"):
            rows = self._context.query_gid_table(_GIDS_MAX)
        return [
            GidEntry(
                port=row.port_num,
                index=row.gid_index,
                gid=ipaddress.IPv6Address(row.gid_str()).packed,
                kind=GidType(int(row.gid_type)),
                interface=_interface(row.ndev_ifindex),
            )
            for row in rows
            if row.port_num == port and int(row.gid_type) in set(GidType)
        ]

    def open_domain(self) -> _Domain:
        return _Domain(self._context)

    def close(self) -> None:
        with _event_files:
            _closed(self._context)


class PyverbsLibrary:
    """pyverbs as it was found."""

    def __init__(self, path: str) -> None:
        self.description = f"pyverbs in {path}"

    def device_names(self) -> list[str]:
        """In the kernel's order."""
        with suppress(DeviceError), _translated("list the RDMA devices"):
            devices = importlib.import_module("pyverbs.device").get_device_list()
            return [device.name.decode() for device in devices]
        return []  # the kernel has no InfiniBand at all

    def open(self, name: str) -> _Device:
        """Raises DeviceError."""
        return _Device(name)


def _interface(index: int) -> str:
    try:
        return socket.if_indextoname(index) if index else ""
    except OSError:
        return ""


def _rate(device: str, port: int) -> int:
    """Bits per second of a port; 0 where the kernel only guesses."""
    place = _SYSFS / device / "ports" / str(port)
    with suppress(OSError, ValueError, IndexError):
        rate = float((place / "rate").read_text().split()[0])  # "100 Gb/sec (4X EDR)"
        if (place / "link_layer").read_text().strip() == "Ethernet":
            # Of an interface that does not tell its speed the kernel says it has the lowest.
            interface = (place / "gid_attrs" / "ndevs" / "0").read_text().strip()
            if int(Path("/sys/class/net", interface, "speed").read_text()) <= 0:
                return 0
        return int(rate * 1e9)
    return 0
