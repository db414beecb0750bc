"""Processes in one region, some of them killed or stopped: a short run; region_stress.py says how
to make a long one."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(operations: int, deadline_s: int) -> dict[str, int]:
    seed = random.SystemRandom().getrandbits(32)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.lookup.region_stress", "--seed", str(seed)),
            *("--operations", str(operations), "--deadline-s", str(deadline_s)),
            *("--seconds-min", "12"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=deadline_s + 60,
        check=False,
    )
    assert done.returncode == 0, f"--seed {seed}\n{done.stderr}"
    counted: dict[str, int] = json.loads(done.stdout)
    return counted


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_false_hit_no_wrong_byte_no_slot_lost() -> None:
    counted = run(150_000, 200)
    assert counted["operations"] >= 150_000
    # It has been through what it is for.
    for name in ("stored", "loaded", "lookup_hits", "evicted_for_room", "killed", "buried"):
        assert counted[name] > 0, counted
