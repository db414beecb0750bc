"""Nodes come, fall silent, restart and quarrel over a name; masters restart."""

from __future__ import annotations

import time

import pytest

from hymcache.config_source import load_config
from hymcache.errors import ConfigError, Unavailable
from hymcache.master import MasterService
from tests.master.conftest import StartMaster
from tests.master.raw_peer import (
    CONFLICT,
    UNREGISTERED,
    FoundEntry,
    PeerError,
    RawClient,
    RawNode,
    make_key,
    wait_until,
)


def test_what_nodes_publish_is_found_until_withdrawn(start_master: StartMaster) -> None:
    listen = start_master().endpoints["master.listen"]
    with RawNode(listen, "a", 1) as node, RawClient(listen) as client:
        epoch = node.register()
        assert node.publish([make_key(i) for i in range(40)], generation=5) == 40
        found = client.lookup([make_key(i) for i in range(30, 50)])
        assert found == [FoundEntry(1, 5, epoch)] * 10 + [None] * 10
        assert node.withdraw(make_key(30), generation=4) == 0
        assert node.withdraw(make_key(30), generation=5) == 1
        assert client.find(make_key(30)) is None
        assert client.node_names() == ["a"]


def test_a_node_lives_as_long_as_its_lease_is_renewed(start_master: StartMaster) -> None:
    master = start_master("master.lease_ms=300")
    listen = master.endpoints["master.listen"]
    with RawNode(listen, "a", 1) as node, RawClient(listen) as client:
        node.register()
        node.publish([make_key(1)])
        for _ in range(6):
            time.sleep(0.1)
            node.heartbeat()
        assert client.find(make_key(1)) is not None
        wait_until(lambda: client.find(make_key(1)) is None, "the lease lapses")
        assert client.node_names() == []
        with pytest.raises(PeerError) as refused:
            node.heartbeat()
        assert refused.value.code == UNREGISTERED
    wait_until(lambda: master.stats()["rows"] == 0, "its rows are reclaimed")
    assert master.stats()["leases_lapsed"] == 1


def test_a_node_that_connects_anew_loses_nothing_but_what_it_gave_up(
    start_master: StartMaster,
) -> None:
    master = start_master()
    listen = master.endpoints["master.listen"]
    with RawClient(listen) as client:
        with RawNode(listen, "a", 1) as node:
            node.register()
            node.publish([make_key(1), make_key(2)])
            node.synced()
        assert client.find(make_key(1)) is not None
        with RawNode(listen, "a", 1) as node:
            node.register()
            node.publish([make_key(2)])
            assert client.find(make_key(1)) is not None
            node.synced()
            assert client.find(make_key(1)) is None
            assert client.find(make_key(2)) is not None
    wait_until(lambda: master.stats()["rows"] == 1, "the other row is reclaimed")


def test_a_node_that_restarts_starts_from_nothing(start_master: StartMaster) -> None:
    listen = start_master().endpoints["master.listen"]
    with RawClient(listen) as client:
        with RawNode(listen, "a", 1, incarnation=1) as node:
            node.register()
            node.publish([make_key(1)])
        # The end of the first connection and a REGISTER come in no certain order.
        wait_until(lambda: _registers(listen, incarnation=2), "the name is free")
        assert client.find(make_key(1)) is None


def _registers(listen: str, incarnation: int) -> bool:
    with RawNode(listen, "a", 1, incarnation=incarnation) as node:
        try:
            node.register()
        except PeerError as error:
            if error.code != CONFLICT:
                raise
            return False
        return True


def test_a_key_that_two_nodes_hold_is_found_while_one_is_alive(start_master: StartMaster) -> None:
    listen = start_master("master.lease_ms=300").endpoints["master.listen"]
    with (
        RawClient(listen) as client,
        RawNode(listen, "a", 1) as first,
        RawNode(listen, "b", 2) as second,
    ):
        for node in (first, second):
            node.register()
            node.publish([make_key(1)], generation=node.node)

        def found_on_second_alone() -> bool:
            second.heartbeat()
            return client.node_names() == ["b"]

        wait_until(found_on_second_alone, "the first is lost")
        found = client.find(make_key(1))
        assert found is not None
        assert found.node == 2


def test_two_live_nodes_of_one_name_are_told_what_to_do(start_master: StartMaster) -> None:
    listen = start_master().endpoints["master.listen"]
    with RawNode(listen, "a", 1) as first, RawNode(listen, "a", 1, incarnation=2) as second:
        first.register()
        with pytest.raises(PeerError, match=r"node\.name") as refused:
            second.register()
        assert refused.value.code == CONFLICT
        assert "another live node has the name a" in refused.value.message
        assert not first.heartbeat()


def test_a_master_that_restarts_is_filled_anew() -> None:
    settings = ["master.listen=127.0.0.1:0", "master.grpc=", "master.http="]
    with MasterService(load_config(environ={}, settings=settings)) as master:
        listen = master.endpoints["master.listen"]
        with RawNode(listen, "a", 1) as node:
            node.register()
            node.publish([make_key(1)])
            master.stop()
            assert node.is_closed()
    settings[0] = f"master.listen={listen}"
    with (
        MasterService(load_config(environ={}, settings=settings)),
        RawClient(listen) as client,
        RawNode(listen, "a", 1) as node,
    ):
        assert client.find(make_key(1)) is None
        node.register()
        node.publish([make_key(1)])
        node.synced()
        assert client.find(make_key(1)) is not None


def test_a_service_starts_and_stops_more_than_once() -> None:
    config = load_config(
        environ={}, settings=["master.listen=127.0.0.1:0", "master.grpc=127.0.0.1:0"]
    )
    config = config.model_copy(update={"master": config.master.model_copy(update={"http": None})})
    master = MasterService(config)
    with pytest.raises(Unavailable, match="not running"):
        master.stats()
    for _ in range(2):
        master.start()
        assert set(master.endpoints) == {"master.listen", "master.grpc"}
        assert master.stats()["rows"] == 0
        master.stop()
        master.stop()


@pytest.mark.parametrize("key", ["master.listen", "master.grpc", "master.http"])
def test_an_address_in_use_is_told_by_its_key(start_master: StartMaster, key: str) -> None:
    ports = ("master.grpc=127.0.0.1:0", "master.http=127.0.0.1:0")
    taken = start_master(*ports).endpoints[key]
    with pytest.raises(ConfigError, match=taken):
        start_master(*ports, f"{key}={taken}")
