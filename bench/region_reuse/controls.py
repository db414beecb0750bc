"""What makes a run of the region's tier worth believing, and how fast its bytes can move.

region_start        one engine formatted the region, the other one found it
probe_region        keys that were never stored are not found; those that were, are
measure_copy_paths  loads straight into place and by way of a staging buffer, and stores
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hymcache._core import RegionStatus
from hymcache.bench.region_bench import require_all
from hymcache.bench.region_reuse.stats import FALSE_HIT_KEYS_MIN
from hymcache.chm_device.region import Region
from hymcache.lookup.keys import KEY_BYTES, object_keys
from hymcache.lookup.namespace import Fingerprint
from hymcache.lookup.region_directory import RegionDirectory

_KEYS_AT_ONCE: Final = 32
_SLOTS_AT_ONCE: Final = 4096
_COPIED_BYTES_MAX: Final = 512 << 20
_ROUNDS: Final = 3
_HASH_BYTES: Final = 32
_FORMATTED: Final = "formatted the region"
_ATTACHED: Final = "attached to the region"


def region_start(*logs: Path) -> dict[str, int]:
    """How many engines say that they formatted the region, and how many that they found it."""
    texts = [log.read_text(encoding="utf-8", errors="replace") for log in logs]
    return {
        "formatted": sum(text.count(_FORMATTED) for text in texts),
        "attached": sum(text.count(_ATTACHED) for text in texts),
    }


def probe_region(path: Path, rng: random.Random) -> dict[str, int]:
    """Looks up keys as engines make them, in the namespaces that the region holds.

    Half of them are of hashes that no prompt has; the other half are keys of stored objects with
    one bit changed, so they fall on slots that are in use.
    """
    with _open(path, verify_checksums=True) as directory:
        stored = stored_keys(directory)
        spaces = [space for space, _, _ in directory.core.usage()["namespaces"]]
        keys = [
            object_keys(Fingerprint(rng.choice(spaces)), [rng.randbytes(_HASH_BYTES)])
            for _ in range(FALSE_HIT_KEYS_MIN)
        ]
        keys += [_one_bit_off(rng.choice(stored), rng) for _ in range(FALSE_HIT_KEYS_MIN)]
        known = frozenset(stored)
        return {
            "keys": len(keys),
            "hits": _hits(directory, [key for key in keys if key not in known]),
            "stored_keys": len(stored),
            "stored_found": _hits(directory, stored),
        }


def measure_copy_paths(path: Path) -> Iterator[dict[str, object]]:
    """Times copies of what the region holds, in rounds that take turns: bytes and seconds each."""
    cpus = len(os.sched_getaffinity(0))
    paths = {
        "load, direct": (1, _direct),
        f"load, direct, {cpus} threads": (cpus, _direct),
        "load, staged": (1, _staged),
        "store": (1, _store),
        f"store, {cpus} threads": (cpus, _store),
    }
    cases = {
        f"{name}{ending}": (verify, threads, copy)
        for name, (threads, copy) in paths.items()
        for ending, verify in ((", crc32c", True), ("", False))
    }
    for turn in range(_ROUNDS):
        for name, (verify, threads, copy) in cases.items():
            with _open(path, verify_checksums=verify, threads=threads) as directory:
                moved, seconds = copy(directory)
            yield {"path": name, "round": turn, "bytes": moved, "seconds": seconds}
        moved, seconds = _plain_copy(path)
        yield {"path": "plain copy", "round": turn, "bytes": moved, "seconds": seconds}


def stored_keys(directory: RegionDirectory) -> list[bytes]:
    """The keys of all objects of a region."""
    slots = directory.region.geometry["slots"]
    return [
        entry["key"]
        for first in range(0, slots, _SLOTS_AT_ONCE)
        for entry in directory.core.entries(first, min(_SLOTS_AT_ONCE, slots - first))
        if entry["state"] == "valid"
    ]


@contextmanager
def _open(path: Path, *, verify_checksums: bool, threads: int = 1) -> Iterator[RegionDirectory]:
    with RegionDirectory(
        Region.attach(path), name="bench", threads=threads, verify_checksums=verify_checksums
    ) as directory:
        yield directory


def _hits(directory: RegionDirectory, keys: list[bytes]) -> int:
    found = 0
    for first in range(0, len(keys), _KEYS_AT_ONCE):
        statuses = directory.core.lookup(b"".join(keys[first : first + _KEYS_AT_ONCE]))
        found += statuses.count(RegionStatus.OK)
    return found


def _one_bit_off(key: bytes, rng: random.Random) -> bytes:
    bit = rng.randrange(KEY_BYTES * 8)
    changed = int.from_bytes(key, "little") ^ (1 << bit)
    return changed.to_bytes(KEY_BYTES, "little")


def _objects(directory: RegionDirectory) -> tuple[bytes, int, int]:
    """Keys of objects of one size, that size, and how many."""
    slot_bytes = directory.region.geometry["slot_bytes"]
    keys = stored_keys(directory)[: max(1, _COPIED_BYTES_MAX // slot_bytes)]
    return b"".join(keys), slot_bytes, len(keys)


def _direct(directory: RegionDirectory) -> tuple[int, float]:
    keys, size, count = _objects(directory)
    target = _touched(size * count)
    addresses = _addresses(target, size, count)
    return _timed(lambda: _load(directory, keys, addresses, size), size * count)


def _staged(directory: RegionDirectory) -> tuple[int, float]:
    keys, size, count = _objects(directory)
    target, buffer = _touched(size * count), _touched(size)
    into_buffer = _addresses(buffer, size, 1)

    def load() -> None:
        for index in range(count):
            key = keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]
            _load(directory, key, into_buffer, size)
            target[index * size : (index + 1) * size] = buffer

    return _timed(load, size * count)


def _store(directory: RegionDirectory) -> tuple[int, float]:
    keys, size, count = _objects(directory)
    source = _touched(size * count)
    addresses = _addresses(source, size, count)
    each = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]

    def store() -> float:
        directory.remove(each)
        started = time.perf_counter()
        require_all(directory.core.store(keys, addresses, _sizes(size)))
        return time.perf_counter() - started

    store()
    return size * count, store()


def _load(directory: RegionDirectory, keys: bytes, places: NDArray[np.uint64], size: int) -> None:
    require_all(directory.core.load(keys, places, _sizes(size)))


def _plain_copy(path: Path) -> tuple[int, float]:
    mapped = np.memmap(path, dtype=np.uint8, mode="r")
    count = min(len(mapped), _COPIED_BYTES_MAX)
    source, target = mapped[:count], _touched(count)
    source.max()  # every page of it is mapped before the clock starts
    return _timed(lambda: np.copyto(target, source), count)


def _timed(copy: Callable[[], object], moved: int) -> tuple[int, float]:
    copy()  # the first pass maps pages
    started = time.perf_counter()
    copy()
    return moved, time.perf_counter() - started


def _touched(size: int) -> NDArray[np.uint8]:
    return np.ones(size, dtype=np.uint8)


def _addresses(memory: NDArray[np.uint8], size: int, count: int) -> NDArray[np.uint64]:
    rows = memory.ctypes.data + np.arange(count, dtype=np.uint64) * np.uint64(size)
    return rows.astype(np.uint64).reshape(-1, 1)


def _sizes(size: int) -> NDArray[np.uint64]:
    return np.array([size], dtype=np.uint64)
