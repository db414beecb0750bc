"""A service in a process of its own, as its user starts it, and as fate stops it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self


class ServiceProcess:
    """`hymcache COMMAND` with these settings; ready when it is constructed."""

    def __init__(self, folder: Path, command: str, settings: Sequence[str]) -> None:
        beside = (
            "master.listen=127.0.0.1:0",
            "master.grpc=",
            "master.http=",
            "node.listen=127.0.0.1:0",
            "node.http=",
            "node.name=n1",
            f"node.unix={folder}/n1.sock",
            f"device.path={folder}/n1.device",
            "device.capacity=256MiB",
            "device.staging=32MiB",
            "device.write_buffer=32MiB",
            "device.preallocate=false",
        )
        arguments = [f"--set={setting}" for setting in (*beside, *settings)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hymcache", command, *arguments],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.addresses = self._read_addresses()

    def _read_addresses(self) -> dict[str, str]:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        addresses: dict[str, str] = {}
        for line in self.process.stdout:
            if line == "hymcache: ready\n":
                return addresses
            key, *address = line.split()
            if "." in key:
                (addresses[key],) = address
        raise AssertionError(f"not ready: {self.process.stderr.read()}")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stands still inside the block, with its connections open."""
        self.process.send_signal(signal.SIGSTOP)
        status = Path(f"/proc/{self.process.pid}/status")
        while "State:\tT" not in status.read_text():
            time.sleep(0.001)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """As the kernel does when memory is short: without a word to anybody."""
        self.process.kill()
        self.process.wait(timeout=20)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.communicate(timeout=20)
