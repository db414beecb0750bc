"""State files: whole after a crash, one writer at a time, and never another program's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from pydantic import Field

from hymcache.dra.state_file import StateDocument, StateFile, locked, write_atomically
from hymcache.errors import ConfigError, Corrupt, Unavailable


class Counts(StateDocument):
    counts: dict[str, int] = Field(default_factory=dict)


# Adds 1 to a counter as often as it can until it is killed; tells each number that is on disk.
_WRITER = """
import sys
from pathlib import Path
from pydantic import Field
from hymcache.dra.state_file import StateDocument, StateFile

class Counts(StateDocument):
    counts: dict[str, int] = Field(default_factory=dict)

state = StateFile(Path(sys.argv[1]), Counts)
while True:
    with state.change() as document:
        document.counts["n"] = document.counts.get("n", 0) + 1
        document.counts["m"] = document.counts["n"]
    print(document.counts["n"], flush=True)
"""


def test_what_was_changed_is_there_for_the_next_process(tmp_path: Path) -> None:
    state = StateFile(tmp_path / "deep" / "state.json", Counts)
    assert state.load().counts == {}
    with state.change() as document:
        document.counts["a"] = 1
    assert StateFile(state.path, Counts).load().counts == {"a": 1}
    assert state.path.stat().st_mode & 0o777 == 0o600


def test_a_change_that_fails_changes_nothing(tmp_path: Path) -> None:
    state = StateFile(tmp_path / "state.json", Counts)
    with pytest.raises(ZeroDivisionError), state.change() as document:
        document.counts["a"] = 1 // 0
    assert not state.path.exists()


def test_nothing_is_written_where_nothing_changed(tmp_path: Path) -> None:
    state = StateFile(tmp_path / "state.json", Counts)
    with state.change() as document:
        document.counts["a"] = 1
    before = state.path.stat().st_ino
    with state.change() as document:
        document.counts["a"] = 1
    assert state.path.stat().st_ino == before


def test_a_killed_writer_leaves_a_whole_document_and_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    told = 0
    for _ in range(2):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        for _ in range(20):
            told = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        rest, _ = writer.communicate(timeout=10)
        told = int(rest.split()[-1]) if rest.split() else told
        counts = StateFile(path, Counts).load().counts
        # The last change may have come to disk without being told.
        assert counts["n"] in {told, told + 1}
        assert counts["m"] == counts["n"]
    with StateFile(path, Counts, lock_timeout_s=1).change():
        pass


def test_two_processes_lose_no_change(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    told: list[int] = []
    for writer in writers:
        assert writer.stdout is not None
        told += [int(writer.stdout.readline()) for _ in range(20)]
    for writer in writers:
        writer.kill()
        rest, _ = writer.communicate(timeout=10)
        told += [int(line) for line in rest.split("\n")[:-1]]
    # Each number was given out once.
    assert len(set(told)) == len(told)
    assert StateFile(path, Counts).load().counts["n"] >= max(told)


def test_a_lock_that_is_held_is_waited_for_and_then_told(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    release, held = threading.Event(), threading.Event()

    def hold() -> None:
        with locked(path):
            held.set()
            release.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(10)
    start_s = time.monotonic()
    with pytest.raises(Unavailable, match=r"another process has held the lock for 0\.2 s"):
        locked(path, 0.2).__enter__()
    assert 0.15 < time.monotonic() - start_s < 5
    threading.Timer(0.1, release.set).start()
    # Whoever gave up does not get the lock after all: this one does.
    with locked(path, 10):
        pass
    holder.join(10)
    with locked(path, 1):
        pass


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "not JSON"),
        ("[]", "has the layout version None"),
        ('{"version": 2}', "has the layout version 2, this program writes 1"),
        ('{"version": 1, "counts": {"a": "x"}}', "counts.a"),
        ('{"version": 1, "other": 1}', "other"),
    ],
)
def test_what_is_not_a_document_of_this_version_is_refused(
    tmp_path: Path, content: str, told: str
) -> None:
    path = tmp_path / "state.json"
    path.write_text(content)
    with pytest.raises(Corrupt) as caught:
        StateFile(path, Counts).load()
    assert told in str(caught.value)
    assert str(path) in str(caught.value)
    with pytest.raises(Corrupt), StateFile(path, Counts).change():
        pass
    assert path.read_text() == content


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="name a folder of this process"):
        write_atomically(tmp_path / "file" / "state.json", b"{}")


def test_no_temporary_file_stays(tmp_path: Path) -> None:
    for i in range(3):
        write_atomically(tmp_path / "state.json", json.dumps(i).encode(), mode=0o644)
    assert os.listdir(tmp_path) == ["state.json"]  # noqa: PTH208 - the names
    assert (tmp_path / "state.json").stat().st_mode & 0o777 == 0o644
