"""In a guest: holds a DAX device until it is killed.

    guest_holder.py DEVICE map     mapped, the descriptor closed
    guest_holder.py DEVICE rdma    registered with rxe0 for RDMA, neither mapped nor open

Prints "PID is holding" when it does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from importlib import import_module
from typing import Any

_BYTES = 2 << 20


def _map(path: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    descriptor = os.open(path, os.O_RDWR)
    address = libc.mmap(None, ctypes.c_size_t(_BYTES), 3, 1, descriptor, ctypes.c_long(0))
    assert address not in {None, 2**64 - 1}, ctypes.get_errno()
    os.close(descriptor)
    ctypes.memmove(address, b"held", 4)
    return int(address)


def _register(address: int) -> Any:
    # By name: Debian's pyverbs has no types, and is not everywhere.
    enums, device, mr, pd = (
        import_module(f"pyverbs.{name}") for name in ("enums", "device", "mr", "pd")
    )
    domain = pd.PD(device.Context(name="rxe0"))
    access = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_READ
    region = mr.MR(domain, _BYTES, access, address=address)
    # The registration stays, and nothing in /proc shows it.
    libc = ctypes.CDLL(None)
    assert libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(_BYTES)) == 0
    return region


def main(path: str, how: str) -> None:
    address = _map(path)
    kept = _register(address) if how == "rdma" else None
    sys.stdout.write(f"{os.getpid()} is holding\n")
    sys.stdout.flush()
    signal.pause()
    del kept


if __name__ == "__main__":
    main(*sys.argv[1:])
