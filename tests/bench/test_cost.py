from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from hymcache.bench.cost import Cost, measure, process_cpu_s, resident_bytes


def burn(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_cost_for_a_gigabyte_adds_client_and_server() -> None:
    cost = Cost(
        calls=4,
        moved_bytes=2_000_000_000,
        wall_s=1.0,
        client_cpu_s=0.3,
        server_cpu_s=0.1,
        p50_s=0.2,
    )
    assert cost.cpu_s_per_gb == pytest.approx(0.2)
    assert cost.server_cpu_s_per_call == pytest.approx(0.025)


def test_measure_counts_this_process_and_no_sleep() -> None:
    def work() -> None:
        burn(0.02)
        time.sleep(0.03)

    cost = measure(work, 3, [], bytes_per_call=10)
    assert cost.calls == 3
    assert cost.moved_bytes == 30
    assert 0.06 <= cost.client_cpu_s < 0.12
    assert cost.wall_s >= 0.15
    assert cost.p50_s >= 0.05


def test_the_clock_of_another_process_runs_while_it_works() -> None:
    code = "import sys\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as worker:
        try:
            before = process_cpu_s(worker.pid)
            deadline = time.monotonic() + 20.0
            while process_cpu_s(worker.pid) < before + 0.05 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert process_cpu_s(worker.pid) >= before + 0.05
        finally:
            worker.kill()
    with pytest.raises(ProcessLookupError):
        process_cpu_s(worker.pid)
    with pytest.raises(ProcessLookupError):
        resident_bytes(worker.pid)


def test_resident_memory_grows_with_what_is_touched() -> None:
    before = resident_bytes(os.getpid())
    block = bytearray(b"x") * (32 << 20)
    assert resident_bytes(os.getpid()) - before > 24 << 20
    del block
