"""A master and one storage node in this process, on a small device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import hymcache
from hymcache._core import FileDeviceOptions, MasterServer, StorageNode
from hymcache.kv_manager import node_id
from hymcache.transport.verbs import Acceptor

PATIENCE_S = 20.0
MIB = 1 << 20


def eventually(condition: Callable[[], bool]) -> None:
    """Waits until the condition holds; fails when that takes too long."""
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit, "it has not come about in time"
        time.sleep(0.002)


def wait_found(client: hymcache.Client, keys: Sequence[bytes]) -> None:
    """Until the master knows what was put: the node tells it a moment later."""
    eventually(lambda: None not in client.lookup(keys))


class SmallService:
    """Serves from construction to `stop`, which comes with the end of a `with` block."""

    def __init__(
        self,
        folder: Path,
        *,
        secret: bytes = b"",
        lease_ms: int = 10_000,
        verbs: Acceptor | None = None,
    ) -> None:
        self.master = MasterServer(
            ["127.0.0.1:0"], name="m", lease_ms=lease_ms, connections_max=100, secret=secret
        )
        self.master.start()
        (self.address,) = self.master.endpoints()
        self.node = StorageNode(
            node=node_id("n1"),
            name="n1",
            listen="127.0.0.1:0",
            unix_path=str(folder / "n1.sock"),
            masters=[self.address],
            secret=secret,
            log=lambda _line: None,
            warn=lambda _line: None,
            device=FileDeviceOptions(
                path=str(folder / "n1.device"),
                capacity_bytes=256 * MIB,
                staging_bytes=64 * MIB,
                write_buffer_bytes=64 * MIB,
                preallocate=False,
            ),
            verbs=verbs,
        )
        eventually(lambda: self.node.stats()["masters"][0]["state"] == "live")

    def client(self, transport: str = "auto", **options: Any) -> hymcache.Client:
        """A client of this service."""
        return hymcache.Client(self.address, transport=transport, **options)

    def stop(self) -> None:
        self.node.stop()
        self.master.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.stop()
