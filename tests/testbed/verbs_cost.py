"""In a guest: reads batches of blocks by RDMA when the host says so.

    verbs_cost.py MASTER FOLDER

For each file go-1, go-2, ... that appears in FOLDER it reads the batch PASSES times and prints
"done N". In the file is "plain", for reading without checksums, or "crc".
"""

from __future__ import annotations

import sys
import time
from itertools import count
from pathlib import Path

import numpy as np

from hymcache import Client
from hymcache.config import VerbsConfig
from hymcache.lookup import BlockStatus

BLOCK_BYTES = 4 << 20
BATCH = 8
PASSES = 2
MOVED_BYTES = BLOCK_BYTES * BATCH * PASSES
DEADLINE_S = 120.0
SIDES = ["plain", "crc"]


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def open_client(master: str, *, checksums: bool) -> Client:
    return Client(
        master,
        transport="verbs",
        deadline_s=DEADLINE_S,
        verify_checksums=checksums,
        verbs=VerbsConfig(timeout=18),
    )


def main(master: str, folder: Path) -> None:
    memory = np.zeros((BATCH, BLOCK_BYTES), np.uint8)
    keys = [number.to_bytes(16, "little") for number in range(BATCH)]
    blocks = list(memory)
    clients = [open_client(master, checksums=checksums) for checksums in (False, True)]
    for client in clients:
        client.register_memory(memory)
    assert set(clients[1].put(keys, blocks)) == {BlockStatus.OK}
    while None in clients[1].lookup(keys):
        time.sleep(0.1)
    for client in clients:  # connects, and runs everything once
        assert client.get(keys, blocks) == [BlockStatus.OK] * BATCH
    say("ready")
    for number in count(1):
        order = folder / f"go-{number}"
        while not order.exists():
            time.sleep(0.05)
        client = clients[SIDES.index(order.read_text())]
        for _ in range(PASSES):
            assert client.get(keys, blocks) == [BlockStatus.OK] * BATCH
        stats = client.stats()
        assert stats["verbs_fallbacks"] == stats["tcp_read_bytes"] == 0, stats
        say(f"done {number}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
