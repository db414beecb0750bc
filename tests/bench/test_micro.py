"""The micro benchmark with the real service, short."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hymcache.bench.samples import of_kind, read_samples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "hymcache", "bench", *options],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_a_quick_run_measures_everything(tmp_path: Path) -> None:
    run = bench("micro", "--out", str(tmp_path), "--quick", "--no-engine")
    assert run.returncode == 0, run.stdout + run.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    for name in ("shm_get_16m", "shm_put_16m", "shm_get_1m", "tcp_get_16m", "tcp_put_16m"):
        assert summary[name] > 0
    assert 0 < summary["lookup32_server_us"] < 1000
    assert 64 <= summary["metadata_bytes_per_object"] <= 102.4
    assert summary["hit_ttft_ratio"] is None
    assert summary["notes"]["hit_ttft_ratio"] == "left out by --no-engine"

    copies = of_kind(read_samples(tmp_path / "micro.jsonl"), "copy")
    read_from_device = {sample["side"] for sample in copies if sample["device_read_bytes"] > 0}
    assert read_from_device == {"device"}
    assert (tmp_path / "micro.png").stat().st_size > 10_000
    assert not list(tmp_path.rglob("device.dat"))


def test_lengths_that_cannot_be_are_told(tmp_path: Path) -> None:
    run = bench("ttft", "--out", str(tmp_path), "--tokens", "2k")
    assert run.returncode == 2
    assert "--tokens 2k" in run.stderr
