"""`make testbed`, as a person at a terminal uses it."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed.guest_image import GuestImage
from tests.testbed.shell import END_KEY, SWITCH_KEY

REPOSITORY = Path(__file__).resolve().parents[2]

# Guests of its own, of the kind that people get; this tells when their turn is.
pytestmark = pytest.mark.testbed("cxl")


class Terminal:
    """`python -m tests.testbed` at the other end of a terminal."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.testbed", *arguments],
            cwd=REPOSITORY,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self._seen = b""

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def wait_for(self, text: bytes, *, deadline_s: float = 120.0) -> bytes:
        """What was printed up to and with `text`, since the last time."""
        limit = time.monotonic() + deadline_s
        while text not in self._seen:
            ready, _, _ = select.select([self._master], [], [], limit - time.monotonic())
            assert ready, f"no {text!r} in {self._seen!r}"
            self._seen += os.read(self._master, 4096)
        found, _, self._seen = self._seen.partition(text)
        return found + text

    def children(self) -> list[int]:
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(child) for task in tasks for child in task.read_text().split()]

    def close(self) -> None:
        self.process.kill()
        self.process.wait(timeout=30)
        os.close(self._master)


@pytest.fixture
def terminal(guest_image: GuestImage) -> Iterator[Terminal]:
    assert guest_image.kernel.exists()
    terminal = Terminal()
    yield terminal
    terminal.close()


def test_a_person_has_a_shell_in_each_guest(terminal: Terminal) -> None:
    told = terminal.wait_for(b"--- alpha (192.168.77.1)")
    folder = Path(told.split(b"files for both: ")[1].split()[0].decode())
    terminal.wait_for(b"alpha:/# ")
    terminal.type(b"echo $((6 * 7)) from $(hostname) >>" + os.fsencode(folder) + b"/said\n")
    terminal.wait_for(b"alpha:/# ")
    terminal.type(SWITCH_KEY)
    terminal.wait_for(b"--- beta (192.168.77.2)")
    terminal.type(b"cat " + os.fsencode(folder) + b"/said\n")
    terminal.wait_for(b"42 from alpha")
    # What the other prints meanwhile is shown when it is looked at again.
    terminal.type(SWITCH_KEY + b"sleep 2; echo $((100 + 11)); rdma link\n" + SWITCH_KEY)
    terminal.wait_for(b"--- beta")
    terminal.type(b"sleep 4; echo $((200 + 22))\n")
    assert b"111" not in terminal.wait_for(b"222")
    terminal.type(SWITCH_KEY)
    terminal.wait_for(b"111")
    terminal.wait_for(b"rxe0/1 state ACTIVE")
    terminal.type(END_KEY)
    terminal.wait_for(b"testbed: ended")
    assert terminal.process.wait(timeout=30) == 0
    assert not folder.exists()


def test_guests_end_with_the_process_that_started_them(terminal: Terminal) -> None:
    limit = time.monotonic() + 60
    while len(guests := terminal.children()) < 2:
        assert time.monotonic() < limit
        time.sleep(0.05)
    terminal.process.kill()
    terminal.process.wait(timeout=30)
    while any(Path(f"/proc/{guest}").exists() for guest in guests):
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_an_unknown_profile_is_told_with_the_known(guest_image: GuestImage) -> None:
    assert guest_image.kernel.exists()
    run = subprocess.run(
        [sys.executable, "-m", "tests.testbed", "--profile", "rex"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 1
    assert run.stderr == "testbed: no profile 'rex': take one of rxe, hmem, cxl\n"
