from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer.main

import hymcache
from hymcache.cli import application


def run(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command as a user starts it, away from the sources."""
    return subprocess.run(
        [sys.executable, "-m", "hymcache", *args],
        cwd="/",
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"hymcache {hymcache.__version__}\n")


def test_help_lists_the_commands() -> None:
    done = run("--help")
    assert done.returncode == 0
    for command in ("up", "master", "node", "lookup", "stats", "config", "bench", "demo"):
        assert re.search(rf"^\W*{command}\b", done.stdout, re.MULTILINE), command


def test_every_command_and_parameter_has_a_help_text() -> None:
    pending = [("hymcache", typer.main.get_command(application.app))]
    seen = 0
    while pending:
        name, command = pending.pop()
        seen += 1
        assert command.help, name
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{name} {parameter.name}"
        pending += [(f"{name} {sub}", c) for sub, c in getattr(command, "commands", {}).items()]
    assert seen > 8


def test_a_wrong_command_is_told_with_exit_code_2() -> None:
    done = run("upp")
    assert done.returncode == 2
    assert "upp" in done.stderr
    assert "Traceback" not in done.stderr


def test_config_check_prints_what_is_in_force_without_the_secret(tmp_path: Path) -> None:
    file = tmp_path / "hymcache.toml"
    file.write_text('secret = "hunter2"\n[device]\ncapacity = "3GiB"\n')
    done = run("config", "check", str(file), HYMCACHE_NODE__NAME="from-environment")
    assert done.returncode == 0
    assert done.stderr == ""
    assert "hunter2" not in done.stdout
    in_force = tomllib.loads(done.stdout)
    assert in_force["device"]["capacity"] == "3GiB"
    assert in_force["node"]["name"] == "from-environment"


@pytest.mark.parametrize("command", [("config", "check"), ("up", "-c"), ("node", "--config")])
def test_a_wrong_configuration_is_one_line_and_exit_code_2(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    file = tmp_path / "hymcache.toml"
    file.write_text('[device]\ncapacty = "3GiB"\n')
    done = run(*command, str(file))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"hymcache: {file}: device.capacty: unknown key; did you mean device.capacity?\n"
    )


def test_a_missing_secret_file_is_a_wrong_configuration(tmp_path: Path) -> None:
    file = tmp_path / "hymcache.toml"
    file.write_text(f'secret_file = "{tmp_path}/absent"\n')
    done = run("config", "check", str(file))
    assert done.returncode == 2
    assert done.stderr.startswith("hymcache: secret_file = ")
    assert len(done.stderr.splitlines()) == 1


def test_a_fault_of_our_own_is_one_line_unless_the_trace_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(**_options: object) -> None:
        raise RuntimeError("spilled")

    monkeypatch.setattr(application, "app", broken)
    monkeypatch.delenv(application.TRACEBACK_VARIABLE, raising=False)
    with pytest.raises(SystemExit) as left:
        application.main()
    assert left.value.code == 70
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hymcache: internal error: RuntimeError: spilled")

    monkeypatch.setenv(application.TRACEBACK_VARIABLE, "1")
    with pytest.raises(RuntimeError, match="spilled"):
        application.main()
