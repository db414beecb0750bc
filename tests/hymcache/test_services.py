"""`hymcache up`, `lookup` and `stats` as their user meets them: real processes on this host."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import hymcache
from hymcache.lookup import BlockStatus

START_TIMEOUT_S = 40.0
CONFIG = """
[master]
listen = "127.0.0.1:0"
grpc = "127.0.0.1:0"
http = ""
[node]
name = "n1"
listen = "127.0.0.1:0"
unix = "{folder}/node.sock"
http = ""
[device]
path = "{folder}/device.dat"
capacity = "64MiB"
staging = "16MiB"
write_buffer = "16MiB"
"""


def hymcache_command(*args: str) -> list[str]:
    return [sys.executable, "-m", "hymcache", *args]


def run(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = hymcache_command(*args)
    return subprocess.run(
        command, cwd="/", input=stdin, capture_output=True, text=True, timeout=50, check=False
    )


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "hymcache.toml"
    file.write_text(CONFIG.format(folder=tmp_path))
    return file


@contextmanager
def running(
    *args: str,
) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """The process, and what it printed before it was ready: key -> address."""
    process = subprocess.Popen(
        hymcache_command(*args),
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, listening(process)
    finally:
        process.kill()
        process.communicate()


def listening(process: subprocess.Popen[str]) -> dict[str, str]:
    assert process.stdout is not None
    assert process.stderr is not None
    endpoints: dict[str, str] = {}
    for line in process.stdout:
        if line == "hymcache: ready\n":
            return endpoints
        key, *address = line.split()
        if "." in key:
            (endpoints[key],) = address
    raise AssertionError(f"not ready: {process.stderr.read()}")


def stop(process: subprocess.Popen[str], number: signal.Signals) -> tuple[int, float]:
    started = time.monotonic()
    process.send_signal(number)
    return process.wait(timeout=10), time.monotonic() - started


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_serves_until_a_signal_and_stops_within_a_second(
    config: Path, number: signal.Signals
) -> None:
    with running("up", "-c", str(config)) as (process, endpoints):
        assert set(endpoints) == {"master.listen", "master.grpc", "node.listen", "node.unix"}
        key, absent = b"k" * 16, b"a" * 16
        with hymcache.Client(endpoints["master.listen"]) as client:
            client.put([key], [b"bytes"])
            into = bytearray(5)
            end = time.monotonic() + 5
            # Found once the node has told the master.
            while client.get([key], [into]) != [BlockStatus.OK]:
                assert time.monotonic() < end
            assert into == b"bytes"

        done = run("lookup", "-m", endpoints["master.listen"], "--json", key.hex(), absent.hex())
        assert done.returncode == 0, done.stderr
        found, missing = (json.loads(line) for line in done.stdout.splitlines())
        assert (found["key"], found["location"]["length"]) == (key.hex(), 5)
        assert missing == {"key": absent.hex(), "location": None}

        shown = run("stats", "--grpc", endpoints["master.grpc"])
        assert shown.returncode == 0, shown.stderr
        assert "n1" in shown.stdout
        stats = json.loads(run("stats", "--grpc", endpoints["master.grpc"], "--json").stdout)
        assert [node["name"] for node in stats["nodes"]] == ["n1"]
        assert stats["master"]["objects_listed"] == "1"

        returncode, took_s = stop(process, number)
        assert returncode == 0
        assert took_s < 1.0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_a_node_starts_before_its_master_and_stops_without_it(config: Path) -> None:
    arguments = ("--set", "node.masters=127.0.0.1:1")
    with running("node", "-c", str(config), *arguments) as (process, endpoints):
        assert set(endpoints) == {"node.listen", "node.unix"}
        returncode, took_s = stop(process, signal.SIGTERM)
        assert returncode == 0
        assert took_s < 1.0


@pytest.mark.parametrize("key", ["master.listen", "master.grpc", "master.http", "node.listen"])
def test_a_port_in_use_is_one_line_that_names_the_port_and_the_key(config: Path, key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("up", "-c", str(config), "--set", f"{key}={address}")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"hymcache: {key}")
    assert address in line


def test_a_device_that_cannot_be_is_one_line(config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    done = run("node", "-c", str(config), "--set", f"device.path={tmp_path}/file/device.dat")
    assert done.returncode in {1, 2}
    (line,) = done.stderr.splitlines()
    assert str(tmp_path / "file") in line


def test_keys_can_come_from_a_file(config: Path, tmp_path: Path) -> None:
    key = b"f" * 16
    file = tmp_path / "keys"
    file.write_text(f"{key.hex()}\n\n{'00' * 16}\n")
    with running("up", "-c", str(config)) as (_process, endpoints):
        with hymcache.Client(endpoints["master.listen"]) as client:
            client.put([key], [b"bytes"])
        master = ("-m", endpoints["master.listen"])
        from_file = run("lookup", *master, "--file", str(file))
        from_stdin = run("lookup", *master, "--file", "-", stdin=file.read_text())
        none_found = run("lookup", *master, "00" * 16)
    assert from_file.returncode == 0
    assert "1 of 2 found" in from_file.stdout
    assert from_stdin.stdout == from_file.stdout
    assert none_found.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "returncode", "told"),
    [
        (("lookup",), 2, "no keys"),
        (("lookup", "00"), 2, "is not a key"),
        (("lookup", "zz" * 16), 2, "is not a key"),
        (("lookup", "-m", "nowhere", "00" * 16), 2, "write host:port"),
        (("lookup", "-m", "127.0.0.1:1", "00" * 16), 3, "127.0.0.1:1"),
        (("lookup", "--file", "/absent"), 2, "/absent"),
        (("stats", "--grpc", "127.0.0.1:1", "--set", "client.deadline_s=1"), 3, "127.0.0.1:1"),
        (("stats", "--grpc", "x"), 2, "write host:port"),
    ],
)
def test_a_question_that_cannot_be_answered_is_one_line(
    arguments: tuple[str, ...], returncode: int, told: str
) -> None:
    done = run(*arguments)
    assert done.returncode == returncode
    (line,) = done.stderr.splitlines()
    assert line.startswith("hymcache: ")
    assert told in line


def test_a_second_signal_ends_a_process_that_does_not_stop(config: Path) -> None:
    with running("up", "-c", str(config)) as (process, _endpoints):
        os.kill(process.pid, signal.SIGTERM)
        time.sleep(0.01)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=10) in {0, -signal.SIGTERM}
