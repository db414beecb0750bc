from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from hymcache.bench.child_process import (
    ChildFailed,
    ChildProcess,
    free_ports,
    termination_unwinds,
)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_the_log_has_what_the_child_printed(tmp_path: Path) -> None:
    with ChildProcess("child", python("print('ready 7')"), tmp_path / "log") as child:
        assert child.wait_for_line("ready", 20.0) == "ready 7"


def test_a_failure_names_the_child_its_status_and_the_end_of_its_log(tmp_path: Path) -> None:
    code = "import sys; print('cannot open the device'); sys.exit(3)"
    with (
        ChildProcess("storage node", python(code), tmp_path / "log") as child,
        pytest.raises(ChildFailed, match=r"storage node: .*status 3.*log") as caught,
    ):
        child.wait_for_line("ready", 20.0)
    assert caught.value.log_lines == ("cannot open the device",)
    assert "\n" not in str(caught.value)


def test_waiting_has_a_deadline(tmp_path: Path) -> None:
    with ChildProcess("child", python("import time; time.sleep(60)"), tmp_path / "log") as child:
        (port,) = free_ports(1)
        with pytest.raises(ChildFailed, match="still running"):
            child.wait_until_connectable("127.0.0.1", port, timeout_s=0.2)


def test_a_child_that_ignores_termination_is_killed_with_its_own_children(tmp_path: Path) -> None:
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "grandchild = subprocess.Popen(['sleep', '300'])\n"
        "print('ready', grandchild.pid, flush=True)\n"
        "time.sleep(300)\n"
    )
    with ChildProcess("child", python(code), tmp_path / "log") as child:
        grandchild = int(child.wait_for_line("ready", 20.0).split()[1])
        child.end(patience_s=0.3)
        assert not child.alive
    assert not _runs(grandchild)


def _runs(pid: int) -> bool:
    # A killed orphan stays for a moment, until init has taken note of it.
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
        if state == "Z":
            return False
        time.sleep(0.02)
    return True


def test_free_ports_differ() -> None:
    assert len(set(free_ports(20))) == 20


def test_sigterm_unwinds() -> None:
    with pytest.raises(KeyboardInterrupt), termination_unwinds():
        signal.raise_signal(signal.SIGTERM)
