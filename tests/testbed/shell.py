"""A person's terminal on the shells of two guests, one at a time."""

from __future__ import annotations

import os
import selectors
import shutil
import socket
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.testbed.guest import Guest
from tests.testbed.testbed import Testbed

SWITCH_KEY = b"\x1d"  # Ctrl-]
END_KEY = b"\x1c"  # Ctrl-\

_CHUNK_BYTES = 4096
# The end of what a guest prints while the other is looked at.
_KEPT_BYTES = 64 << 10
_CHECK_S = 1.0


class Shell:
    """Switches between the guests of a testbed that was started with a size of terminal."""

    def __init__(self, testbed: Testbed) -> None:
        self._testbed = testbed
        self._stack = ExitStack()
        self._sockets: dict[str, socket.socket] = {}
        self._kept: dict[str, bytes] = {}
        self._shown = testbed.first

    def run(self) -> None:
        """Returns after END_KEY, at the end of the input, or when a guest is down."""
        with self._stack, selectors.DefaultSelector() as selector, _raw_terminal():
            for guest in self._testbed.guests:
                connection = _connected(guest.terminal, self._stack)
                self._sockets[guest.name] = connection
                self._kept[guest.name] = b""
                selector.register(connection, selectors.EVENT_READ, guest)
            selector.register(sys.stdin.fileno(), selectors.EVENT_READ, None)
            self._show(self._testbed.first)
            while all(guest.is_running() for guest in self._testbed.guests):
                for key, _events in selector.select(_CHECK_S):
                    alive = self._take_input() if key.data is None else self._print(key.data)
                    if not alive:
                        return

    def _take_input(self) -> bool:
        typed = os.read(sys.stdin.fileno(), _CHUNK_BYTES)
        if not typed or END_KEY in typed:
            return False
        for number, part in enumerate(typed.split(SWITCH_KEY)):
            if number:
                first, second = self._testbed.guests
                self._show(second if self._shown is first else first)
            self._sockets[self._shown.name].sendall(part)
        return True

    def _print(self, guest: Guest) -> bool:
        printed = self._sockets[guest.name].recv(_CHUNK_BYTES)
        if guest is self._shown:
            _write(printed)
        else:
            self._kept[guest.name] = (self._kept[guest.name] + printed)[-_KEPT_BYTES:]
        return bool(printed)

    def _show(self, guest: Guest) -> None:
        self._shown = guest
        _write(f"\r\n--- {guest.name} ({guest.address})\r\n".encode())
        _write(self._kept[guest.name])
        self._kept[guest.name] = b""
        # So that a prompt that came before we did is seen again.
        self._sockets[guest.name].sendall(b"\n")


def terminal_size() -> tuple[int, int]:
    """(columns, lines) of the terminal that this process runs in."""
    return shutil.get_terminal_size()


def _connected(path: Path, stack: ExitStack) -> socket.socket:
    connection = stack.enter_context(socket.socket(socket.AF_UNIX))
    connection.connect(str(path))
    return connection


def _write(text: bytes) -> None:
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()


@contextmanager
def _raw_terminal() -> Iterator[None]:
    descriptor = sys.stdin.fileno()
    if not os.isatty(descriptor):
        yield
        return
    before = termios.tcgetattr(descriptor)
    tty.setraw(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
