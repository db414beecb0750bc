"""Masters and storage nodes as a user runs them: processes of the command line."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

_STOP_S = 10.0


def free_port() -> int:
    """A port that a process can be started on, and started on again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServiceProcess:
    """One process of `hymcache`; it may be killed, stopped for a while, and started again."""

    def __init__(self, command: str, folder: Path, settings: dict[str, str]) -> None:
        self._arguments = [sys.executable, "-m", "hymcache", command]
        for key, value in settings.items():
            self._arguments += ["--set", f"{key}={value}"]
        self._log = folder / f"{command}.log"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Returns when it serves."""
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._arguments, cwd="/", stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line == "hymcache: ready\n":
                return
        raise AssertionError(f"it does not start:\n{self._log.read_text()}")

    def pause(self) -> None:
        """Returns when it does nothing any more."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self._process.pid}/stat")
        end = time.monotonic() + _STOP_S
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < end, "it does not stop"
            time.sleep(0.001)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """As a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate(timeout=_STOP_S)
            self._process = None


class Service:
    """A master and a storage node, on ports that stay theirs.

    Its DRAM is small, so that objects do come from the device.
    """

    def __init__(self, folder: Path) -> None:
        self.master_address = f"127.0.0.1:{free_port()}"
        self.device = folder / "device.dat"
        self.master = ServiceProcess(
            "master",
            folder,
            {
                "master.listen": self.master_address,
                "master.grpc": "",
                "master.http": "",
                "master.lease_ms": "1000",
            },
        )
        self.node = ServiceProcess(
            "node",
            folder,
            {
                "node.name": "n1",
                "node.listen": f"127.0.0.1:{free_port()}",
                "node.unix": str(folder / "node.sock"),
                "node.http": "",
                "node.masters": self.master_address,
                "device.path": str(self.device),
                "device.capacity": "256MiB",
                "device.staging": "4MiB",
                "device.write_buffer": "4MiB",
            },
        )

    def start(self) -> None:
        self.master.start()
        self.node.start()

    def kill(self) -> None:
        self.node.kill()
        self.master.kill()
