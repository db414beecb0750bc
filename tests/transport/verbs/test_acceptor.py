"""The node's side alone: what peers may reach, for how long, and what is left when they go."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator

import numpy as np
import pytest

from hymcache.config import VerbsConfig
from hymcache.errors import ConfigError, DeviceError, ProtocolError, Unavailable
from hymcache.transport.verbs import Acceptor, Initiator, Link, adapter
from hymcache.transport.verbs.acceptor import WINDOWS_PER_PEER_MAX
from hymcache.transport.verbs.connection_data import ConnectionData
from hymcache.transport.verbs.library import Opcode
from tests.lookup.small_service import eventually
from tests.transport.verbs.fake_verbs import Fabric, FakeLibrary, FakeWindow

KIB = 1024
SIZE, SPLIT = 64 * KIB, 32 * KIB
MEMORY = np.zeros(SIZE, dtype=np.uint8)
BASE = int(MEMORY.ctypes.data)


class Client:
    """A link to the acceptor, as peer 7."""

    def __init__(self, acceptor: Acceptor, library: FakeLibrary, peer: int = 7) -> None:
        self.initiator = Initiator(lambda: library, VerbsConfig())
        self.link: Link = self.initiator.open()
        raw, self.block_keys, self.regions = acceptor.accept(peer, self.link.endpoint)
        self.link.connect(raw)
        self.address, self.key = self.link.allocate(SIZE)

    def move(self, opcode: Opcode, offset: int, key: int, length: int = KIB) -> None:
        self.link.transfer(opcode, [(self.address, self.key, BASE + offset, key, length, False)], 1)

    def close(self) -> None:
        self.link.close()
        self.initiator.close()


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "PRESENCE_CHECK_S", 0.01)


@pytest.fixture
def acceptor(fabric: Fabric, node_library: FakeLibrary) -> Iterator[Acceptor]:
    made = Acceptor(lambda: node_library, VerbsConfig(), "on")
    assert made.prepare(BASE, SIZE, SPLIT)
    yield made
    made.close()
    assert fabric.leaks == {}


@pytest.fixture
def client(acceptor: Acceptor, client_library: FakeLibrary) -> Iterator[Client]:
    made = Client(acceptor, client_library)
    yield made
    made.close()


def test_nothing_is_reached_without_a_key_of_its_own(acceptor: Acceptor, client: Client) -> None:
    assert client.block_keys
    assert all(key == 0 and access == 0 for _, _, key, access in client.regions)
    (key,) = acceptor.bind(7, [(0, KIB)], writable=False)
    client.move(Opcode.READ, 0, key)
    with pytest.raises(Unavailable, match="REM_ACCESS_ERR"):
        client.move(Opcode.READ, KIB, key)  # beside it


def test_a_key_to_read_does_not_write(acceptor: Acceptor, client: Client) -> None:
    (key,) = acceptor.bind(7, [(SPLIT, KIB)], writable=False)
    with pytest.raises(Unavailable, match="REM_ACCESS_ERR"):
        client.move(Opcode.WRITE, SPLIT, key)


def test_a_key_ends_with_unbind(acceptor: Acceptor, client: Client) -> None:
    first, second = acceptor.bind(7, [(0, KIB), (KIB, KIB)], writable=False)
    acceptor.unbind(7, [first])
    client.move(Opcode.READ, KIB, second)
    with pytest.raises(Unavailable, match="REM_ACCESS_ERR"):
        client.move(Opcode.READ, 0, first)


def test_a_key_that_does_not_end_takes_its_peers_connection_along(
    acceptor: Acceptor,
    client: Client,
    fabric: Fabric,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = acceptor.bind(7, [(0, KIB), (KIB, KIB)], writable=False)
    ends = FakeWindow.close
    refusals = iter([DeviceError("cannot end a memory window", errno.EBUSY)])

    def close(window: FakeWindow) -> None:
        for refusal in refusals:
            raise refusal
        ends(window)

    monkeypatch.setattr(FakeWindow, "close", close)
    assert not acceptor.unbind(7, [first])
    with pytest.raises(Unavailable):
        client.move(Opcode.READ, KIB, second)
    assert acceptor.unbind(7, [second])  # gone already
    assert fabric.open_objects["window"] == 0


def test_a_key_is_good_for_its_peer_only(
    acceptor: Acceptor, client: Client, client_library: FakeLibrary
) -> None:
    other = Client(acceptor, client_library, peer=8)
    (key,) = acceptor.bind(7, [(0, KIB)], writable=False)
    with pytest.raises(Unavailable, match="REM_ACCESS_ERR"):
        other.move(Opcode.READ, 0, key)
    client.move(Opcode.READ, 0, key)
    other.close()


def test_what_no_region_covers_has_no_key(acceptor: Acceptor, client: Client) -> None:
    good, beyond = acceptor.bind(7, [(0, KIB), (SIZE - 1, 2)], writable=False)
    assert good != 0
    assert beyond == 0
    client.move(Opcode.READ, 0, good)


def test_a_peer_has_so_many_keys_and_no_more(acceptor: Acceptor, client: Client) -> None:
    keys = acceptor.bind(7, [(0, 1)] * (WINDOWS_PER_PEER_MAX + 3), writable=False)
    assert keys[-3:] == [0, 0, 0]
    assert 0 not in keys[:-3]
    client.move(Opcode.READ, 0, keys[0], 1)


def test_without_windows_the_write_buffer_is_all_that_is_written(
    fabric: Fabric, node_library: FakeLibrary, client_library: FakeLibrary
) -> None:
    acceptor = Acceptor(lambda: node_library, VerbsConfig(windows="off"), "on")
    assert acceptor.prepare(BASE, SIZE, SPLIT)
    client = Client(acceptor, client_library)
    assert not client.block_keys
    (offset, size, read_key, access), (_, _, write_key, write_access) = client.regions
    assert (offset, size, access, write_access) == (0, SPLIT, 1, 3)
    client.move(Opcode.READ, 0, read_key)
    client.move(Opcode.WRITE, SPLIT, write_key)
    with pytest.raises(Unavailable, match="REM_ACCESS_ERR"):
        client.move(Opcode.WRITE, 0, read_key)
    client.close()
    acceptor.close()
    assert fabric.leaks == {}


def test_a_second_link_replaces_the_first(
    fabric: Fabric, acceptor: Acceptor, client: Client, client_library: FakeLibrary
) -> None:
    acceptor.bind(7, [(0, KIB)], writable=False)
    again = Client(acceptor, client_library)
    assert fabric.open_objects["window"] == 0
    with pytest.raises(Unavailable, match="RETRY_EXC_ERR"):
        client.move(Opcode.READ, 0, 1)
    again.close()


def test_a_peer_of_another_kind_of_network_is_told_so(
    acceptor: Acceptor, client_library: FakeLibrary
) -> None:
    initiator = Initiator(lambda: client_library, VerbsConfig())
    link = initiator.open()
    data = ConnectionData.unpack(link.endpoint)
    for byte, value, reason in ((26, 1, "ETHERNET"), (27, 1, "no GID of the kind of the peer's")):
        raw = bytearray(data.pack())
        raw[byte] = value
        with pytest.raises(Unavailable, match=reason):
            acceptor.accept(9, bytes(raw))
    with pytest.raises(ProtocolError):
        acceptor.accept(9, bytes(32))
    link.close()
    initiator.close()


def test_a_node_without_a_device_says_why_or_does_not_start(
    fabric: Fabric, caplog: pytest.LogCaptureFixture
) -> None:
    bare = FakeLibrary(fabric, [])
    with caplog.at_level(logging.WARNING):
        assert not Acceptor(lambda: bare, VerbsConfig(), "auto").prepare(BASE, SIZE, SPLIT)
    assert "no RDMA on this node: this machine has no RDMA device" in caplog.text
    with pytest.raises(ConfigError, match=r'node.verbs = "on": this machine has no RDMA device'):
        Acceptor(lambda: bare, VerbsConfig(), "on").prepare(BASE, SIZE, SPLIT)


def test_a_device_that_comes_back_is_opened_again(
    fabric: Fabric, acceptor: Acceptor, client_library: FakeLibrary
) -> None:
    fabric.unplug("node0")
    initiator = Initiator(lambda: client_library, VerbsConfig())
    link = initiator.open()

    def accepted() -> bool:
        try:
            acceptor.accept(7, link.endpoint)
        except Exception:  # noqa: BLE001 - as long as it is gone
            return False
        return True

    assert not accepted()
    fabric.plug("node0", "10.0.0.1")
    eventually(accepted)
    link.close()
    initiator.close()


def test_a_node_takes_another_port_when_its_port_is_down(
    fabric: Fabric, client_library: FakeLibrary
) -> None:
    fabric.plug("node1", "10.0.1.1")
    library = FakeLibrary(fabric, ["node0", "node1"])
    acceptor = Acceptor(lambda: library, VerbsConfig(), "on")
    assert acceptor.prepare(BASE, SIZE, SPLIT)
    before = Client(acceptor, client_library, peer=1)
    fabric.set_link("node0", up=False)
    assert not is_accepted(acceptor, before)
    eventually(lambda: is_accepted(acceptor, before))
    # Keys for a peer of the old port are still of that port.
    assert acceptor.bind(1, [(0, KIB)], writable=False) != [0]
    after = Client(acceptor, client_library)
    (key,) = acceptor.bind(7, [(0, KIB)], writable=False)
    after.move(Opcode.READ, 0, key)
    fabric.set_link("node1", up=False)
    assert not is_accepted(acceptor, before)  # and none is left to take
    before.close()
    after.close()
    acceptor.close()
    assert fabric.leaks == {}


def test_a_removal_that_waits_for_the_node_goes_on(
    acceptor: Acceptor, client: Client, fabric: Fabric
) -> None:
    (key,) = acceptor.bind(7, [(0, KIB)], writable=False)
    client.move(Opcode.READ, 0, key)
    fabric.withdraw("node0")
    eventually(lambda: fabric.open_objects["device"] == 1)  # the client's
    assert acceptor.bind(7, [(0, KIB)], writable=False) == [0]
    with pytest.raises(Unavailable):
        client.move(Opcode.READ, 0, key)
    fabric.plug("node0")
    eventually(lambda: is_accepted(acceptor, client))


def test_a_removal_that_waits_for_a_client_goes_on(
    acceptor: Acceptor, client: Client, fabric: Fabric
) -> None:
    (key,) = acceptor.bind(7, [(0, KIB)], writable=False)
    fabric.withdraw("client0")
    eventually(lambda: fabric.open_objects["device"] == 1)  # the node's
    with pytest.raises(Unavailable, match="closed"):
        client.move(Opcode.READ, 0, key)
    with pytest.raises(Unavailable, match="closed"):
        client.link.allocate(KIB)
    with pytest.raises(Unavailable, match="no RDMA device"):
        client.initiator.open()
    fabric.plug("client0")
    client.initiator.open().close()


def is_accepted(acceptor: Acceptor, client: Client) -> bool:
    link = client.initiator.open()
    try:
        acceptor.accept(8, link.endpoint)
    except Unavailable:
        return False
    finally:
        link.close()
    return True
