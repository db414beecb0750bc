"""A master in a process of its own, as users start it: killed, stopped, and filled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from hymcache import limits
from hymcache._core import IndexFiller
from tests.master.raw_peer import RawClient, RawNode, make_key

READY = "hymcache: ready"


class MasterProcess:
    """`hymcache master`, ready to serve; killed in the end if it still runs."""

    def __init__(self, listen: str = "127.0.0.1:0", *settings: str) -> None:
        options = [f"master.listen={listen}", "master.grpc=", "master.http=", *settings]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hymcache", "master", *(f"--set={o}" for o in options)],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.listen = ""
        for line in self._lines():
            if line.startswith("master.listen"):
                self.listen = line.split()[1]
            if line == READY:
                return
        self.__exit__(None, None, None)
        pytest.fail(f"the master ended with {self.process.returncode}")

    def _lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield line.strip()

    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=10)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def test_a_killed_master_is_filled_anew_when_it_is_back() -> None:
    with MasterProcess() as master:
        listen = master.listen
        with RawNode(listen, "a", 1) as node, RawClient(listen) as client:
            node.register()
            node.publish([make_key(1)])
            assert client.find(make_key(1)) is not None
            master.end(signal.SIGKILL)
            assert node.is_closed()
    with MasterProcess(listen), RawNode(listen, "a", 1) as node, RawClient(listen) as client:
        assert client.find(make_key(1)) is None
        node.register()
        node.publish([make_key(1)])
        node.synced()
        assert client.find(make_key(1)) is not None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(number: signal.Signals) -> None:
    with MasterProcess() as master, RawClient(master.listen) as client:
        assert master.end(number) == 0
        assert client.is_closed()


def test_ten_terabytes_of_objects_take_64_bytes_each() -> None:
    objects = 10 * limits.TIB // limits.BLOCK_BYTES_LLAMA_8B
    with MasterProcess() as master:
        # The first object brings what an empty index does not have yet.
        filler = IndexFiller(master.listen, "filler", 1)
        assert filler.publish(1) == 1
        before = master.resident_bytes()
        assert filler.publish(objects - 1) == objects - 1
        growth = master.resident_bytes() - before
        with RawClient(master.listen) as client:
            assert None not in client.lookup(filler.last_keys(32))
    assert growth <= 64 * limits.MIB
    assert growth / objects <= limits.ENTRY_BYTES * 1.25
