"""Processes that store, load, pin and remove in one region while others of them are killed.

    python -m tests.lookup.region_stress --operations 10000000 --seed 1

Workers check every byte that they load and every hit; the first fault ends the run. The parent
kills some (SIGKILL, wherever they are) and stops others for longer than the lease (SIGSTOP), which
are then held for dead, and come back. At the end no slot may be lost. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hymcache import _core
from hymcache._core import RegionStatus
from hymcache.chm_device.region import Region, RegionFormat
from hymcache.lookup.keys import object_keys
from hymcache.lookup.namespace import Fingerprint
from hymcache.lookup.region_directory import RegionDirectory

SLOT_BYTES: Final = 256 << 10
SMALL_BYTES: Final = 4 << 10
KEYS: Final = 320
NEVER_STORED: Final = 320
BATCH: Final = 8
REMOVED: Final = 2
LEASE_S: Final = 0.4
REGION_BYTES: Final = 30 << 20  # some hundred slots: every store has to evict
FORM: Final = RegionFormat(SLOT_BYTES, {"made_for": "stress"}, 32, 64, LEASE_S)
COUNTERS: Final = (
    "operations",
    "stored",
    "loaded",
    "lookup_hits",
    "store_lost",
    "loads_overtaken",
    "load_corrupt",
    "evicted_for_room",
    "evicted_by_watermark",
    "reclaimed",
    "buried",
    "rejoined",
)
OK: Final = RegionStatus.OK


@dataclass(frozen=True)
class Options:
    """What a run does; two runs with one seed make the same choices, not the same interleaving."""

    operations: int
    processes: int
    seed: int
    kill_every_s: float
    deadline_s: float
    seconds_min: float  # however fast the machine: dead processes are found after their lease


class Board:
    """Counters of each life of a worker, and the word that stops all: memory that all map."""

    def __init__(self, lives: int) -> None:
        self._memory = mmap.mmap(-1, 8 + lives * len(COUNTERS) * 8 + lives)
        self._stop = np.frombuffer(self._memory, np.int64, 1)
        self.counters = np.frombuffer(self._memory, np.int64, lives * len(COUNTERS), 8)
        self.counters = self.counters.reshape(lives, len(COUNTERS))

    def stop(self) -> None:
        self._stop[0] = 1

    def stopped(self) -> bool:
        return bool(self._stop[0])

    def total(self, name: str) -> int:
        return int(self.counters[:, COUNTERS.index(name)].sum())


class Objects:
    """Keys, and the one content that each has; every sixteenth fills a slot."""

    def __init__(self) -> None:
        hashes = [b"%d" % i for i in range(KEYS + NEVER_STORED)]
        joined = object_keys(Fingerprint(1), hashes)
        self.keys = [joined[i : i + 16] for i in range(0, len(joined), 16)]
        self.contents = [
            np.random.default_rng(i).integers(
                0, 256, SMALL_BYTES if i % 16 else SLOT_BYTES, dtype=np.uint8
            )
            for i in range(KEYS)
        ]

    def joined(self, ids: list[int]) -> bytes:
        return b"".join(self.keys[i] for i in ids)


class Worker:
    """One life of a process."""

    def __init__(self, path: str, seed: int, board: Board, life: int) -> None:
        self.random = random.Random(seed)
        self.objects = Objects()
        self.directory = RegionDirectory(Region.open(path, FORM), name=f"life {life}").core
        self.board = board
        self.life = life
        self.into = [np.empty(SLOT_BYTES, np.uint8) for _ in range(BATCH)]
        self.operations = 0

    def run(self) -> None:
        turns = [self.store, self.store, self.load, self.load, self.look, self.pin, self.remove]
        while not self.board.stopped():
            ids = self.random.sample(range(KEYS), BATCH)
            turn = self.random.choice(turns)
            turn(ids)
            self.operations += REMOVED if turn == self.remove else BATCH
            self.tell()
        self.directory.close()

    def tell(self) -> None:
        counted = self.directory.stats() | {"operations": self.operations}
        self.board.counters[self.life] = [counted[name] for name in COUNTERS]

    def places(self, arrays: list[NDArray[np.uint8]]) -> NDArray[np.uint64]:
        return np.array([[array.ctypes.data] for array in arrays], np.uint64)

    def sizes(self, ids: list[int]) -> NDArray[np.uint64]:
        return np.array([[self.objects.contents[i].nbytes] for i in ids], np.uint64)

    def store(self, ids: list[int]) -> None:
        contents = [self.objects.contents[i] for i in ids]
        self.directory.store(self.objects.joined(ids), self.places(contents), self.sizes(ids), 1)

    def load(self, ids: list[int]) -> bytes:
        found = self.directory.load(
            self.objects.joined(ids), self.places(self.into), self.sizes(ids)
        )
        for i, status, into in zip(ids, found, self.into, strict=True):
            content = self.objects.contents[i]
            if status == OK and not np.array_equal(into[: content.nbytes], content):
                raise AssertionError(f"key {i}: wrong bytes")
        return found

    def look(self, ids: list[int]) -> None:
        never = [KEYS + i % NEVER_STORED for i in ids]
        found = self.directory.lookup(self.objects.joined(ids + never))
        if OK in found[len(ids) :]:
            raise AssertionError("a hit for a key that was never stored")

    def pin(self, ids: list[int]) -> None:
        lives_before = self.directory.stats()["rejoined"]
        ticket, pinned = self.directory.pin(self.objects.joined(ids))
        loaded = self.load(ids)
        # Corrupt is what one that was held for dead has made of it: told, and dropped.
        kept = (OK, RegionStatus.CORRUPT)
        lost = [i for i, p, s in zip(ids, pinned, loaded, strict=True) if p == OK and s not in kept]
        # A process that was held for dead has no pins any more; it joins anew with its next call.
        self.directory.participant  # noqa: B018 - joins
        if lost and self.directory.stats()["rejoined"] == lives_before:
            raise AssertionError(f"keys {lost} were pinned and could not be loaded")
        self.directory.unpin(ticket)

    def remove(self, ids: list[int]) -> None:
        self.directory.remove(self.objects.joined(ids[:REMOVED]))


def live(path: str, seed: int, board: Board, life: int, faults: str) -> None:
    """What a worker's process does; a fault goes to a file of its own."""
    try:
        Worker(path, seed, board, life).run()
    except BaseException:
        Path(faults, f"{life}").write_text(f"seed {seed}\n{traceback.format_exc()}")
        raise


class Stress:
    """The parent: starts lives, ends some, and looks at what they leave."""

    def __init__(self, options: Options, folder: Path) -> None:
        self.options = options
        self.random = random.Random(options.seed)
        self.path = str(folder / "region")
        self.faults = folder / "faults"
        self.faults.mkdir()
        self.lives_max = 20_000
        self.board = Board(self.lives_max)
        self.lives = 0
        self.killed = 0
        self.stopped = 0
        self.context = multiprocessing.get_context("fork")
        Region.open(self.path, FORM, size_bytes=REGION_BYTES)

    def start(self) -> BaseProcess:
        process = self.context.Process(
            target=live,
            args=(self.path, self.random.getrandbits(32), self.board, self.lives, str(self.faults)),
        )
        self.lives += 1
        process.start()
        return process

    def run(self) -> dict[str, int | float]:
        began = time.monotonic()
        workers = [self.start() for _ in range(self.options.processes)]
        stopped: dict[int, float] = {}  # place -> when to go on
        try:
            while (
                self.board.total("operations") < self.options.operations
                or time.monotonic() - began < self.options.seconds_min
            ):
                if time.monotonic() - began > self.options.deadline_s:
                    raise AssertionError("the operations were not done by the deadline")
                self._raise_faults()
                time.sleep(self.random.uniform(0.2, 1.8) * self.options.kill_every_s)
                self._resume(workers, stopped, time.monotonic())
                self._disturb(workers, stopped)
        finally:
            self._resume(workers, stopped, float("inf"))
            self.board.stop()
            for worker in workers:
                worker.join(30)
                if worker.is_alive():
                    worker.kill()
        self._raise_faults()
        counted: dict[str, int | float] = {name: self.board.total(name) for name in COUNTERS}
        counted |= {"killed": self.killed, "stopped": self.stopped, "seed": self.options.seed}
        counted |= self._look_at_the_end()
        return counted | {"seconds": round(time.monotonic() - began, 1)}

    def _disturb(self, workers: list[BaseProcess], stopped: dict[int, float]) -> None:
        place = self.random.randrange(len(workers))
        worker = workers[place]
        if place in stopped or worker.pid is None or self.lives == self.lives_max:
            return
        if self.random.random() < 0.3:
            os.kill(worker.pid, signal.SIGSTOP)
            stopped[place] = time.monotonic() + self.random.uniform(0.5, 2.5) * LEASE_S
            self.stopped += 1
        else:
            os.kill(worker.pid, signal.SIGKILL)
            worker.join(30)
            workers[place] = self.start()
            self.killed += 1

    def _resume(self, workers: list[BaseProcess], stopped: dict[int, float], now: float) -> None:
        for place in [place for place, at in stopped.items() if at <= now]:
            del stopped[place]
            pid = workers[place].pid
            assert pid is not None
            os.kill(pid, signal.SIGCONT)

    def _raise_faults(self) -> None:
        for fault in self.faults.iterdir():
            raise AssertionError(f"run with --seed {self.options.seed}\n{fault.read_text()}")

    def _counted_and_found(
        self, core: _core.RegionDirectory, objects: Objects
    ) -> tuple[_core.RegionUsage, bytes]:
        """What there is, and what can be found of it, with nothing evicted in between."""
        keys = objects.joined(list(range(KEYS + NEVER_STORED)))
        while True:
            before = core.usage()
            found = core.lookup(keys)
            # Our own upkeep makes room up to the watermark.
            if core.usage()["valid"] == before["valid"]:
                return before, found

    def _look_at_the_end(self) -> dict[str, int]:
        """Every slot is free or whole, nobody but us is there, and all slots can be had again."""
        objects = Objects()
        region = Region.attach(self.path)
        slots = region.geometry["slots"]
        with RegionDirectory(region) as directory:
            core = directory.core
            deadline = time.monotonic() + 20 * LEASE_S
            while others := [
                p
                for p in core.participants()
                if p["index"] != core.participant and p["state"] != "free"
            ]:
                if time.monotonic() > deadline:
                    raise AssertionError(f"participants are left: {others}")
                time.sleep(LEASE_S / 4)
            core.reclaim()
            usage, found = self._counted_and_found(core, objects)
            if usage["writing"] or usage["dying"] or usage["pinned"]:
                raise AssertionError(f"slots are lost: {usage}")
            good, unchecked, corrupt = core.verify(0, slots)
            if OK in found[KEYS:]:
                raise AssertionError("a hit for a key that was never stored")
            if found.count(OK) != usage["valid"]:
                raise AssertionError(f"{usage['valid']} objects, {found.count(OK)} can be found")
            core.clear()
            if core.usage()["free"] != slots:
                raise AssertionError(f"slots are lost: {core.usage()}")
        return {"slots": slots, "good": good, "unchecked": unchecked, "corrupt": corrupt}


def main() -> None:
    """Runs it once from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=200_000)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--kill-every-s", type=float, default=0.1)
    parser.add_argument("--deadline-s", type=float, default=1800)
    parser.add_argument("--seconds-min", type=float, default=0)
    options = Options(**vars(parser.parse_args()))
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=folder) as name:
        sys.stdout.write(json.dumps(Stress(options, Path(name)).run()) + "\n")


if __name__ == "__main__":
    main()
