"""Administration by gRPC: what it tells, what it changes, and whom it lets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import hymcache
from hymcache.errors import ConfigError, Unavailable
from hymcache.master import AdminClient, MasterService, admin_pb2, admin_token
from hymcache.master.admin_servicer import WATCHERS_MAX
from tests.master.conftest import StartMaster
from tests.master.raw_peer import RawNode, make_key, wait_until

SERVICE = "hymcache.v1.Admin"
GRPC = "master.grpc=127.0.0.1:0"
KINDS = admin_pb2.WatchNodesResponse


@pytest.fixture
def master(start_master: StartMaster) -> MasterService:
    return start_master(GRPC, "master.lease_ms=400")


@pytest.fixture
def admin(master: MasterService) -> Iterator[AdminClient]:
    with AdminClient(master.endpoints["master.grpc"]) as client:
        yield client


@pytest.fixture
def node(master: MasterService) -> Iterator[RawNode]:
    with RawNode(master.endpoints["master.listen"], "a", 1) as node:
        node.register()
        yield node


def test_status(master: MasterService, admin: AdminClient, node: RawNode) -> None:
    node.publish([make_key(1), make_key(2)])
    status = admin.status()
    assert status.version == hymcache.__version__
    assert list(status.endpoints) == [master.endpoints["master.listen"]]
    assert status.lease.ToMilliseconds() == 400
    assert (status.nodes_alive, status.nodes_lost) == (1, 0)
    assert (status.objects_listed, status.index_rows) == (2, 2)
    assert status.start_time.seconds > 0
    assert status.incarnation > 0


def test_a_node_is_shown_as_it_says_it_is(admin: AdminClient, node: RawNode) -> None:
    node.publish([make_key(1)])
    node.heartbeat(objects=1, used_bytes=4096)
    (listed,) = admin.nodes()
    assert (listed.name, listed.id) == ("a", 1)
    assert listed.state == admin_pb2.NODE_STATE_ALIVE
    assert (listed.connected, listed.draining) == (True, False)
    assert (listed.objects, listed.objects_listed) == (1, 1)
    assert (listed.used_bytes, listed.capacity_bytes) == (4096, 1 << 40)
    assert listed.tcp_endpoint == "127.0.0.1:7410"
    assert 0 < listed.lease_left.ToMilliseconds() <= 400
    assert admin.node("a").incarnation == listed.incarnation == 1
    with pytest.raises(ConfigError, match="no node 'b'"):
        admin.node("b")


def test_a_drained_node_is_told_so_until_undrained(admin: AdminClient, node: RawNode) -> None:
    assert not node.heartbeat()
    assert admin.drain("a").state == admin_pb2.NODE_STATE_DRAINING
    assert node.heartbeat()
    node.register()  # a new connection changes nothing about it
    assert node.heartbeat()
    assert admin.undrain("a").state == admin_pb2.NODE_STATE_ALIVE
    assert not node.heartbeat()
    with pytest.raises(ConfigError, match="no node 'b'"):
        admin.drain("b")


def test_only_a_lost_node_can_be_forgotten(admin: AdminClient, node: RawNode) -> None:
    with pytest.raises(ConfigError, match="is alive"):
        admin.forget("a")
    node.close()
    wait_until(lambda: admin.node("a").state == admin_pb2.NODE_STATE_LOST, "it is lost")
    admin.forget("a")
    assert admin.nodes() == []
    with pytest.raises(ConfigError, match="no node 'a'"):
        admin.forget("a")


def test_lookup_shows_hidden_rows_too(admin: AdminClient, node: RawNode) -> None:
    node.publish([make_key(1)], generation=5)
    first, second = admin.lookup([make_key(1), make_key(2)]).found
    (row,) = first.rows
    assert (row.node_name, row.generation, row.shown) == ("a", 5, True)
    assert (row.length_bytes, row.namespace_fingerprint) == (4096, 7)
    assert not row.HasField("crc32c")
    assert list(second.rows) == []
    with pytest.raises(ConfigError, match="16 bytes"):
        admin.lookup([b"short"])
    with pytest.raises(ConfigError, match="at most 32"):
        admin.lookup([make_key(1)] * 33)


def test_watchers_see_each_change(admin: AdminClient, node: RawNode) -> None:
    events = admin.watch()
    first, current = next(events), next(events)
    assert (first.kind, first.node.name) == (KINDS.KIND_ADDED, "a")
    assert current.kind == KINDS.KIND_CURRENT
    node.heartbeat(used_bytes=1)
    admin.drain("a")
    changed = next(events)
    assert (changed.kind, changed.node.draining) == (KINDS.KIND_CHANGED, True)
    node.close()
    lost = next(events)
    assert (lost.kind, lost.node.state) == (KINDS.KIND_CHANGED, admin_pb2.NODE_STATE_LOST)
    admin.forget("a")
    removed = next(events)
    assert (removed.kind, removed.node.name) == (KINDS.KIND_REMOVED, "a")
    events.close()


def test_watchers_are_limited_and_leave_room_for_calls(admin: AdminClient) -> None:
    watchers = [admin.watch() for _ in range(WATCHERS_MAX)]
    assert [next(events).kind for events in watchers] == [KINDS.KIND_CURRENT] * WATCHERS_MAX
    with pytest.raises(ConfigError, match="watchers already"):
        next(admin.watch())
    assert admin.nodes() == []
    for events in watchers:
        events.close()

    def is_let_in() -> bool:
        events = admin.watch()
        try:
            return next(events).kind == KINDS.KIND_CURRENT
        except ConfigError:
            return False
        finally:
            events.close()

    wait_until(is_let_in, "the others have left")


def test_a_watcher_learns_that_the_master_stops(master: MasterService, admin: AdminClient) -> None:
    events = admin.watch()
    next(events)
    stopping = threading.Thread(target=master.stop)
    stopping.start()
    with pytest.raises(Unavailable):
        next(events)
    stopping.join()
    with pytest.raises(Unavailable):
        admin.status()


def test_health(master: MasterService) -> None:
    with grpc.insecure_channel(master.endpoints["master.grpc"]) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its types lack the methods
        for service in ("", SERVICE):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError):
            stub.Check(health_pb2.HealthCheckRequest(service="other"), timeout=5)
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=5)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        master.stop()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_reflection_tells_the_schema(master: MasterService) -> None:
    with grpc.insecure_channel(master.endpoints["master.grpc"]) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
        ]
        services, file = stub.ServerReflectionInfo(iter(requests), timeout=5)
    names = {service.name for service in services.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names
    (raw,) = file.file_descriptor_response.file_descriptor_proto[:1]
    assert descriptor_pb2.FileDescriptorProto.FromString(raw).package == "hymcache.v1"


def test_with_a_secret_calls_need_the_token(start_master: StartMaster) -> None:
    address = start_master(GRPC, "secret=hunter2").endpoints["master.grpc"]
    with AdminClient(address, secret=b"hunter2") as client:
        assert client.nodes() == []
        assert next(client.watch()).kind == KINDS.KIND_CURRENT
    for wrong in (b"", b"hunter3"):
        with AdminClient(address, secret=wrong) as client:
            with pytest.raises(ConfigError, match="has a secret"):
                client.status()
            with pytest.raises(ConfigError, match="has a secret"):
                next(client.watch())
    # Probes carry no metadata.
    with grpc.insecure_channel(address) as channel:
        probe: Any = health_pb2_grpc.HealthStub(channel)
        probe.Check(health_pb2.HealthCheckRequest(), timeout=5)


def test_the_token_is_the_one_in_the_documentation() -> None:
    # printf hymcache.v1.Admin | openssl dgst -sha256 -hmac hunter2
    assert admin_token(b"hunter2") == (
        "ae021a05bbe9ac8f3470a5e196747c7bae58a99e317b0505fc19f8d84e8f6cb2"
    )


def test_a_master_that_is_not_there_is_unavailable() -> None:
    with AdminClient("127.0.0.1:1", timeout_s=0.5) as client, pytest.raises(Unavailable):
        client.status()
