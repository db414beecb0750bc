"""Registering memory: in chunks where there is much of it, and what to do when it is refused."""

from __future__ import annotations

import errno
import logging
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from hymcache.errors import DeviceError
from hymcache.limits import GIB, MIB
from hymcache.transport.verbs.library import Access, MemoryRegion, ProtectionDomain

logger = logging.getLogger("hymcache.verbs")

# One call pins a GiB in 0.1 to 0.5 s, in which no other thread of Python runs (pyverbs keeps the
# GIL). Neighbours overlap, so that whatever is not longer lies within one chunk; what overlaps
# counts twice against the memory-lock limit.
OVERLAP_BYTES: Final = 128 * MIB
CHUNK_BYTES: Final = GIB - OVERLAP_BYTES
# Whoever waits longer than this for memory to be registered is told why.
PATIENCE_S: Final = 5.0
_CAP_IPC_LOCK: Final = 14
_ALL_USERS: Final = ["0", "0", "4294967295"]


def chunk_ranges(length: int, region_bytes_max: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of the chunks of `length` bytes."""
    step = min(CHUNK_BYTES, max(region_bytes_max - OVERLAP_BYTES, OVERLAP_BYTES))
    for offset in range(0, length, step):
        yield offset, min(step + OVERLAP_BYTES, length - offset)
        if offset + step + OVERLAP_BYTES >= length:
            return


def locked_bytes(length: int, region_bytes_max: int = 1 << 62) -> int:
    """What the registration of so much memory counts for against the memory-lock limit."""
    return sum(size for _offset, size in chunk_ranges(length, region_bytes_max))


def register_chunks(
    domain: ProtectionDomain,
    address: int,
    length: int,
    access: Access,
    *,
    region_bytes_max: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[MemoryRegion]:
    """All of the memory or, with a DeviceError that names the limit to raise, none of it."""
    regions: list[MemoryRegion] = []
    try:
        for offset, chunk_bytes in chunk_ranges(length, region_bytes_max):
            regions.append(domain.register(address + offset, chunk_bytes, access))
            if progress is not None:
                progress(min(offset + chunk_bytes, length), length)
    except BaseException as error:
        done = sum(region.length for region in regions)
        for region in regions:
            region.close()
        if not isinstance(error, DeviceError):
            raise
        needed = locked_bytes(length, region_bytes_max)
        raise DeviceError(
            f"{error}, after {done / GIB:.1f} of {needed / GIB:.1f} GiB{_fix(error, needed)}",
            error.errno,
        ) from error
    return regions


def register_region(
    domain: ProtectionDomain, address: int, length: int, access: Access
) -> MemoryRegion:
    """Little memory, as one region. Raises DeviceError that names the limit to raise."""
    try:
        return domain.register(address, length, access)
    except DeviceError as error:
        raise DeviceError(f"{error}{_fix(error, length)}", error.errno) from error


class ProgressLog:
    """Tells of the progress with much memory: in the log's details or, when it is slow, to all."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told_at = clock()

    def __call__(self, done_bytes: int, all_bytes: int) -> None:
        """After each chunk."""
        if all_bytes < GIB:
            return
        is_slow = self._clock() - self._told_at >= PATIENCE_S
        if is_slow:
            self._told_at = self._clock()
        logger.log(
            logging.WARNING if is_slow else logging.INFO,
            "registered %.0f of %.0f GiB for RDMA",
            done_bytes / GIB,
            all_bytes / GIB,
        )


def memory_lock_limits() -> tuple[int | None, int | None]:
    """Bytes that this process may lock: soft and hard limit, None for no limit.

    They do not hold for a process that `ignores_lock_limit`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    infinite = resource.RLIM_INFINITY
    return None if soft == infinite else soft, None if hard == infinite else hard


def ignores_lock_limit(proc: Path = Path("/proc/self")) -> bool:
    """Whether the kernel lets this process lock any memory: CAP_IPC_LOCK, but not in a container
    with users of its own.
    """
    with suppress(OSError, ValueError, IndexError):
        (effective,) = [
            int(line.split()[1], 16)
            for line in (proc / "status").read_text().splitlines()
            if line.startswith("CapEff:")
        ]
        users = (proc / "uid_map").read_text().split()
        return bool(effective >> _CAP_IPC_LOCK & 1) and users == _ALL_USERS
    return False


def _fix(error: DeviceError, needed_bytes: int) -> str:
    if error.errno not in (errno.ENOMEM, errno.EAGAIN, errno.EPERM):
        return ""
    soft, _hard = memory_lock_limits()
    if soft is None or ignores_lock_limit():
        return "; not the memory-lock limit: the machine or the device has no room for it"
    return (
        f"; this process may lock {soft / MIB:.0f} MiB: raise the limit (`ulimit -l unlimited`, "
        f"LimitMEMLOCK=infinity) to more than {needed_bytes / MIB:.0f} MiB"
    )
