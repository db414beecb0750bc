"""What a master is sent by mistake or in malice ends its connection, and the master lives on."""

from __future__ import annotations

import os
import random

import pytest

from hymcache.descriptor_limit import ensure_descriptors
from tests.master.conftest import StartMaster
from tests.master.raw_peer import (
    AUTHENTICATION,
    BUSY,
    MALFORMED,
    NODE,
    UNEXPECTED,
    VERSION,
    PeerError,
    RawClient,
    RawNode,
    RawPeer,
    make_key,
    wait_until,
)
from tests.transport.wire_encoder import frame, u32


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4,
        bytes(64),
        random.Random(1).randbytes(4096),
        frame("hello", 1, bytes(96))[:-1] + b"\xff",
        frame("lookup", 1, u32(0) + u32(0)),
        frame("hello", 1, bytes(200_000)),
    ],
    ids=["http", "zeros", "random", "damaged payload", "before HELLO", "oversized"],
)
def test_garbage_ends_its_connection_only(start_master: StartMaster, sent: bytes) -> None:
    master = start_master()
    listen = master.endpoints["master.listen"]
    with RawClient(listen) as client:
        with RawPeer(listen, shake_hands=False) as peer:
            peer.socket.sendall(sent)
            assert peer.is_closed()
        assert client.find(make_key(1)) is None
    assert master.stats()["protocol_errors"] == 1


@pytest.mark.parametrize(
    ("name", "payload", "code"),
    [
        ("lookup", u32(33) + u32(0) + bytes(33 * 16), MALFORMED),
        ("lookup", u32(2) + u32(0) + bytes(16), MALFORMED),
        ("lookup", u32(0xFFFFFFFF) + u32(0), MALFORMED),
        ("lookup", b"", MALFORMED),
        ("members", b"?", MALFORMED),
        ("publish", u32(1025) + u32(0), MALFORMED),
        ("register", bytes(288), MALFORMED),
        ("attach", b"", UNEXPECTED),
        ("hello", bytes(96), UNEXPECTED),
    ],
)
def test_a_message_that_cannot_be_is_told_what_is_wrong(
    start_master: StartMaster, name: str, payload: bytes, code: int
) -> None:
    listen = start_master().endpoints["master.listen"]
    with RawNode(listen, "a", 1) as node:
        node.register()
        with pytest.raises(PeerError) as refused:
            node.request(name, payload)
        assert refused.value.code == code
        assert node.is_closed()


@pytest.mark.parametrize("name", ["register", "publish", "withdraw", "synced", "heartbeat"])
def test_a_client_is_no_node(start_master: StartMaster, name: str) -> None:
    listen = start_master().endpoints["master.listen"]
    with RawClient(listen) as client, pytest.raises(PeerError) as refused:
        client.request(name, bytes(288))
    assert refused.value.code == UNEXPECTED


def test_rows_of_another_node_are_refused_altogether(start_master: StartMaster) -> None:
    master = start_master()
    listen = master.endpoints["master.listen"]
    with RawNode(listen, "a", 1) as node:
        node.register()
        node.node = 2
        with pytest.raises(PeerError, match="another node"):
            node.publish([make_key(1)])
    assert master.stats()["rows"] == 0


def test_another_version_is_refused_with_both_named(start_master: StartMaster) -> None:
    listen = start_master().endpoints["master.listen"]
    with pytest.raises(PeerError, match=r"version 2 to 3.*speaks 1") as refused:
        RawPeer(listen, versions=(2, 3))
    assert refused.value.code == VERSION


def test_a_secret_must_be_known(start_master: StartMaster) -> None:
    master = start_master("secret=hunter2")
    listen = master.endpoints["master.listen"]
    with RawNode(listen, "a", 1, secret=b"hunter2") as node:
        node.register()
    with pytest.raises(PeerError, match="secret") as refused:
        RawPeer(listen, role=NODE, secret=b"hunter3")
    assert refused.value.code == AUTHENTICATION
    with RawPeer(listen) as peer, pytest.raises(PeerError) as refused:
        peer.request("lookup", u32(0) + u32(0))
    assert refused.value.code == UNEXPECTED
    assert master.stats()["connections_refused"] == 1


def test_a_thousand_connections(start_master: StartMaster) -> None:
    ensure_descriptors(4096)
    master = start_master("master.connections_max=1000")
    listen = master.endpoints["master.listen"]
    peers = [RawClient(listen) for _ in range(1000)]
    try:
        with pytest.raises(PeerError, match="as many connections as it takes") as refused:
            RawClient(listen)
        assert refused.value.code == BUSY
        assert [peer.find(make_key(1)) for peer in peers] == [None] * 1000
        assert master.stats()["connections"] == 1000
    finally:
        for peer in peers:
            peer.close()
    wait_until(lambda: master.stats()["connections"] == 0, "all have gone")
    with RawClient(listen) as client:
        assert client.node_names() == []


def test_frames_cut_anywhere_are_read_as_one(start_master: StartMaster) -> None:
    listen = start_master().endpoints["master.listen"]
    seed = int.from_bytes(os.urandom(4), "little")
    cuts = random.Random(seed)
    with RawClient(listen) as client:
        payload = u32(3) + u32(0) + bytes(48)
        sent = b"".join(frame("lookup", number, payload) for number in range(1, 21))
        while sent:
            count = cuts.randrange(1, 100)
            client.socket.sendall(sent[:count])
            sent = sent[count:]
        for _ in range(20):
            assert len(client.receive("lookup")) == 16 + 3 * 64, f"seed {seed}"
