"""rdma-core's own benchmark beside ours: ib_read_bw and ib_write_bw of perftest, on this host.

Both ends run here, as those of ours do in `hymcache bench micro`. READs wait for completions as
ours do, by events; WRITEs are polled for, since perftest has no other way. What they cost is their
CPU time, less that of a run that moves next to nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from typing import Final, Literal

from hymcache.bench.child_process import free_ports
from hymcache.bench.cost import Cost
from hymcache.errors import ConfigError, Unavailable
from hymcache.transport.verbs import PortReport

_PROGRAMS: Final = {"get": "ib_read_bw", "put": "ib_write_bw"}
_FEW: Final = 5  # messages: the least that perftest takes
_OUTSTANDING: Final = 5
_TIMEOUT_S: Final = 120.0
_START_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True)
class PerftestReference:
    """Measures plain READs and WRITEs over a port."""

    port: PortReport
    gid_index: int

    def measure(self, operation: Literal["get", "put"], block_bytes: int, moved_bytes: int) -> Cost:
        """So many bytes in messages of a block. Raises Unavailable where perftest fails."""
        count = max(2 * _FEW, moved_bytes // block_bytes + _FEW)
        idle_cpu_s, idle_wall_s = self._run(_PROGRAMS[operation], block_bytes, _FEW)
        cpu_s, wall_s = self._run(_PROGRAMS[operation], block_bytes, count)
        moved = (count - _FEW) * block_bytes
        return Cost(
            calls=count - _FEW,
            moved_bytes=moved,
            wall_s=max(wall_s - idle_wall_s, 0.0),
            client_cpu_s=max(cpu_s - idle_cpu_s, 0.0),
            server_cpu_s=0.0,
            p50_s=max(wall_s - idle_wall_s, 0.0) / (count - _FEW),
        )

    def _run(self, program: str, block_bytes: int, count: int) -> tuple[float, float]:
        """CPU seconds of both ends, and wall seconds."""
        (port,) = free_ports(1)
        command = [program, "-d", self.port.device, "-i", str(self.port.port.number)]
        command += ["-x", str(self.gid_index), "-s", str(block_bytes), "-n", str(count)]
        command += ["-p", str(port), "-F", "-t", str(_OUTSTANDING)]
        if program == _PROGRAMS["get"]:
            command.append("-e")  # of WRITEs perftest has no events: it polls
        before, started = _children_cpu_s(), time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as server:
            try:
                said = _await_client(command, server)
            finally:
                server.kill()
        if not re.search(rb"BW average", said):
            raise Unavailable(f"{program} measured nothing: {said.decode(errors='replace')}")
        return _children_cpu_s() - before, time.perf_counter() - started


def _await_client(command: list[str], server: subprocess.Popen[bytes]) -> bytes:
    limit = time.monotonic() + _START_TIMEOUT_S
    while True:
        # Until the server listens the client fails at once.
        client = subprocess.run(
            [*command, "127.0.0.1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if client.returncode == 0:
            server.wait(_TIMEOUT_S)
            return client.stdout
        if server.poll() is not None or time.monotonic() > limit:
            raise Unavailable(f"{command[0]} failed: {client.stdout.decode(errors='replace')}")
        time.sleep(0.05)


def _children_cpu_s() -> float:
    used = os.times()
    return used.children_user + used.children_system


def find_perftest() -> None:
    """Raises ConfigError where it is not installed."""
    for program in _PROGRAMS.values():
        if shutil.which(program) is None:
            raise ConfigError(
                f"--transport verbs compares with {program}, which is not there: "
                "apt-get install perftest"
            )
