"""In a guest: runs Python commands as copies of itself, which has imported what they need.

    python_server.py MODULE...      what to import; prints "ready"

An emulated processor takes 15 s to start `python -m hymcache`, and no time to fork. Standard input
names one command's folder a line: in `argv` is a module and its arguments, and the rest is as in
guest/agent.sh, which hands these commands on.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

_ENDED_BY_DEADLINE = 124


def _become(folder: Path) -> NoReturn:
    """This process is as if it had been started for the command."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        opened = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    module, *arguments = json.loads((folder / "argv").read_text())
    sys.argv = [module, *arguments]
    if not hasattr(sys.modules.get(module), "__path__"):
        sys.modules.pop(module, None)  # it runs anew, as __main__
    status = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if isinstance(error.code, str):
            sys.stderr.write(error.code + "\n")
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        status = 1
    # The interpreter's own end would touch, and so copy, every object that was imported.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@dataclass
class _Command:
    folder: Path
    ends_at: float
    expired: bool = False


class Server:
    """Commands that run, by their process groups."""

    def __init__(self) -> None:
        self._commands: dict[int, _Command] = {}
        self._woken, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)

    def run(self) -> None:
        """Until standard input ends."""
        pending = b""
        while True:
            ready, _, _ = select.select([0, self._woken], [], [], self._left_s())
            if self._woken in ready:
                os.read(self._woken, 4096)
            self._end_late()
            self._reap()
            if 0 in ready:
                read = os.read(0, 4096)
                if not read:
                    return
                *lines, pending = (pending + read).split(b"\n")
                for line in lines:
                    self._start(Path(os.fsdecode(line)))

    def _start(self, folder: Path) -> None:
        ends_at = time.monotonic() + float((folder / "deadline").read_text())
        child = os.fork()
        if not child:
            _become(folder)
        with contextlib.suppress(OSError):  # whoever is first of the two
            os.setpgid(child, child)
        self._commands[child] = _Command(folder, ends_at)
        (folder / "pid").write_text(f"{child}\n")

    def _left_s(self) -> float | None:
        ends = [c.ends_at for c in self._commands.values() if not c.expired]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _end_late(self) -> None:
        for child, command in self._commands.items():
            if not command.expired and time.monotonic() >= command.ends_at:
                command.expired = True
                os.killpg(child, signal.SIGKILL)

    def _reap(self) -> None:
        while self._commands:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                return
            command = self._commands.pop(child)
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                code = _ENDED_BY_DEADLINE if command.expired else 128 - code
            (command.folder / "status").write_text(f"{code}\n")


def main(modules: list[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"a copy would lack the {threads - 1} threads of what was imported"
    gc.collect()
    gc.freeze()  # what is collected in a copy is looked at, and so copied
    server = Server()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    server.run()


if __name__ == "__main__":
    main(sys.argv[1:])
