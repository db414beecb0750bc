"""`hymcache region`, as its users type it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hymcache.chm_device.region import Region
from hymcache.lookup.region_directory import RegionDirectory

KEYS = [bytes([i]) * 16 for i in (3, 77, 150)]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "region")


def region(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "hymcache", "region", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def formatted(path: str, *options: str) -> RegionDirectory:
    made = region(
        "format", path, "--slot", "64KiB", "--size", "8MiB", "--lease", "300ms", "--pins", "8",
        "--participants", "4", *options
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return RegionDirectory(Region.attach(path), name="the test")


def test_a_region_is_formatted_and_shown(path: str) -> None:
    with formatted(path, "--fact", "model=tiny", "--fact", "block_size=16") as directory:
        directory.put(KEYS, [b"x" * 1000] * 3, name_space=0xAB)
        shown = json.loads(region("inspect", path, "--json", "--entries", "10").stdout)
        assert shown["kind"] in {"file", "memory"}
        assert shown["facts"] == {"model": "tiny", "block_size": 16}
        assert shown["geometry"]["slot_bytes"] == 64 << 10
        assert shown["usage"]["valid"] == 3
        assert shown["usage"]["namespaces"] == [[0xAB, 3, 3000]]
        assert [p["name"] for p in shown["participants"]] == ["the test"]
        assert {entry["key"] for entry in shown["entries"]} == {key.hex() for key in KEYS}
        table = region("inspect", CXL_DAX_DEVICE=path).stdout
        assert "formatted for  block_size=16 model=tiny" in table
        top = region("top", path, "--once").stdout
        assert "00000000000000ab" in top
        assert "the test" in top


def test_a_region_in_use_is_not_formatted_again(path: str) -> None:
    with formatted(path) as directory:
        again = region("format", path, "--slot", "64KiB")
        assert again.returncode == 2
        assert "is formatted already" in again.stderr
        forced = region("format", path, "--slot", "64KiB", "--force")
        assert forced.returncode == 2
        assert "is in use by the test; stop them first" in forced.stderr
        assert directory.lookup(KEYS)[0].name == "MISS"
    assert region("format", path, "--slot", "32KiB", "--force").returncode == 0
    assert Region.attach(path).geometry["slot_bytes"] == 32 << 10


def test_who_joins_while_it_waits_is_seen(path: str) -> None:
    """The first is silent, so formatting waits for its lease; another joins in that time."""
    silent = formatted(path, "--lease", "4s")
    silent.close()
    attached = Region.attach(path)
    command = "-P", "-m", "hymcache", "region", "format", path, "--slot", "64KiB", "--force"
    with (
        RegionDirectory(attached, name="silent", maintain=False),
        subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True) as forced,
    ):
        while not maps(forced.pid, path):
            assert forced.poll() is None, forced.stderr
            time.sleep(0.01)
        time.sleep(0.5)  # it has looked who is there
        with RegionDirectory(attached, name="joined later"):
            assert forced.stderr is not None
            told = forced.stderr.read()
            assert forced.wait(50) == 2
    assert "is in use by joined later; stop them first" in told


def maps(pid: int, path: str) -> bool:
    try:
        return path in Path(f"/proc/{pid}/maps").read_text()
    except ProcessLookupError:
        return False


def test_a_corrupt_object_is_told_and_dropped(path: str) -> None:
    with formatted(path) as directory:
        directory.put(KEYS, [b"x" * 1000] * 3)
        geometry = directory.region.geometry
        (slot, *_) = [entry["slot"] for entry in directory.core.entries(0, geometry["slots"])]
        assert json.loads(region("verify", path, "--json").stdout)["good"] == 3
        with Path(path).open("r+b") as file:
            file.seek(geometry["data_offset"] + slot * geometry["slot_bytes"] + 500)
            file.write(b"y")
        told = region("verify", path)
        assert told.returncode == 1
        assert "2 good, 0 without a checksum, 1 corrupt, left there" in told.stdout
        assert region("verify", path, "--drop").returncode == 1
        assert region("verify", path).returncode == 0
        assert len(directory.core.entries(0, geometry["slots"])) == 2


def test_wiping_leaves_what_is_pinned(path: str) -> None:
    with formatted(path) as directory:
        directory.put(KEYS, [b"x" * 1000] * 3)
        with directory.pinned(KEYS[:1]):
            assert "2 removed, 1 pinned" in region("wipe", path).stdout
            assert [status.name for status in directory.lookup(KEYS)] == ["OK", "MISS", "MISS"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("inspect", "/nowhere"), "/nowhere: does not exist"),
        (("format", "/dev/null", "--slot", "1MiB"), "/dev/null: is not a device-dax"),
        (("format", "{path}", "--slot", "much"), "--slot much: not a size"),
        (("format", "{path}", "--slot", "1MiB", "--fact", "tiny"), "write NAME=VALUE"),
        (("format", "{path}", "--slot", "1MiB", "--lease", "1ms"), "lease_ms 1 is out of range"),
    ],
)
def test_what_cannot_be_is_one_line(path: str, arguments: tuple[str, ...], told: str) -> None:
    Path(path).write_bytes(bytes(8 << 20))
    done = region(*(argument.replace("{path}", path) for argument in arguments))
    assert done.returncode == 2
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1
