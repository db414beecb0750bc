"""The directory of a region from Python: its answers, and processes that die or stop in a store."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hymcache.chm_device.region import Region, RegionFormat
from hymcache.errors import ConfigError, Unavailable
from hymcache.lookup.region_directory import RegionDirectory

SLOT = 64 << 20
FORM = RegionFormat(SLOT, {"model": "tiny"}, 4, 8, 0.3)
SIZE = 5 * SLOT
KEYS = [bytes([i]) * 16 for i in (1, 90, 180)]
DEADLINE_S = 40

STORES = f"""
import sys
from hymcache.chm_device.region import Region
from hymcache.lookup.region_directory import RegionDirectory
content = bytes({SLOT})
with RegionDirectory(Region.attach(sys.argv[1]), name="stores") as directory:
    print("ready", flush=True)
    while True:
        (status,) = directory.put([{KEYS[0]!r}], [content])
        print(status.name, flush=True)
        directory.remove([{KEYS[0]!r}])
"""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RegionDirectory]:
    with RegionDirectory(Region.open(tmp_path / "region", FORM, size_bytes=SIZE)) as made:
        yield made


@contextmanager
def storing(path: str) -> Iterator[subprocess.Popen[str]]:
    """A process that stores an object again and again, so that it is in a store all the time."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", STORES, path], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def stop_in_a_store(process: subprocess.Popen[str], directory: RegionDirectory) -> None:
    """Stops it; where that was a moment too late, lets it go on and tries again."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if directory.lookup(KEYS[:1])[0].name == "PENDING":
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.05)  # for the signal to arrive; well below the lease
            if directory.lookup(KEYS[:1])[0].name == "PENDING":
                return
            process.send_signal(signal.SIGCONT)
        time.sleep(0.001)
    pytest.fail("it was never seen to store")


def wait_until_taken_back(directory: RegionDirectory) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while directory.stats()["reclaimed"] == 0:
        assert time.monotonic() < deadline, directory.core.participants()
        time.sleep(0.01)


def test_answers_are_given_for_each_key(directory: RegionDirectory) -> None:
    assert [s.name for s in directory.put(KEYS[:2], [b"one", b"three"])] == ["OK", "OK"]
    assert [s.name for s in directory.put(KEYS[:1], [b"one"])] == ["STORED_ALREADY"]
    assert [s.name for s in directory.put(KEYS[2:], [bytes(SLOT + 1)])] == ["WRONG_SIZE"]
    assert [s.name for s in directory.lookup(KEYS)] == ["OK", "OK", "MISS"]
    assert directory.leading_hits(KEYS) == 2
    assert directory.leading_hits(KEYS[::-1]) == 0
    into = [bytearray(3), bytearray(5), bytearray(5)]
    assert [s.name for s in directory.get(KEYS, into)] == ["OK", "OK", "MISS"]
    assert into[:2] == [b"one", b"three"]
    assert [s.name for s in directory.get(KEYS[:1], [bytearray(4)])] == ["WRONG_SIZE"]
    with directory.pinned(KEYS) as pinned:
        assert [s.name for s in pinned] == ["OK", "OK", "MISS"]
        assert [s.name for s in directory.remove(KEYS)] == ["FULL", "FULL", "MISS"]
    assert [s.name for s in directory.remove(KEYS)] == ["OK", "OK", "MISS"]
    stats = directory.stats()
    assert (stats["stored"], stats["store_already"], stats["store_wrong_size"]) == (2, 1, 1)
    assert (stats["loaded"], stats["load_miss"], stats["load_wrong_size"]) == (2, 1, 1)
    assert stats["removed"] == 2


def test_what_cannot_be_is_refused(directory: RegionDirectory) -> None:
    with pytest.raises(ConfigError, match="key 0 has 4 bytes, a key has 16"):
        directory.lookup([b"four"])
    with pytest.raises(ValueError, match="buffer 0 is read-only"):
        directory.get(KEYS[:1], [b"fixed"])
    with pytest.raises(ConfigError, match="addresses has the wrong shape"):
        directory.put(KEYS, [b"one"])
    with pytest.raises(ConfigError, match="no pin with ticket 99"):
        directory.core.unpin(99)
    with pytest.raises(ConfigError, match="threads 0 is out of range"):
        RegionDirectory(directory.region, threads=0)


def test_who_is_closed_says_so(directory: RegionDirectory) -> None:
    other = RegionDirectory(directory.region)
    other.close()
    other.close()
    with pytest.raises(Unavailable, match="this directory is closed"):
        other.lookup(KEYS)


def test_a_region_has_places_for_so_many(directory: RegionDirectory) -> None:
    others = [RegionDirectory(directory.region) for _ in range(3)]
    with pytest.raises(Unavailable, match="all 4 places for participants are taken"):
        RegionDirectory(directory.region)
    others[0].close()
    RegionDirectory(directory.region).close()
    for other in others:
        other.close()


def test_who_only_reads_takes_no_place_and_changes_nothing(directory: RegionDirectory) -> None:
    directory.put(KEYS[:1], [b"one"])
    reading = Region.attach(directory.region.path, writable=False)
    with RegionDirectory(reading) as reader:
        assert reader.core.participant == -1
        into = bytearray(3)
        assert [s.name for s in reader.get(KEYS[:1], [into])] == ["OK"]
        assert into == b"one"
        with pytest.raises(ConfigError, match="is open for reading only"):
            reader.remove(KEYS)
    assert len(directory.core.participants()) == 1


def test_a_process_is_killed_in_a_store_and_its_slot_is_taken_back(
    directory: RegionDirectory,
) -> None:
    with storing(directory.region.path) as process:
        stop_in_a_store(process, directory)
        process.kill()
        process.wait(DEADLINE_S)
        assert [s.name for s in directory.put(KEYS[:1], [b"mine"])] == ["PENDING"]
        wait_until_taken_back(directory)
    assert directory.core.usage()["writing"] == 0
    assert [s.name for s in directory.put(KEYS[:1], [b"mine"])] == ["OK"]
    # Its place is free again, its epoch is not.
    assert [p["state"] for p in directory.core.participants()][1] == "free"


def test_a_process_that_was_held_for_dead_loses_its_store_and_joins_anew(
    directory: RegionDirectory,
) -> None:
    with storing(directory.region.path) as process:
        stop_in_a_store(process, directory)
        wait_until_taken_back(directory)
        assert [s.name for s in directory.put(KEYS[:1], [b"mine"])] == ["OK"]
        process.send_signal(signal.SIGCONT)
        assert process.stdout is not None
        answers = {process.stdout.readline().strip() for _ in range(3)}
        assert "LOST" in answers
        deadline = time.monotonic() + DEADLINE_S
        while [p["epoch"] for p in directory.core.participants()] != [1, 2]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
