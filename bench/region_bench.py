"""Measures a shared region in one process: lookups, and loads and stores beside our bare copy.

The bare copy is the same streaming copy between the same memory, with nothing found, pinned or
checked: the least that a load could cost. What counts is CPU time, since one thread does it all
and other work on the machine should not.
"""

from __future__ import annotations

import mmap
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from hymcache import _core
from hymcache._core import RegionStatus
from hymcache.bench.samples import SampleLog, machine_context
from hymcache.chm_device.region import Region, RegionFormat
from hymcache.errors import HymcacheError
from hymcache.limits import KIB, LOOKUP_KEYS_MAX, MIB
from hymcache.lookup.region_directory import RegionDirectory

BLOCK_BYTES: Final = (16 * MIB, MIB)
WORKING_SET_BYTES: Final = 512 * MIB  # more than the CPU's caches hold
_BATCH_BYTES: Final = 128 * MIB
_LOOKUP_OBJECTS: Final = 65_536
_LOOKUP_SLOT_BYTES: Final = 4 * KIB
_KEY_BYTES: Final = 16


class RegionBenchFailed(HymcacheError):
    """Something was not stored or found where it must be: the numbers would mean nothing."""


@dataclass(frozen=True)
class RegionBenchOptions:
    """What a run does."""

    out_dir: Path
    path: Path  # of the region; made for the run, or a device that may be formatted
    rounds: int = 5
    lookups: int = 20_000
    working_set_bytes: int = WORKING_SET_BYTES

    @property
    def samples_path(self) -> Path:
        """The raw samples of the run."""
        return self.out_dir / "region.jsonl"

    @property
    def steps(self) -> int:
        """What `run_region` reports: lookups, and rounds of each block size."""
        return 1 + self.rounds * len(BLOCK_BYTES)


def run_region(
    options: RegionBenchOptions, report: Callable[[str], None], advance: Callable[[], None]
) -> None:
    """Writes samples to `samples_path`."""
    log = SampleLog(options.samples_path, machine_context())
    report("lookups")
    _measure_lookups(options, log)
    advance()
    for block_bytes in BLOCK_BYTES:
        with _Blocks(options, block_bytes) as blocks:
            if block_bytes == max(BLOCK_BYTES):
                blocks.measure_first_touch(log)
            for round_index in range(options.rounds):
                report(f"blocks of {block_bytes // MIB} MiB, round {round_index + 1}")
                blocks.run_round(round_index, log)
                advance()


def _open(options: RegionBenchOptions, form: RegionFormat, region_bytes: int) -> Region:
    return Region.open(options.path, form, size_bytes=region_bytes, force=True, prefault=True)


def _remove(path: Path) -> None:
    if path.is_file():  # not a device
        path.unlink()


def _measure_lookups(options: RegionBenchOptions, log: SampleLog) -> None:
    keys = [secrets.token_bytes(_KEY_BYTES) for _ in range(_LOOKUP_OBJECTS)]
    # Nine slots of ten in use, so that searches have to pass others.
    region_bytes = 16 * MIB + _LOOKUP_OBJECTS * _LOOKUP_SLOT_BYTES * 10 // 9
    form = RegionFormat(_LOOKUP_SLOT_BYTES, {"made_for": "bench"}, participants=4, pins=64)
    with RegionDirectory(_open(options, form, region_bytes)) as directory:
        content = np.zeros(64, np.uint8)
        places = np.full((_LOOKUP_OBJECTS, 1), content.ctypes.data, np.uint64)
        sizes = np.full((1, 1), content.nbytes, np.uint64)
        directory.core.store(b"".join(keys), places, sizes)
        # Where the slots of a key were all taken, an older one has gone.
        found = directory.core.lookup(b"".join(keys))
        keys = [key for key, status in zip(keys, found, strict=True) if status == RegionStatus.OK]
        absent = [secrets.token_bytes(_KEY_BYTES) for _ in range(_LOOKUP_OBJECTS)]
        for case, known in (("hit", keys), ("miss", absent)):
            _measure_case(directory, case, known, options.lookups, log)
    _remove(options.path)


def _measure_case(
    directory: RegionDirectory, case: str, keys: list[bytes], calls: int, log: SampleLog
) -> None:
    rng = random.Random(case)
    batches = [b"".join(rng.sample(keys, LOOKUP_KEYS_MAX)) for _ in range(1024)]
    look_up = directory.core.lookup
    found = look_up(batches[0])
    if found.count(RegionStatus.OK) != (LOOKUP_KEYS_MAX if case == "hit" else 0):
        raise RegionBenchFailed(f"a lookup that has to be a {case} is not")
    taken_s = np.empty(calls)
    cpu_began = time.thread_time()
    for call in range(calls):
        batch = batches[call % len(batches)]
        began = time.perf_counter()
        look_up(batch)
        taken_s[call] = time.perf_counter() - began
    cpu_s = time.thread_time() - cpu_began
    log.add(
        "region_lookup",
        case=case,
        keys=LOOKUP_KEYS_MAX,
        calls=calls,
        p50_us=float(np.median(taken_s)) * 1e6,
        p99_us=float(np.quantile(taken_s, 0.99)) * 1e6,
        cpu_us=cpu_s / calls * 1e6,
    )


class _Blocks:
    """A region full of blocks of one size, and the client's memory."""

    def __init__(self, options: RegionBenchOptions, block_bytes: int) -> None:
        self._options = options
        self._block_bytes = block_bytes
        self._count = options.working_set_bytes // block_bytes
        form = RegionFormat(block_bytes, {"made_for": "bench"}, participants=4, pins=64)
        # Room for twice as many: nothing is evicted.
        region_bytes = 2 * options.working_set_bytes + 16 * MIB
        self._region = _open(options, form, region_bytes)
        self._plain = RegionDirectory(self._region, verify_checksums=False)
        self._checked = RegionDirectory(self._region)
        self._client = mmap.mmap(-1, _BATCH_BYTES)
        self._client.madvise(mmap.MADV_HUGEPAGE)
        self._client.write(secrets.token_bytes(MIB) * (_BATCH_BYTES // MIB))
        with options.path.open("r+b") as file:
            self._bare = mmap.mmap(file.fileno(), region_bytes)
        self._bare.madvise(mmap.MADV_HUGEPAGE)
        self._keys = [secrets.token_bytes(_KEY_BYTES) for _ in range(self._count)]

    def __enter__(self) -> Self:
        self._store(self._checked, self._keys)
        for side in (self._plain, self._checked):
            self._load(side)
        self._copy()
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._plain.close()
        self._checked.close()
        _remove(self._options.path)

    def run_round(self, round_index: int, log: SampleLog) -> None:
        """All sides once; the order turns, so that drift favours none."""
        sides: list[tuple[str, str, Callable[[], object]]] = [
            ("load", "reference", self._copy),
            ("load", "plain", lambda: self._load(self._plain)),
            ("load", "crc", lambda: self._load(self._checked)),
            ("store", "plain", lambda: self._store_anew(self._plain)),
            ("store", "crc", lambda: self._store_anew(self._checked)),
        ]
        for operation, side, act in sides if round_index % 2 == 0 else sides[::-1]:
            wall_began, cpu_began = time.perf_counter(), time.thread_time()
            act()
            cpu_s = time.thread_time() - cpu_began
            log.add(
                "region_copy",
                operation=operation,
                side=side,
                round=round_index,
                block_bytes=self._block_bytes,
                moved_bytes=self._count * self._block_bytes,
                wall_s=time.perf_counter() - wall_began,
                cpu_s=cpu_s,
            )

    def measure_first_touch(self, log: SampleLog) -> None:
        """The first load through a new mapping and the next, without prefault and with it."""
        path = self._options.path
        for prefault in (False, True):
            with RegionDirectory(Region.attach(path), verify_checksums=False) as fresh:
                prefault_s = _cpu_seconds(fresh.region.core.prefault) if prefault else 0.0
                first_s, next_s = (_cpu_seconds(lambda: self._load(fresh)) for _ in range(2))
            log.add(
                "region_first_touch",
                prefault=prefault,
                moved_bytes=self._count * self._block_bytes,
                prefault_cpu_s=prefault_s,
                first_cpu_s=first_s,
                next_cpu_s=next_s,
            )

    def _places(self, count: int) -> NDArray[np.uint64]:
        base = np.frombuffer(self._client, np.uint8).ctypes.data
        fitting = _BATCH_BYTES // self._block_bytes
        offsets = np.arange(count, dtype=np.uint64) % fitting * np.uint64(self._block_bytes)
        return (offsets + np.uint64(base)).reshape(-1, 1)

    def _copy(self) -> None:
        places = self._places(self._count).reshape(-1)
        base = np.frombuffer(self._bare, np.uint8).ctypes.data
        first = base + self._region.geometry["data_offset"]
        for index, place in enumerate(places):
            _core.stream_copy(int(place), first + index * self._block_bytes, self._block_bytes)

    def _load(self, side: RegionDirectory) -> None:
        require_all(side.core.load(b"".join(self._keys), self._places(self._count), self._size()))

    def _store(self, side: RegionDirectory, keys: list[bytes]) -> None:
        require_all(side.core.store(b"".join(keys), self._places(len(keys)), self._size()))

    def _store_anew(self, side: RegionDirectory) -> None:
        side.remove(self._keys)
        self._store(side, self._keys)

    def _size(self) -> NDArray[np.uint64]:
        return np.array([self._block_bytes], np.uint64)


def _cpu_seconds(act: Callable[[], object]) -> float:
    began = time.thread_time()
    act()
    return time.thread_time() - began


def require_all(statuses: bytes) -> None:
    """Raises RegionBenchFailed unless every status is OK."""
    if statuses.count(RegionStatus.OK) != len(statuses):
        raise RegionBenchFailed(f"blocks were answered with {sorted(set(statuses))}")
