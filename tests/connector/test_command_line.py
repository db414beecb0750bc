"""vLLM as it is installed here: users go on from the demo with its own command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]


def test_vllm_knows_its_version() -> None:
    command = Path(sys.executable).with_name("vllm")
    done = subprocess.run(
        [command, "--version"], check=False, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith("0.")
