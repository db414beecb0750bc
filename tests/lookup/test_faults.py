"""Processes that are killed, stopped and started again, and what a client sees of it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from hymcache import Client, Unavailable
from hymcache.lookup import BlockStatus
from tests.lookup.conftest import StartProcess
from tests.lookup.small_service import eventually, wait_found

pytestmark = pytest.mark.slow

OK, MISS = BlockStatus.OK, BlockStatus.MISS
LOST = {BlockStatus.UNAVAILABLE, BlockStatus.DEADLINE, MISS}
DEADLINE_S = 2.0
LENGTH = 256 << 10
SLACK_S = 3.0  # a busy machine

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def keys_of(first: int, count: int = 16) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in range(first, first + count)]


def contents(first: int, count: int = 16) -> list[Bytes]:
    return [
        np.random.default_rng(number).integers(0, 256, LENGTH, dtype=np.uint8)
        for number in range(first, first + count)
    ]


def buffers(count: int = 16) -> list[Bytes]:
    return [np.zeros(LENGTH, np.uint8) for _ in range(count)]


def put_found(client: Client, first: int) -> None:
    assert client.put(keys_of(first), contents(first)) == [OK] * 16
    wait_found(client, keys_of(first))


def get_right(client: Client, first: int) -> list[BlockStatus]:
    """What a get says; where it says OK the bytes are the right ones."""
    into = buffers()
    statuses = client.get(keys_of(first), into)
    for status, found, expected in zip(statuses, into, contents(first), strict=True):
        if status == OK:
            assert np.array_equal(found, expected)
    return statuses


def eventually_right(client: Client, first: int) -> None:
    """All of it can be got, once whatever failed is back."""

    def attempt() -> bool:
        try:
            return get_right(client, first) == [OK] * 16
        except Unavailable:
            return False

    eventually(attempt)


def put_eventually(client: Client, first: int) -> None:
    """All of it is stored, once whatever failed is back."""

    def attempt() -> bool:
        try:
            statuses = client.put(keys_of(first), contents(first))
        except Unavailable:
            return False
        return set(statuses) <= {OK, BlockStatus.STORED_ALREADY}

    eventually(attempt)


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < limit_s + SLACK_S


class Reader(threading.Thread):
    """Gets the same objects over and over, and keeps what it saw."""

    def __init__(self, address: str, transport: str) -> None:
        super().__init__()
        self._client = Client(address, transport=transport, deadline_s=DEADLINE_S)
        self._stopped = threading.Event()
        self.seen: set[BlockStatus] = set()
        self.longest_s = 0.0
        self.rounds = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._stopped.is_set():
                started = time.monotonic()
                self.seen.update(get_right(self._client, 0))
                self.longest_s = max(self.longest_s, time.monotonic() - started)
                self.rounds += 1
        except BaseException as error:  # noqa: BLE001 - raised again by the test
            self.error = error

    def stop(self) -> None:
        self._stopped.set()
        self.join(timeout=20)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error


def test_a_node_that_is_killed_costs_its_blocks_and_nothing_else(
    start_process: StartProcess,
) -> None:
    master = start_process("master", "master.lease_ms=1000").addresses["master.listen"]
    node = start_process("node", f"node.masters={master}")
    client = Client(master, deadline_s=DEADLINE_S)
    put_found(client, 0)
    readers = [Reader(master, transport) for transport in ("shm", "shm", "tcp", "tcp")]
    for reader in readers:
        reader.start()
    eventually(lambda: all(reader.rounds > 2 for reader in readers))
    node.kill()
    eventually(lambda: client.lookup(keys_of(0)) == [None] * 16)  # its lease is over
    for reader in readers:
        reader.stop()
        assert reader.seen <= {OK} | LOST
        assert OK in reader.seen
        assert reader.longest_s < DEADLINE_S + SLACK_S
    assert get_right(client, 0) == [MISS] * 16

    # Under its name, on its file: what it held before is gone, and nobody names it.
    start_process("node", f"node.masters={master}")
    put_eventually(client, 100)
    wait_found(client, keys_of(100))
    assert client.lookup(keys_of(0)) == [None] * 16
    assert get_right(client, 100) == [OK] * 16
    assert client.put(keys_of(0), contents(0)) == [OK] * 16


def test_a_node_that_is_stopped_costs_the_deadline_and_then_goes_on(
    start_process: StartProcess,
) -> None:
    master = start_process("master", "master.lease_ms=1000").addresses["master.listen"]
    node = start_process("node", f"node.masters={master}")
    clients = [Client(master, transport=name, deadline_s=DEADLINE_S) for name in ("shm", "tcp")]
    put_found(clients[0], 0)
    for client in clients:
        assert get_right(client, 0) == [OK] * 16
    with node.paused():
        for client in clients:
            with within(DEADLINE_S):
                assert set(get_right(client, 0)) <= LOST
            with within(DEADLINE_S):
                client.put(keys_of(200), contents(200))
        eventually(lambda: clients[0].lookup(keys_of(0)) == [None] * 16)
    for client in clients:
        eventually_right(client, 0)
        put_eventually(client, 300)


def test_a_master_that_is_killed_comes_back_with_all_that_nodes_hold(
    start_process: StartProcess,
) -> None:
    address = free_address()
    newcomer = Client(address, deadline_s=DEADLINE_S)
    with pytest.raises(Unavailable, match="refused"):
        newcomer.lookup(keys_of(0))
    node = start_process("node", f"node.masters={address}")  # before its master
    master = start_process("master", f"master.listen={address}")
    client = Client(address, deadline_s=DEADLINE_S)
    put_eventually(client, 0)
    wait_found(client, keys_of(0))
    eventually_right(newcomer, 0)

    master.kill()
    for _ in range(3):
        with within(0), pytest.raises(Unavailable):
            client.lookup(keys_of(0))
    start_process("master", f"master.listen={address}")
    eventually_right(client, 0)
    eventually_right(newcomer, 0)
    assert node.process.poll() is None
    put_found(client, 100)


def test_a_master_that_hangs_costs_the_deadline_and_then_goes_on(
    start_process: StartProcess,
) -> None:
    service = start_process("up")
    client = Client(service.addresses["master.listen"], deadline_s=1.0)
    put_found(client, 0)
    with service.paused():
        for _ in range(2):
            with within(1.0), pytest.raises(Unavailable):
                get_right(client, 0)
    eventually_right(client, 0)
