"""Child processes of a benchmark: a log file each, and an end that is certain.

Every child leads a process group of its own, so that Ctrl-C reaches the parent alone, which then
ends the children in its own order. A parent that dies takes them along (`setpriv --pdeathsig`).
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Final, Self

from rich.console import Console

from hymcache.errors import HymcacheError

TERMINATE_WAIT_S: Final = 5.0
_LOG_LINES_SHOWN: Final = 15


class ChildFailed(HymcacheError):
    """A child process ended, or did not get ready in time.

    `log_lines` are the last of what it wrote; `log_path` has the rest.
    """

    def __init__(self, message: str, log_path: Path, log_lines: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.log_path = log_path
        self.log_lines = tuple(log_lines)


class ChildProcess:
    """One child process, its output in a log file. A context manager: it ends on exit.

    Start children from a thread that lives as long as they shall: the kernel's parent-death
    signal follows the thread.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path,
        *,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        piped: bool = False,
        dies_with_parent: bool = True,
    ) -> None:
        self.name = name
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        setpriv = shutil.which("setpriv") if dies_with_parent else None
        prefix = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*prefix, *command],
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                pass_fds=tuple(pass_fds),
                process_group=0,
                text=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    @property
    def pid(self) -> int:
        """The process id, also that of its group."""
        return self._process.pid

    @property
    def stdin(self) -> IO[str]:
        """The child's standard input; only for a child started with `piped`."""
        if self._process.stdin is None:
            raise ValueError(f"{self.name} was started without a pipe")
        return self._process.stdin

    @property
    def alive(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def failure(self, what: str) -> ChildFailed:
        """The error to raise when this child let us down, with the last lines of its log."""
        code = self._process.poll()
        state = "still running" if code is None else f"ended with status {code}"
        lines = self._log_lines()
        message = f"{self.name}: {what} ({state}); its log is {self.log_path}"
        return ChildFailed(message, self.log_path, lines[-_LOG_LINES_SHOWN:])

    def _log_lines(self) -> list[str]:
        return self.log_path.read_text(errors="replace").splitlines()

    def wait_until_connectable(self, host: str, port: int, timeout_s: float) -> None:
        """Returns once the child accepts connections there.

        Raises:
            ChildFailed: it ended, or `timeout_s` passed.
        """
        deadline = time.monotonic() + timeout_s
        while self.alive:
            with suppress(OSError), socket.create_connection((host, port), timeout=1.0):
                return
            if time.monotonic() > deadline:
                raise self.failure(f"not listening on {host}:{port} after {timeout_s:.0f} s")
            time.sleep(0.05)
        raise self.failure("did not start")

    def wait_for_line(self, beginning: str, timeout_s: float) -> str:
        """The first line of the child's log that starts so.

        Raises:
            ChildFailed: it ended, or `timeout_s` passed.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            alive = self.alive  # asked before the log is read: a line may be its last word
            for line in self._log_lines():
                if line.startswith(beginning):
                    return line
            if not alive:
                raise self.failure("did not start")
            if time.monotonic() > deadline:
                raise self.failure(f"no line {beginning!r} after {timeout_s:.0f} s")
            time.sleep(0.05)

    def wait(self, timeout_s: float) -> bool:
        """Whether the child ended by itself within `timeout_s`."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self, patience_s: float = TERMINATE_WAIT_S) -> None:
        """Ends the child and what it started: SIGTERM, `patience_s`, SIGKILL. Idempotent."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        if self.alive:
            self._process.terminate()
            self.wait(patience_s)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


def free_ports(count: int) -> list[int]:
    """TCP ports on 127.0.0.1 that were free a moment ago, all different."""
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


@contextmanager
def log_shown_on_failure(console: Console) -> Iterator[None]:
    """Prints the end of a failed child's log; the error goes on."""
    try:
        yield
    except ChildFailed as error:
        for line in error.log_lines:
            console.print(f"  | {line}", style="dim", markup=False, highlight=False)
        raise


@contextmanager
def termination_unwinds() -> Iterator[None]:
    """Makes SIGTERM unwind the stack as Ctrl-C does, so that children are ended on the way."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
