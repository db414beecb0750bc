"""`hymcache dra simulate`, as its user starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hymcache.dra.cli import app
from hymcache.errors import ConfigError
from tests.dra.simulator_process import SimulatorProcess

# The slow ones start processes, which takes long on a busy machine.
pytestmark = pytest.mark.timeout(240)


def fault_of(*options: str) -> str:
    """What a wrong option is told with."""
    result = CliRunner().invoke(app, ["simulate", "--listen", "127.0.0.1:0", *options])
    assert isinstance(result.exception, ConfigError)
    return str(result.exception)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--capacity", "9GiB"), "should be a multiple of 8 channels times --block 256MiB"),
        (("--capacity", "9 apples"), '"apples" is not a unit of size'),
        (("--block", "3MiB"), "should be a multiple of 2MiB"),
        (("--capacity", "8PiB"), '"PiB" is not a unit of size'),
        (("--capacity", "16TiB", "--block", "2MiB"), "at most 65536 blocks"),
        (("--host", "Node_1"), "write e.g. node-1"),
        (("--host", "a", "--host", "a"), "name each host once"),
        (("--agent-url", "https://{host}:8443"), "needs --credentials"),
        (("--ca-file", "/ca.pem"), "go with --agent-url"),
    ],
)
def test_a_wrong_option_is_told_in_one_line(options: tuple[str, ...], told: str) -> None:
    fault = fault_of(*options)
    assert told in fault
    assert "\n" not in fault


def test_an_agent_url_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "username").write_text("u")
    (tmp_path / "password").write_text("p")
    options = ("--credentials", str(tmp_path), "--state", str(tmp_path / "state"))
    for url, told in (("{host}", "not an address"), ("ftp://{host}:1", "write e.g. https://")):
        assert told in fault_of("--agent-url", url, *options)


@pytest.mark.slow
def test_a_port_in_use_ends_it_with_a_line_and_code_2(tmp_path: Path) -> None:
    with SimulatorProcess(tmp_path / "first") as first:
        address = first.url.removeprefix("http://")
        second = subprocess.run(
            [sys.executable, "-m", "hymcache", "dra", "simulate", "--listen", address],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert second.returncode == 2
    assert second.stderr.startswith(f"hymcache: --listen = {address}: cannot listen")
    assert second.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_state_of_other_hosts_is_not_taken(tmp_path: Path) -> None:
    SimulatorProcess(tmp_path).stop()
    with pytest.raises(AssertionError, match=r"was made for the hosts node-1, node-2"):
        SimulatorProcess(tmp_path, "--host", "node-3")


@pytest.mark.slow
def test_it_ends_in_time_and_without_a_word_when_it_is_told_to(tmp_path: Path) -> None:
    simulator = SimulatorProcess(tmp_path)
    simulator.process.terminate()
    _, errors = simulator.process.communicate(timeout=20)
    assert simulator.process.returncode == 0
    assert errors == ""
    simulator.http.close()
