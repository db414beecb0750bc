"""In a guest: `dax_bytes.py write|verify DEVICE OFFSET BYTES SEED` through a mapping."""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.testbed.guest import Guest

ALIGNMENT = 2 << 20


def move_dax_bytes(guest: Guest, action: str, device: str, *numbers: int) -> None:
    """For tests on the host: has the guest run this; `numbers` are offset, count and seed."""
    guest.run_python("tests.testbed.dax_bytes", action, device, *map(str, numbers))


def main(action: str, device: str, offset: int, count: int, seed: str) -> None:
    expected = hashlib.shake_128(seed.encode()).digest(count)
    start = offset // ALIGNMENT * ALIGNMENT
    length = -(-(offset - start + count) // ALIGNMENT) * ALIGNMENT
    descriptor = os.open(device, os.O_RDWR)
    with mmap.mmap(
        descriptor, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=start
    ) as memory:
        here = slice(offset - start, offset - start + count)
        if action == "write":
            memory[here] = expected
        elif memory[here] != expected:
            sys.exit(f"{device}: what is at {offset} differs")
    os.close(descriptor)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
