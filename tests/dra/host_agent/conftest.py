"""A kernel that is emulated, and processes that hold devices."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hymcache.dra.host_agent.sysfs_backend import SysfsBackend
from tests.dra.host_agent.emulated_sysfs import EmulatedSysfs

_HOLD = """
import ctypes, os, sys
how, path = sys.argv[1:]
descriptor = os.open(path, os.O_RDWR)
if how == "map":
    libc = ctypes.CDLL(None)  # Python's own mmap would keep a descriptor
    libc.mmap.restype = ctypes.c_void_p
    assert libc.mmap(None, ctypes.c_size_t(4096), 3, 1, descriptor, ctypes.c_long(0)) != 2**64 - 1
    os.close(descriptor)
print("holding", flush=True)
sys.stdin.readline()
if how == "open":
    os.close(descriptor)
    print("closed", flush=True)
    sys.stdin.readline()
"""


class HoldingProcess:
    """A process that has a device open or mapped. A line lets go of it, another ends it."""

    def __init__(self, path: Path, how: str = "open") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _HOLD, how, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "holding"

    @property
    def pid(self) -> int:
        return self.process.pid

    def close_device(self) -> None:
        self._write()
        assert self._line() == "closed"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)

    def _write(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


Hold = Callable[..., HoldingProcess]


@pytest.fixture
def hold() -> Iterator[Hold]:
    """Starts a process that holds a device; ends it in the end."""
    with ExitStack() as stack:

        def start(path: Path, how: str = "open") -> HoldingProcess:
            holder = HoldingProcess(path, how)
            stack.callback(holder.end)
            return holder

        yield start


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[EmulatedSysfs]:
    """1 GiB at 4 GiB, as the hmem driver leaves it after booting."""
    emulated = EmulatedSysfs(tmp_path / "dev")
    yield emulated
    emulated.close()
    assert emulated.unbound_under == [], "a device was unbound while a process held it"


@pytest.fixture
def backend(kernel: EmulatedSysfs, tmp_path: Path) -> SysfsBackend:
    return SysfsBackend(kernel, tmp_path / "dev")
