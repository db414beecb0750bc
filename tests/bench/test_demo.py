"""The main job as a user runs it: two real engines in two processes."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from hymcache.bench.cache_folder import default_cache_dir

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]


def demo(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "hymcache", "demo", *options]
    return subprocess.run(
        [*command, "--cache-dir", str(default_cache_dir())],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )


def test_engine_b_answers_with_the_kv_that_engine_a_computed() -> None:
    run = demo("--prompt-tokens", "1600", "--transport", "tcp")
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"50 +50 +50", run.stdout)
    assert "tcp" in run.stdout
    assert run.stdout.count("yes") == 2


def test_wrong_use_is_one_line_and_exit_code_2() -> None:
    run = demo("--transport", "rdma")
    assert run.returncode == 2
    assert "rdma" in run.stderr
