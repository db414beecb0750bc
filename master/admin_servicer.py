"""The gRPC service hymcache.v1.Admin, on top of a running master. The schema is admin.proto."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Final, Never

import grpc

from hymcache.errors import ConfigError, Unavailable
from hymcache.master import admin_pb2, admin_pb2_grpc
from hymcache.version import __version__

if TYPE_CHECKING:
    from hymcache._core import FoundRow, MasterServer, MemberInfo

# Each watcher keeps a thread of the server busy.
WATCHERS_MAX: Final = 16
# A watcher that has gone is noticed within this time.
_WATCH_POLL_S: Final = 0.5

_STATES: Final = {
    "alive": admin_pb2.NODE_STATE_ALIVE,
    "draining": admin_pb2.NODE_STATE_DRAINING,
    "lost": admin_pb2.NODE_STATE_LOST,
}
_Event = admin_pb2.WatchNodesResponse


class AdminServicer(admin_pb2_grpc.AdminServicer):
    """Answers from what the master knows; holds no state but the number of watchers."""

    def __init__(self, master: MasterServer, lease_ms: int, start_time: datetime) -> None:
        self._master = master
        self._lease_ms = lease_ms
        self._start_time = start_time
        self._watchers = threading.BoundedSemaphore(WATCHERS_MAX)

    def GetStatus(
        self, request: admin_pb2.GetStatusRequest, context: grpc.ServicerContext
    ) -> admin_pb2.GetStatusResponse:
        """The master itself."""
        with _errors_told(context):
            stats = self._master.stats()
            status = admin_pb2.GetStatusResponse(
                version=__version__,
                incarnation=self._master.incarnation(),
                endpoints=self._master.endpoints(),
                nodes_alive=stats["nodes_alive"],
                nodes_lost=stats["nodes_lost"],
                objects_listed=stats["rows"] - stats["rows_hidden"],
                index_rows=stats["rows"],
                index_rows_max=stats["rows_max"],
                index_bytes=stats["index_bytes"],
                connections=stats["connections"],
                lookups=stats["lookups"],
                lookup_keys=stats["lookup_keys"],
                lookup_hits=stats["lookup_hits"],
                protocol_errors=stats["protocol_errors"],
            )
        status.start_time.FromDatetime(self._start_time)
        status.lease.FromMilliseconds(self._lease_ms)
        return status

    def ListNodes(
        self, request: admin_pb2.ListNodesRequest, context: grpc.ServicerContext
    ) -> admin_pb2.ListNodesResponse:
        """All nodes, by name."""
        with _errors_told(context):
            nodes = [_node(member) for member in self._master.members()]
        return admin_pb2.ListNodesResponse(nodes=nodes)

    def GetNode(
        self, request: admin_pb2.GetNodeRequest, context: grpc.ServicerContext
    ) -> admin_pb2.GetNodeResponse:
        """One node."""
        return admin_pb2.GetNodeResponse(node=_node(self._find(request.name, context)))

    def WatchNodes(
        self, request: admin_pb2.WatchNodesRequest, context: grpc.ServicerContext
    ) -> Iterator[_Event]:
        """What nodes there are, then what changes."""
        if not self._watchers.acquire(blocking=False):
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"there are {WATCHERS_MAX} watchers already"
            )
        if not context.add_callback(self._watchers.release):
            self._watchers.release()  # the call is over before it began
            return
        yield from self._watch(context)

    def DrainNode(
        self, request: admin_pb2.DrainNodeRequest, context: grpc.ServicerContext
    ) -> admin_pb2.DrainNodeResponse:
        """The node takes no more writes."""
        return admin_pb2.DrainNodeResponse(node=self._drain(request.name, True, context))

    def UndrainNode(
        self, request: admin_pb2.UndrainNodeRequest, context: grpc.ServicerContext
    ) -> admin_pb2.UndrainNodeResponse:
        """The node takes writes again."""
        return admin_pb2.UndrainNodeResponse(node=self._drain(request.name, False, context))

    def ForgetNode(
        self, request: admin_pb2.ForgetNodeRequest, context: grpc.ServicerContext
    ) -> admin_pb2.ForgetNodeResponse:
        """Takes a lost node off the list."""
        member = self._find(request.name, context)
        with _errors_told(context, wrong=grpc.StatusCode.FAILED_PRECONDITION):
            if not self._master.forget(member["node"]):
                _abort_unknown(request.name, context)
        return admin_pb2.ForgetNodeResponse()

    def Lookup(
        self, request: admin_pb2.LookupRequest, context: grpc.ServicerContext
    ) -> admin_pb2.LookupResponse:
        """All rows of some keys."""
        with _errors_told(context):
            rows_of_keys = self._master.lookup(request.keys)
        found = [
            admin_pb2.LookupResponse.Found(key=key, rows=[_row(row) for row in rows])
            for key, rows in zip(request.keys, rows_of_keys, strict=True)
        ]
        return admin_pb2.LookupResponse(found=found)

    def _watch(self, context: grpc.ServicerContext) -> Iterator[_Event]:
        known: dict[int, MemberInfo] = {}
        known_version = 0
        while context.is_active():
            with _errors_told(context):
                version = self._master.wait_members(known_version, _WATCH_POLL_S)
                if version == known_version:
                    continue
                # May be newer than `version`: then the next round finds no difference.
                present = {member["node"]: member for member in self._master.members()}
            yield from _differences(known, present)
            if known_version == 0:
                yield _Event(kind=_Event.KIND_CURRENT)
            known, known_version = present, version

    def _drain(self, name: str, draining: bool, context: grpc.ServicerContext) -> admin_pb2.Node:
        member = self._find(name, context)
        with _errors_told(context):
            if not self._master.drain(member["node"], draining):
                _abort_unknown(name, context)
        return _node(self._find(name, context))

    def _find(self, name: str, context: grpc.ServicerContext) -> MemberInfo:
        with _errors_told(context):
            named = [member for member in self._master.members() if member["name"] == name]
        if not named:
            _abort_unknown(name, context)
        return named[0]


@contextmanager
def _errors_told(
    context: grpc.ServicerContext, wrong: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT
) -> Iterator[None]:
    try:
        yield
    except Unavailable as error:
        context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
    except ConfigError as error:
        context.abort(wrong, str(error))


def _abort_unknown(name: str, context: grpc.ServicerContext) -> Never:
    context.abort(grpc.StatusCode.NOT_FOUND, f"there is no node {name!r}; see ListNodes")


def _differences(known: dict[int, MemberInfo], present: dict[int, MemberInfo]) -> Iterator[_Event]:
    for node_id, member in known.items():
        if node_id not in present:
            yield _Event(kind=_Event.KIND_REMOVED, node=_node(member))
    for node_id, member in present.items():
        before = known.get(node_id)
        if before is None:
            yield _Event(kind=_Event.KIND_ADDED, node=_node(member))
        elif _lasting(before) != _lasting(member):
            yield _Event(kind=_Event.KIND_CHANGED, node=_node(member))


def _lasting(member: MemberInfo) -> tuple[object, ...]:
    """What does not change by itself as time goes by."""
    return (
        member["name"],
        member["state"],
        member["draining"],
        member["incarnation"],
        member["tcp"],
        member["unix_path"],
    )


def _node(member: MemberInfo) -> admin_pb2.Node:
    node = admin_pb2.Node(
        name=member["name"],
        id=member["node"],
        state=_STATES[member["state"]],
        draining=member["draining"],
        connected=member["connected"],
        incarnation=member["incarnation"],
        tcp_endpoint=member["tcp"],
        unix_path=member["unix_path"],
        host_id=member["host"],
        capacity_bytes=member["capacity_bytes"],
        used_bytes=member["used_bytes"],
        objects=member["objects"],
        sessions=member["sessions"],
        objects_listed=member["rows"],
    )
    node.state_age.FromMilliseconds(member["state_age_ms"])
    node.lease_left.FromMilliseconds(member["lease_left_ms"])
    return node


def _row(row: FoundRow) -> admin_pb2.LookupResponse.Row:
    return admin_pb2.LookupResponse.Row(
        node_name=row["node_name"],
        shown=row["shown"],
        address=row["address"],
        length_bytes=row["length"],
        generation=row["generation"],
        namespace_fingerprint=row["name_space"],
        crc32c=row["crc32c"],
    )
