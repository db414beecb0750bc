"""Queue pairs: their states, batches, and how they end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from hymcache.config import VerbsConfig
from hymcache.errors import DeviceError, Unavailable
from hymcache.transport.verbs.adapter import Adapter, Chunk
from hymcache.transport.verbs.connection import Connection
from hymcache.transport.verbs.initiator import work_requests
from hymcache.transport.verbs.library import Access, Mtu, Opcode, QueuePairState, WorkRequest
from tests.transport.verbs.fake_verbs import LIMITS, PORT, Fabric, FakeLibrary

KIB = 1024
OPEN = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE


@dataclass
class Side:
    """One machine: memory that is registered, and a connection to the other."""

    adapter: Adapter
    memory: NDArray[np.uint8]
    chunk: Chunk
    connection: Connection

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)


def side(library: FakeLibrary, config: VerbsConfig, access: Access = OPEN) -> Side:
    adapter = Adapter(library, config)
    memory = np.zeros(256 * KIB, dtype=np.uint8)
    (chunk,) = adapter.register(int(memory.ctypes.data), memory.nbytes, access)
    return Side(adapter, memory, chunk, Connection(adapter, access & ~Access.LOCAL_WRITE))


@pytest.fixture
def config() -> VerbsConfig:
    return VerbsConfig(queue_depth=8, spin_us=0)


@pytest.fixture
def pair(
    fabric: Fabric, node_library: FakeLibrary, client_library: FakeLibrary, config: VerbsConfig
) -> Iterator[tuple[Side, Side]]:
    """Client and node, connected."""
    client, node = side(client_library, config), side(node_library, config)
    node.connection.connect(client.connection.data)
    client.connection.connect(node.connection.data)
    yield client, node
    for one in (client, node):
        one.connection.close()
        one.adapter.close()
    assert fabric.leaks == {}


def requests(
    client: Side, node: Side, opcode: Opcode, count: int, length: int = KIB
) -> list[WorkRequest]:
    return [
        WorkRequest(
            opcode,
            client.address + i * length,
            client.chunk.region.local_key,
            node.address + i * length,
            node.chunk.region.remote_key,
            length,
        )
        for i in range(count)
    ]


def fill(memory: NDArray[np.uint8], seed: int) -> None:
    memory[:] = np.random.default_rng(seed).integers(0, 256, memory.size, dtype=np.uint8)


def test_reads_and_writes_move_the_bytes(pair: tuple[Side, Side]) -> None:
    client, node = pair
    fill(node.memory, 1)
    client.connection.run(requests(client, node, Opcode.READ, 5), 1.0)
    assert np.array_equal(client.memory[: 5 * KIB], node.memory[: 5 * KIB])
    assert not client.memory[5 * KIB :].any()
    fill(client.memory, 2)
    client.connection.run(requests(client, node, Opcode.WRITE, 3), 1.0)
    assert np.array_equal(client.memory[: 3 * KIB], node.memory[: 3 * KIB])


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 50])
def test_a_batch_has_one_completion_for_each_filling_of_the_queue(
    fabric: Fabric, pair: tuple[Side, Side], count: int
) -> None:
    client, node = pair
    client.connection.run(requests(client, node, Opcode.READ, count), 1.0)
    fillings = -(-count // 8)
    assert (fabric.batches, fabric.signalled) == (fillings, fillings)


def test_what_a_fabric_needs_reaches_the_queue_pair(
    fabric: Fabric, node_library: FakeLibrary, client_library: FakeLibrary
) -> None:
    config = VerbsConfig(
        traffic_class=106, service_level=3, timeout=10, retry_count=5, rnr_retry=6, mtu=512
    )
    client, node = side(client_library, config), side(node_library, VerbsConfig())
    client.connection.connect(node.connection.data)
    progress = fabric.pairs[client.connection.data.queue_pair].progress
    assert progress.receive is not None
    assert progress.send is not None
    assert (progress.receive.traffic_class, progress.receive.service_level) == (106, 3)
    assert progress.receive.mtu is Mtu.MTU_512
    assert (progress.send.timeout, progress.send.retry_count, progress.send.rnr_retry) == (10, 5, 6)
    for one in (client, node):
        one.connection.close()
        one.adapter.close()


def test_the_ends_agree_on_what_both_can_do(fabric: Fabric) -> None:
    fabric.plug("node0", limits=dataclasses.replace(LIMITS, reads_in_max=4))
    fabric.plug("client0", "10.0.0.2", port=dataclasses.replace(PORT, mtu_active=Mtu.MTU_4096))
    node = side(FakeLibrary(fabric, ["node0"]), VerbsConfig())
    client = side(FakeLibrary(fabric, ["client0"]), VerbsConfig(max_rd_atomic=64))
    assert client.connection.data.reads_out == 16
    assert node.connection.data.reads_in == 4
    node.connection.connect(client.connection.data)
    client.connection.connect(node.connection.data)
    # With an MTU or a depth that the other end has not, the fake would refuse.
    client.connection.run(requests(client, node, Opcode.READ, 20), 1.0)


def test_an_mtu_that_is_configured_is_an_upper_bound(fabric: Fabric) -> None:
    library = FakeLibrary(fabric, ["node0"])
    for wanted, data in ((256, Mtu.MTU_256), (4096, Mtu.MTU_1024), (0, Mtu.MTU_1024)):
        adapter = Adapter(library, VerbsConfig(mtu=wanted))
        connection = Connection(adapter, Access.NONE)
        assert connection.data.mtu is data
        connection.close()
        adapter.close()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda one: dataclasses.replace(one, local_key=1), "LOC_PROT_ERR"),
        (lambda one: dataclasses.replace(one, remote_key=1), "REM_ACCESS_ERR"),
        (lambda one: dataclasses.replace(one, remote_address=1), "REM_ACCESS_ERR"),
        (lambda one: dataclasses.replace(one, local_address=1), "LOC_PROT_ERR"),
    ],
)
def test_a_request_that_is_not_allowed_ends_the_connection(
    fabric: Fabric,
    pair: tuple[Side, Side],
    spoil: Callable[[WorkRequest], WorkRequest],
    reason: str,
) -> None:
    client, node = pair
    good = requests(client, node, Opcode.READ, 3)
    bad = spoil(good[1])
    with pytest.raises(Unavailable, match=reason):
        client.connection.run([good[0], bad, good[2]], 1.0)
    assert fabric.open_objects["queue pair"] == 1  # the node's
    with pytest.raises(Unavailable, match="closed"):
        client.connection.run(good, 1.0)


def test_memory_that_is_for_reading_is_not_written(
    fabric: Fabric, node_library: FakeLibrary, client_library: FakeLibrary, config: VerbsConfig
) -> None:
    client = side(client_library, config)
    node = side(node_library, config, Access.REMOTE_READ)
    node.connection.connect(client.connection.data)
    client.connection.connect(node.connection.data)
    client.connection.run(requests(client, node, Opcode.READ, 1), 1.0)
    with pytest.raises(Unavailable, match="REM_ACCESS_ERR"):
        client.connection.run(requests(client, node, Opcode.WRITE, 1), 1.0)


def test_a_peer_that_is_gone_is_found_by_the_next_batch(pair: tuple[Side, Side]) -> None:
    client, node = pair
    node.connection.close()
    with pytest.raises(Unavailable, match="RETRY_EXC_ERR"):
        client.connection.run(requests(client, node, Opcode.READ, 1), 1.0)


def test_a_batch_that_does_not_end_is_given_up_and_never_arrives(
    fabric: Fabric, pair: tuple[Side, Side]
) -> None:
    client, node = pair
    fill(node.memory, 3)
    fabric.hold()
    with pytest.raises(Unavailable, match=r"not done within 0\.05 s"):
        client.connection.run(requests(client, node, Opcode.READ, 4), 0.05)
    fabric.let_go()
    assert not client.memory.any()


def test_a_connection_that_waits_sleeps_until_the_event(
    fabric: Fabric, pair: tuple[Side, Side]
) -> None:
    import threading

    client, node = pair
    fill(node.memory, 4)
    fabric.hold()
    timer = threading.Timer(0.2, fabric.let_go)
    timer.start()
    client.connection.run(requests(client, node, Opcode.READ, 4), 10.0)
    timer.join()
    assert np.array_equal(client.memory[: 4 * KIB], node.memory[: 4 * KIB])
    queues = [one.queue for one in fabric.pairs.values() if one.queue.waits]
    # It armed the events, waited, and found the completion: it did not poll for 0.2 s.
    assert [queue.waits for queue in queues] == [2]


def test_states_are_gone_through_in_order(fabric: Fabric, node_library: FakeLibrary) -> None:
    adapter = Adapter(node_library, VerbsConfig())
    connection = Connection(adapter, Access.NONE)
    (pair,) = fabric.pairs.values()
    assert pair.state is QueuePairState.INIT
    with pytest.raises(Unavailable, match="cannot post work"):
        connection.run([WorkRequest(Opcode.READ, 1, 1, 1, 1, 1)], 1.0)
    assert fabric.pairs == {}
    connection.close()
    adapter.close()
    assert fabric.leaks == {}


def test_an_unplugged_device_is_told_and_leaves_nothing_open(
    fabric: Fabric, pair: tuple[Side, Side]
) -> None:
    client, node = pair
    fabric.unplug("client0")
    with pytest.raises(Unavailable, match="gone"):
        client.connection.run(requests(client, node, Opcode.READ, 1), 1.0)
    with pytest.raises(DeviceError, match="gone"):
        Connection(client.adapter, Access.NONE)


def test_a_port_that_is_down_makes_no_connection(fabric: Fabric, node_library: FakeLibrary) -> None:
    adapter = Adapter(node_library, VerbsConfig())
    fabric.set_link("node0", up=False)
    with pytest.raises(Unavailable, match="the port is down"):
        Connection(adapter, Access.NONE)
    adapter.close()
    assert fabric.leaks == {}


def sizes(cut: Sequence[WorkRequest]) -> list[tuple[int, int, int, bool]]:
    return [(one.local_address, one.remote_address, one.length, one.fenced) for one in cut]


def test_pieces_are_cut_where_a_port_takes_no_longer_messages() -> None:
    pieces = [(100, 7, 9000, 8, 25, True), (500, 7, 400, 8, 10, False)]
    assert sizes(list(work_requests(Opcode.READ, pieces, 10))) == [
        (100, 9000, 10, True),
        (110, 9010, 10, False),
        (120, 9020, 5, False),
        (500, 400, 10, False),
    ]
