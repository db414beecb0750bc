"""In a guest: a client of the store, in scenes that tests on the host direct and judge.

    store_client.py exchange MASTER TRANSPORT
    store_client.py keep_reading MASTER TRANSPORT
    store_client.py connect MASTER TRANSPORT

Each prints lines of JSON. What is wrong with the bytes ends it with an assertion.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hymcache import Client
from hymcache.config import VerbsConfig
from hymcache.errors import Unavailable
from hymcache.lookup import BlockStatus

Block = NDArray[np.uint8]

BATCH = 8
BLOCK_BYTES = 256 << 10
# Of a call while something fails, and while nothing does: an emulated machine may be starved.
DEADLINE_S = 5.0
PATIENT_DEADLINE_S = 30.0
FOUND_DEADLINE_S = 60.0
CONNECTIONS = 200
CONNECTIONS_AT_ONCE = 4
CONNECT_BYTES = 64 << 10

# An emulated peer is slow to acknowledge, and memory is slow to register.
VERBS = VerbsConfig(timeout=18, bounce=BATCH * BLOCK_BYTES)


def say(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def open_client(
    master: str,
    transport: str,
    deadline_s: float = PATIENT_DEADLINE_S,
    verbs: VerbsConfig = VERBS,
) -> Client:
    return Client(
        master,
        transport=transport,
        deadline_s=deadline_s,
        connect_timeout_s=DEADLINE_S,
        verbs=verbs,
    )


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def contents(number: int, size: int = BLOCK_BYTES) -> Block:
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)


def store(client: Client, numbers: range, size: int = BLOCK_BYTES) -> None:
    """Puts the blocks until all are stored, and waits until they are found."""
    limit = time.monotonic() + FOUND_DEADLINE_S
    keys = [key(number) for number in numbers]
    blocks = [contents(number, size) for number in numbers]
    while True:
        statuses = set(client.put(keys, blocks))
        if statuses <= {BlockStatus.OK, BlockStatus.STORED_ALREADY}:
            break
        assert time.monotonic() < limit, f"not stored: {statuses}"
        time.sleep(0.2)
    while None in client.lookup(keys):
        assert time.monotonic() < limit, "not found"
        time.sleep(0.05)


def read(client: Client, numbers: range, into: list[Block]) -> list[BlockStatus]:
    """Gets the blocks in one batch; bytes that are said to be right are compared."""
    for block in into:
        block[:] = 0
    statuses = client.get([key(number) for number in numbers], into)
    for number, status, block in zip(numbers, statuses, into, strict=True):
        if status == BlockStatus.OK:
            assert np.array_equal(block, contents(number, block.size)), f"block {number} is wrong"
    return statuses


def exchange(master: str, transport: str) -> None:
    """Two batches there and back, into memory that is registered and into memory that is not."""
    with open_client(master, transport) as client:
        arena = np.zeros(BATCH * BLOCK_BYTES, np.uint8)
        client.register_memory(arena)
        registered = list(arena.reshape(BATCH, BLOCK_BYTES))
        other = [np.zeros(BLOCK_BYTES, np.uint8) for _ in range(BATCH)]
        for first, into in ((0, registered), (BATCH, other)):
            numbers = range(first, first + BATCH)
            store(client, numbers)
            statuses = read(client, numbers, into)
            assert statuses == [BlockStatus.OK] * BATCH, statuses
        say(bytes=2 * BATCH * BLOCK_BYTES, stats=client.stats())


def keep_reading(master: str, transport: str) -> None:
    """Reads one batch over and over, and stores it again where it is not found."""
    numbers = range(BATCH)
    into = [np.zeros(BLOCK_BYTES, np.uint8) for _ in numbers]
    with open_client(master, transport, DEADLINE_S) as client:
        store(client, numbers)
        while True:
            started = time.monotonic()
            try:
                statuses = read(client, numbers, into)
                took_s = time.monotonic() - started
                if BlockStatus.MISS in statuses:
                    client.put([key(n) for n in numbers], [contents(n) for n in numbers])
            except Unavailable:
                statuses = [BlockStatus.UNAVAILABLE]
                took_s = time.monotonic() - started
            say(
                statuses=sorted({status.name for status in statuses}),
                took_s=took_s,
                stats=client.stats(),
            )
            time.sleep(0.05)


def connect(master: str, transport: str) -> None:
    """Connects, reads one block, and disconnects, many times."""
    with open_client(master, transport) as client:
        store(client, range(1), CONNECT_BYTES)

    small = VERBS.model_copy(update={"bounce": CONNECT_BYTES})  # registered each time

    def connect_once(_: int) -> int:
        into = [np.zeros(CONNECT_BYTES, np.uint8)]
        with open_client(master, transport, verbs=small) as client:
            statuses = read(client, range(1), into)
            stats = client.stats()
            assert statuses == [BlockStatus.OK], (statuses, stats)
            return int(stats["verbs_links"])

    with ThreadPoolExecutor(CONNECTIONS_AT_ONCE) as threads:
        links = sum(threads.map(connect_once, range(CONNECTIONS)))
    say(connections=CONNECTIONS, links=links)
    # The test looks at what the process still holds.
    time.sleep(3600)


if __name__ == "__main__":
    scenes = {"exchange": exchange, "keep_reading": keep_reading, "connect": connect}
    scenes[sys.argv[1]](sys.argv[2], sys.argv[3])
