"""Commands for a guest through a folder that host and guest both see."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# The agent ends a command itself; if it has not after this long beyond the deadline, the guest
# hangs. Emulated on a busy machine, some seconds are nothing.
GRACE_S = 30.0

_POLL_S = 0.02
_ENDED_BY_DEADLINE = (124, 137)
_SHOWN_CHARS = 4000


class CommandFailed(Exception):
    """A command ended with another status than 0."""


class CommandTimeout(Exception):
    """A command was ended because it took too long."""


class GuestDown(Exception):
    """The guest has ended or does not answer."""


@dataclass(frozen=True)
class CommandResult:
    """How a command ended and what it printed."""

    status: int
    stdout: str
    stderr: str


class GuestCommand:
    """A command that runs in a guest."""

    def __init__(
        self, folder: Path, shown: str, deadline_s: float, check_guest: Callable[[], None]
    ) -> None:
        self._folder = folder
        self._shown = shown
        self._deadline_s = deadline_s
        self._check_guest = check_guest
        self._started = time.monotonic()

    @property
    def stdout(self) -> str:
        """What it has printed until now."""
        return self._read("stdout")

    @property
    def stderr(self) -> str:
        """What it has printed as errors until now."""
        return self._read("stderr")

    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        text = self._read("status")
        return int(text) if text.endswith("\n") else None

    def wait_started(self) -> int:
        """Waits until it runs; the id of its process group in the guest."""
        limit = time.monotonic() + GRACE_S
        while not (text := self._read("pid")).endswith("\n"):
            self._check_guest()
            if time.monotonic() > limit:
                raise GuestDown(self._account("was not started: the guest hangs"))
            time.sleep(_POLL_S)
        return int(text)

    def wait_for_output(self, text: str, *, deadline_s: float = 60.0) -> str:
        """What it has printed once `text` is in it; CommandFailed if it ends without."""
        limit = time.monotonic() + deadline_s
        while True:
            status = self.status()  # before the output, so that the last line is not missed
            if text in (printed := self.stdout):
                return printed
            if status is not None:
                raise CommandFailed(self._account(f"ended with {status} without {text!r}"))
            if time.monotonic() > limit:
                raise CommandTimeout(self._account(f"did not print {text!r} in {deadline_s:g} s"))
            self._check_guest()
            time.sleep(_POLL_S)

    def wait(self, *, check: bool = True, grace_s: float = GRACE_S) -> CommandResult:
        """Waits for its end; with `check` a status other than 0 is CommandFailed.

        A guest that has not ended it `grace_s` after its deadline is GuestDown.
        """
        limit = self._started + self._deadline_s + grace_s
        while (status := self.status()) is None:
            self._check_guest()
            if time.monotonic() > limit:
                raise GuestDown(self._account("neither ended nor could be ended: the guest hangs"))
            time.sleep(_POLL_S)
        took_s = time.monotonic() - self._started
        if status in _ENDED_BY_DEADLINE and took_s >= self._deadline_s:
            raise CommandTimeout(self._account(f"was ended after {self._deadline_s:g} s"))
        if check and status != 0:
            raise CommandFailed(self._account(f"ended with {status}"))
        return CommandResult(status, self.stdout, self.stderr)

    def _read(self, name: str) -> str:
        try:
            return (self._folder / name).read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def _account(self, what: str) -> str:
        lines = [f"{self._folder}: the command {what}", "--- command", self._shown]
        for name in ("stdout", "stderr"):
            lines += [f"--- {name}", self._read(name)[-_SHOWN_CHARS:]]
        return "\n".join(lines)


class CommandChannel:
    """The host's end; guest/agent.sh is the other."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], check_guest: Callable[[], None]
    ) -> None:
        self._folder = folder
        self._preamble = "".join(
            f"export {name}={shlex.quote(value)}\n" for name, value in environment.items()
        )
        self._check_guest = check_guest
        self._count = 0
        folder.mkdir(parents=True)

    def wait_ready(self, deadline_s: float) -> None:
        """Waits for the agent; GuestDown if it does not come."""
        limit = time.monotonic() + deadline_s
        while not (self._folder / "ready").exists():
            self._check_guest()
            if time.monotonic() > limit:
                raise GuestDown(f"{self._folder}: the guest did not come up in {deadline_s:g} s")
            time.sleep(_POLL_S)

    def start(self, script: str, *, deadline_s: float) -> GuestCommand:
        """Hands `script` to bash in the guest, beside what else runs there."""
        return self._start("script", self._preamble + script, script, deadline_s)

    def start_python(self, argv: Sequence[str], *, deadline_s: float) -> GuestCommand:
        """The same for a module and its arguments, which a python_server.py runs."""
        shown = shlex.join(["python", "-m", *argv])
        return self._start("argv", json.dumps(argv), shown, deadline_s)

    def _start(self, name: str, content: str, shown: str, deadline_s: float) -> GuestCommand:
        self._count += 1
        folder = self._folder / str(self._count)
        # Complete when the agent sees it.
        making = self._folder / f"{self._count}.making"
        making.mkdir()
        (making / name).write_text(content)
        (making / "deadline").write_text(f"{deadline_s:g}\n")
        making.rename(folder)
        return GuestCommand(folder, shown, deadline_s, self._check_guest)
