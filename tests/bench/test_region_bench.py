"""The benchmark of a shared region, short, and its numbers from samples."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hymcache.bench.region_summary import region_numbers
from hymcache.bench.samples import Sample, of_kind, read_samples


def sample(side: str, round_index: int, cpu_s: float) -> Sample:
    return {
        "kind": "region_copy",
        "operation": "load",
        "side": side,
        "round": round_index,
        "block_bytes": 1 << 20,
        "moved_bytes": 10**9,
        "cpu_s": cpu_s,
    }


def test_ratios_are_formed_within_a_round() -> None:
    samples = [
        sample("plain", 1, 3.0),
        sample("reference", 0, 1.0),
        sample("plain", 0, 1.1),
        sample("reference", 1, 2.0),
        sample("reference", 2, 1.0),
        sample("plain", 2, 1.2),
    ]
    numbers = region_numbers(samples)
    assert numbers["region_load_1m"] == pytest.approx(1.2)
    assert numbers["region_load_1m_gb_per_cpu_s"] == pytest.approx(1 / 1.2)
    assert numbers["region_load_1m_reference_gb_per_cpu_s"] == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_quick_run_measures_everything(tmp_path: Path) -> None:
    run = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "hymcache", "bench", "region"),
            *("--out", str(tmp_path), "--quick"),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    for name in ("lookup32_hit_us", "lookup32_miss_us", "load_16m", "load_1m", "load_16m_crc"):
        assert summary[f"region_{name}"] > 0
    copies = of_kind(read_samples(tmp_path / "region.jsonl"), "region_copy")
    assert {(copy["operation"], copy["side"]) for copy in copies} == {
        ("load", "reference"),
        ("load", "plain"),
        ("load", "crc"),
        ("store", "plain"),
        ("store", "crc"),
    }
    assert (tmp_path / "region.png").stat().st_size > 10_000
