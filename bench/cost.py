"""What work costs: CPU seconds of the processes that took part, and wall seconds.

CPU seconds per GB are what comparisons rest on: on a machine that others use too they hardly
move, while bandwidth halves from one minute to the next.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cost:
    """Of `calls` calls that moved `moved_bytes` in all."""

    calls: int
    moved_bytes: int
    wall_s: float
    client_cpu_s: float
    server_cpu_s: float
    p50_s: float

    @property
    def cpu_s_per_gb(self) -> float:
        """CPU seconds of client and servers for 10^9 bytes."""
        return (self.client_cpu_s + self.server_cpu_s) / (self.moved_bytes / 1e9)

    @property
    def server_cpu_s_per_call(self) -> float:
        """CPU seconds of the servers for one call."""
        return self.server_cpu_s / self.calls


def process_cpu_s(pid: int) -> float:
    """CPU seconds that all threads of a process have used, running and ended ones.

    Raises:
        ProcessLookupError: there is no such process.
    """
    # The kernel's clock id of another process, as clock_getcpuclockid(3) computes it.
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError as error:
        raise ProcessLookupError(f"no process {pid}") from error


def written_bytes(pid: int) -> int:
    """Bytes that a process has sent to storage, where the file system counts them.

    Raises:
        ProcessLookupError: there is no such process.
    """
    return _status_number(Path(f"/proc/{pid}/io"), "write_bytes:")


def resident_bytes(pid: int) -> int:
    """Resident memory of a process.

    Raises:
        ProcessLookupError: there is no such process.
    """
    return _status_number(Path(f"/proc/{pid}/status"), "VmRSS:") * 1024


def _status_number(path: Path, label: str) -> int:
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ProcessLookupError(f"{path}: no such process") from error
    for line in text.splitlines():
        if line.startswith(label):
            return int(line.split()[1])
    raise ProcessLookupError(f"{path}: the process has ended")


def measure(
    action: Callable[[], object], calls: int, server_pids: Sequence[int], bytes_per_call: int = 0
) -> Cost:
    """Calls `action` so often in this process, and says what it cost here and in the servers."""
    latencies_s = []
    server_before_s = sum(map(process_cpu_s, server_pids))
    client_before_s, started = time.process_time(), time.perf_counter()
    before = started
    for _ in range(calls):
        action()
        now = time.perf_counter()
        latencies_s.append(now - before)
        before = now
    return Cost(
        calls=calls,
        moved_bytes=calls * bytes_per_call,
        wall_s=before - started,
        client_cpu_s=time.process_time() - client_before_s,
        server_cpu_s=sum(map(process_cpu_s, server_pids)) - server_before_s,
        p50_s=statistics.median(latencies_s),
    )
