"""`hymcache dra controller` in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import httpx

START_TIMEOUT_S = 120.0


class ControllerProcess:
    """One replica. Ready when it is constructed; it leads once it has the lease."""

    def __init__(
        self,
        kubeconfig: Path,
        fabric_url: str,
        log_path: Path,
        *options: str,
        crash_at: str | None = None,
        identity: str = "controller-a",
    ) -> None:
        self.log_path = log_path
        environment = dict(os.environ)
        if crash_at is not None:
            environment["HYMCACHE_DRA_CRASH_AT"] = crash_at
        self._log = log_path.open("ab")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "hymcache", "dra", "controller", "--verbose"),
                *("--fabric", fabric_url, "--kubeconfig", str(kubeconfig)),
                *("--namespace", "hymcache-dra", "--identity", identity),
                *("--http", "127.0.0.1:0", *options),
            ],
            cwd="/",
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.http = self._read_ready()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def leads(self) -> bool:
        """Whether it acts, and has seen the fabric manager's blades."""
        try:
            return self.alive and bool(self.metric("leading") and self.metric("fabric_reachable"))
        except httpx.TransportError:
            return False

    def log(self) -> str:
        """What it wrote to stderr, all replicas with the same log."""
        return self.log_path.read_text(errors="replace")

    def metric(self, name: str, **labels: str) -> float:
        """One number of its /metrics; 0 where it has none of these labels."""
        wanted = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
        prefix = f"hymcache_dra_{name}" + (f"{{{wanted}}}" if wanted else "")
        for line in httpx.get(f"http://{self.http}/metrics", timeout=10).text.splitlines():
            series, _, value = line.rpartition(" ")
            if series == prefix:
                return float(value)
        return 0.0

    def kill(self) -> None:
        """As the power does."""
        self.process.kill()
        self._close()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self._close()

    def wait_for_crash(self, timeout_s: float = 30.0) -> None:
        """Returns once the process has killed itself."""
        assert self.process.wait(timeout_s) == -signal.SIGKILL, self.log()
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if not self._log.closed:
            self.stop()

    def _close(self) -> None:
        self.process.wait(timeout=20)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()

    def _read_ready(self) -> str:
        stdout = self.process.stdout
        assert stdout is not None
        watchdog = threading.Timer(START_TIMEOUT_S, self.process.kill)
        watchdog.start()
        try:
            return self._read_address(stdout)
        finally:
            watchdog.cancel()

    def _read_address(self, stdout: IO[str]) -> str:
        address = ""
        for line in stdout:
            if line == "hymcache: ready\n":
                return address
            name, _, value = line.strip().rpartition(" ")
            if name.strip() == "controller.http":
                address = value
        raise AssertionError(f"not ready: {self.log()}")
