"""What is told where guests cannot run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testbed import host_packages

REPOSITORY = Path(__file__).resolve().parents[2]


def test_what_is_missing_is_named_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(host_packages, "SEARCH_PATH", str(tmp_path))
    reason = host_packages.reason_not_to_run(tmp_path)
    assert reason is not None
    assert "qemu-system-x86" in reason
    assert "a guest kernel" in reason
    assert "perftest" in reason
    assert reason.endswith("run deploy/install_system_packages.sh testbed")


def test_an_old_qemu_is_told_by_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qemu = tmp_path / host_packages.QEMU
    qemu.write_text("#!/bin/sh\necho QEMU emulator version 7.2.22\n")
    qemu.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = host_packages.reason_not_to_run(tmp_path)
    assert reason is not None
    assert "QEMU 9.2 or later (this one is 7.2)" in reason


@pytest.mark.parametrize(
    ("ci", "option", "outcome"), [("", "", "skipped"), ("true", "", "errors"), ("", "on", "errors")]
)
def test_guests_are_left_out_with_the_reason_but_never_in_ci(
    tmp_path: Path, ci: str, option: str, outcome: str
) -> None:
    environment = {**os.environ, "CI": ci, "XDG_CACHE_HOME": str(tmp_path)}
    arguments = ["-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'runs'}"]
    if option:
        arguments.append("--require-testbed")
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", *arguments),
            "tests/testbed/test_guests.py::test_a_guest_runs_on_the_files_of_the_host",
        ],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert "a guest kernel: run deploy/install_system_packages.sh testbed" in run.stdout
    assert f"1 {outcome.removesuffix('s')}" in run.stdout.splitlines()[-1]
    assert run.returncode == (0 if outcome == "skipped" else 1)
