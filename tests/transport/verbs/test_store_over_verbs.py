"""The whole way of a block by RDMA, in one process: client and node in C++, verbs made of memmove.

What RDMA itself does is tested in tests/testbed; here are the paths that need faults on demand.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from hymcache._core import BlockStatus, StoreClient
from hymcache.config import VerbsConfig
from hymcache.transport.verbs import Acceptor, Initiator
from tests.lookup.small_service import MIB, SmallService, eventually
from tests.transport.verbs.fake_verbs import RETRIES, Fabric, FakeLibrary

OK, MISS = BlockStatus.OK, BlockStatus.MISS
Block = NDArray[np.uint8]


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def contents(number: int, length: int) -> Block:
    return np.random.default_rng(number).integers(0, 256, length, dtype=np.uint8)


class Rig:
    """A node and a client on the fabric."""

    def __init__(
        self,
        folder: Path,
        node: FakeLibrary,
        client: FakeLibrary,
        config: VerbsConfig,
        mode: Literal["auto", "on"] = "on",
    ) -> None:
        self.acceptor = Acceptor(lambda: node, config, mode)
        self.service = SmallService(folder, verbs=self.acceptor)
        self.client_library = client
        self.config = config

    def client(self, *, deadline_s: float = 10.0, transport: str = "verbs") -> StoreClient:
        return StoreClient(
            masters=[self.service.address],
            transport=transport,
            deadline_s=deadline_s,
            verbs=Initiator(lambda: self.client_library, self.config),
        )

    def node_stats(self) -> dict[str, Any]:
        return self.service.node.stats()


OpenRig = Callable[..., Rig]


@pytest.fixture
def open_rig(
    tmp_path: Path, node_library: FakeLibrary, client_library: FakeLibrary, fabric: Fabric
) -> Iterator[OpenRig]:
    rigs: list[Rig] = []

    def make(**settings: Any) -> Rig:
        rig = Rig(tmp_path, node_library, client_library, VerbsConfig(spin_us=0, **settings))
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        rig.service.stop()
    assert fabric.leaks == {}


@contextmanager
def closing(client: StoreClient) -> Iterator[StoreClient]:
    try:
        yield client
    finally:
        client.close()


def put(client: StoreClient, numbers: range, length: int) -> list[BlockStatus]:
    keys = b"".join(key(i) for i in numbers)
    return [BlockStatus(s) for s in client.put(keys, [contents(i, length) for i in numbers])]


def get(client: StoreClient, numbers: range, into: list[Block]) -> list[BlockStatus]:
    return [BlockStatus(s) for s in client.get(b"".join(key(i) for i in numbers), into)]


def buffers(count: int, length: int) -> list[Block]:
    return [np.zeros(length, dtype=np.uint8) for _ in range(count)]


def register(client: StoreClient, *blocks: Block) -> None:
    for block in blocks:
        client.register_memory(block.ctypes.data, block.nbytes)


def check(client: StoreClient, numbers: range, length: int) -> None:
    into = buffers(len(numbers), length)
    assert get(client, numbers, into) == [OK] * len(numbers)
    for number, block in zip(numbers, into, strict=True):
        assert np.array_equal(block, contents(number, length))


WINDOWS = pytest.mark.parametrize("windows", ["auto", "off"])


@WINDOWS
@pytest.mark.parametrize("length", [1, 4097, MIB, MIB + 1, 5 * MIB])
def test_blocks_come_back_through_bounce_memory(
    open_rig: OpenRig, windows: str, length: int
) -> None:
    # Blocks that fit, that share the bounce memory, and that need it several times over.
    rig = open_rig(windows=windows, bounce=2 * MIB)
    with closing(rig.client()) as client:
        assert put(client, range(5), length) == [OK] * 5
        check(client, range(5), length)
        stats = client.stats()
        assert stats["verbs_read_bytes"] == stats["verbs_written_bytes"] == 5 * length
        assert stats["tcp_read_bytes"] == stats["tcp_written_bytes"] == 0
        assert stats["verbs_fallbacks"] == stats["verbs_failures"] == 0
    assert rig.node_stats()["verbs_keys_held"] == 0


@WINDOWS
def test_registered_memory_is_read_and_written_in_place_with_one_completion_a_batch(
    open_rig: OpenRig, fabric: Fabric, windows: str
) -> None:
    rig = open_rig(windows=windows)
    memory = np.zeros(8 * MIB, dtype=np.uint8)
    with closing(rig.client()) as client:
        register(client, memory)
        sources = list(memory.reshape(8, MIB))
        for number, source in enumerate(sources):
            source[:] = contents(number, MIB)
        keys = b"".join(key(i) for i in range(8))
        assert set(client.put(keys, sources)) == {OK}
        memory[:] = 0
        before = (fabric.batches, fabric.signalled)
        assert set(client.get(keys, sources)) == {OK}
        for number, source in enumerate(sources):
            assert np.array_equal(source, contents(number, MIB))
        # One batch of READs, and one of binds where there are windows: each with one completion.
        moved = 2 if windows == "auto" else 1
        assert (fabric.batches - before[0], fabric.signalled - before[1]) == (moved, moved)


def test_keys_are_good_for_one_block_and_end_with_it(open_rig: OpenRig, fabric: Fabric) -> None:
    rig = open_rig(windows="auto")
    with closing(rig.client()) as client:
        assert put(client, range(3), MIB) == [OK] * 3
        check(client, range(3), MIB)
        stats = rig.node_stats()
        assert stats["verbs_keys_made"] == 6  # three to write, three to read
        assert stats["verbs_keys_held"] == 0
        assert fabric.open_objects["window"] == 0


def test_a_device_without_windows_gives_out_keys_of_its_whole_memory(
    open_rig: OpenRig, fabric: Fabric
) -> None:
    card = fabric.cards["node0"]
    card.limits = type(card.limits)(**{**_fields(card.limits), "windows": False})
    rig = open_rig(windows="auto")
    with closing(rig.client()) as client:
        assert put(client, range(2), MIB) == [OK] * 2
        check(client, range(2), MIB)
        assert client.stats()["verbs_read_bytes"] == 2 * MIB
    assert rig.node_stats()["verbs_keys_made"] == 0


def _fields(limits: object) -> dict[str, Any]:
    return {name: getattr(limits, name) for name in limits.__slots__}  # type: ignore[attr-defined]


@WINDOWS
def test_a_failed_batch_goes_over_tcp_and_the_link_comes_back(
    open_rig: OpenRig, fabric: Fabric, windows: str
) -> None:
    rig = open_rig(windows=windows)
    with closing(rig.client()) as client:
        assert put(client, range(4), MIB) == [OK] * 4
        fabric.fail_next = RETRIES
        check(client, range(4), MIB)
        stats = client.stats()
        assert stats["verbs_failures"] == 1
        assert stats["verbs_fallbacks"] == 1
        assert stats["tcp_read_bytes"] == 4 * MIB
        assert "RETRY_EXC_ERR" in stats["verbs_last_failure"]

        def by_rdma() -> bool:
            before = client.stats()["verbs_read_bytes"]
            check(client, range(4), MIB)
            return bool(client.stats()["verbs_read_bytes"] == before + 4 * MIB)

        eventually(by_rdma)  # after a pause
        assert client.stats()["verbs_links"] == 2
        assert rig.node_stats()["verbs_peers"] == 1


@WINDOWS
def test_a_write_that_fails_goes_over_tcp(open_rig: OpenRig, fabric: Fabric, windows: str) -> None:
    rig = open_rig(windows=windows)
    with closing(rig.client()) as client:
        fabric.fail_next = RETRIES
        assert put(client, range(4), MIB) == [OK] * 4
        assert client.stats()["tcp_written_bytes"] == 4 * MIB
        check(client, range(4), MIB)


def test_a_port_that_is_down_leaves_tcp(open_rig: OpenRig, fabric: Fabric) -> None:
    rig = open_rig()
    with closing(rig.client()) as client:
        assert put(client, range(2), MIB) == [OK] * 2
        fabric.set_link("client0", up=False)
        check(client, range(2), MIB)
        assert client.stats()["tcp_read_bytes"] == 2 * MIB
        fabric.set_link("client0", up=True)

        def linked_again() -> bool:
            check(client, range(2), MIB)
            return bool(client.stats()["verbs_links"] == 2)

        eventually(linked_again)


@pytest.mark.parametrize("device", ["client0", "node0"])
def test_a_device_that_was_unplugged_and_comes_back_is_used_again(
    open_rig: OpenRig, fabric: Fabric, device: str
) -> None:
    rig = open_rig()
    memory = np.zeros(2 * MIB, dtype=np.uint8)
    with closing(rig.client()) as client:
        register(client, memory)
        assert put(client, range(2), MIB) == [OK] * 2
        fabric.unplug(device)
        check(client, range(2), MIB)
        assert client.stats()["tcp_read_bytes"] == 2 * MIB
        fabric.plug(device, "10.0.0.1" if device == "node0" else "10.0.0.2")

        def by_rdma() -> bool:
            before = client.stats()["verbs_read_bytes"]
            check(client, range(2), MIB)
            return bool(client.stats()["verbs_read_bytes"] > before)

        eventually(by_rdma)


def test_work_that_never_ends_is_given_up_before_the_deadline(
    open_rig: OpenRig, fabric: Fabric
) -> None:
    rig = open_rig()
    memory = np.zeros(2 * MIB, dtype=np.uint8)
    with closing(rig.client(deadline_s=2.0)) as client:
        register(client, memory)
        assert put(client, range(2), MIB) == [OK] * 2
        fabric.hold()
        into = list(memory.reshape(2, MIB))
        assert get(client, range(2), into) == [OK] * 2  # by TCP, in the other half of the time
        copy = memory.copy()
        fabric.let_go()  # nothing of it may arrive any more
        assert np.array_equal(memory, copy)
        assert "not done within" in client.stats()["verbs_last_failure"]


def test_a_node_without_rdma_is_read_over_tcp(tmp_path: Path, client_library: FakeLibrary) -> None:
    with SmallService(tmp_path) as service:
        initiator = Initiator(lambda: client_library, VerbsConfig())
        client = StoreClient(masters=[service.address], transport="verbs", verbs=initiator)
        with closing(client):
            assert put(client, range(2), MIB) == [OK] * 2
            check(client, range(2), MIB)
            assert client.stats()["tcp_read_bytes"] == 2 * MIB
            assert client.stats()["verbs_failures"] == 0


def test_a_client_that_is_closed_leaves_nothing_behind(open_rig: OpenRig, fabric: Fabric) -> None:
    rig = open_rig()
    idle = dict(fabric.open_objects)
    for _ in range(20):
        with closing(rig.client()) as client:
            assert put(client, range(1), 4096)[0] in (OK, BlockStatus.STORED_ALREADY)
            check(client, range(1), 4096)
    eventually(lambda: rig.node_stats()["verbs_peers"] == 0)
    assert {k: n for k, n in fabric.open_objects.items() if n} == {
        k: n for k, n in idle.items() if n
    }


def test_threads_share_a_client(open_rig: OpenRig) -> None:
    rig = open_rig()
    failures: list[BaseException] = []
    with closing(rig.client()) as client:
        assert put(client, range(8), 64 << 10) == [OK] * 8

        def work() -> None:
            try:
                for _ in range(10):
                    check(client, range(8), 64 << 10)
            except BaseException as error:  # noqa: BLE001 - told to the test below
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert client.stats()["tcp_read_bytes"] == 0


def test_a_node_process_that_goes_takes_only_its_blocks_along(open_rig: OpenRig) -> None:
    rig = open_rig()
    with closing(rig.client(deadline_s=2.0)) as client:
        assert put(client, range(2), MIB) == [OK] * 2
        rig.service.node.stop()
        statuses = get(client, range(2), buffers(2, MIB))
        assert OK not in statuses
