"""In a guest: a client of a region without an engine.

    region_client.py format DEVICE SIZE SLOT LEASE_S
    region_client.py store|verify DEVICE COUNT BYTES
    region_client.py churn DEVICE BYTES            stores one object again and again
    region_client.py await_reclaim DEVICE BYTES    sees it pending, says so, and takes its place

What a number of objects holds follows from their numbers, so that one guest can check what the
other has stored.
"""

from __future__ import annotations

import hashlib
import sys
import time

from hymcache.chm_device.region import Region, RegionFormat
from hymcache.lookup import object_key
from hymcache.lookup.namespace import Fingerprint
from hymcache.lookup.region_directory import RegionDirectory

CHURNED = object_key(Fingerprint(1), b"churned")
RECLAIM_DEADLINE_S = 60


def key_of(number: int) -> bytes:
    return object_key(Fingerprint(1), str(number).encode())


def content_of(number: int, count: int) -> bytes:
    page = hashlib.shake_128(str(number).encode()).digest(4096)
    return (page * (count // len(page) + 1))[:count]


def require(holds: bool, what: object) -> None:
    if not holds:
        sys.exit(str(what))


def format_region(device: str, size: int, slot: int, lease_s: float) -> None:
    form = RegionFormat(slot, {"made_for": "testbed"}, 8, 64, lease_s)
    region = Region.open(device, form, size_bytes=size, force=True, prefault=True)
    require(region.core.kind == "dax", region.core.kind)


def store(device: str, count: int, size: int) -> None:
    with RegionDirectory(Region.attach(device)) as directory:
        for number in range(count):
            stored = directory.put([key_of(number)], [content_of(number, size)])
            require([status.name for status in stored] == ["OK"], stored)


def verify(device: str, count: int, size: int) -> None:
    # The scheduler's side maps no data slot.
    with RegionDirectory(Region.attach(device, map_data=False)) as directory:
        keys = [key_of(number) for number in range(count + 1)]
        require(directory.leading_hits(keys) == count, directory.lookup(keys))
    with RegionDirectory(Region.attach(device)) as directory:
        for number in range(count):
            into = bytearray(size)
            (status,) = directory.get([key_of(number)], [into])
            require(status.name == "OK", status)
            require(into == content_of(number, size), f"object {number} differs")


def churn(device: str, size: int) -> None:
    content = content_of(0, size)
    with RegionDirectory(Region.attach(device), name="churn") as directory:
        sys.stdout.write("storing\n")
        sys.stdout.flush()
        while True:
            directory.put([CHURNED], [content])
            directory.remove([CHURNED])


def await_reclaim(device: str, size: int) -> None:
    with RegionDirectory(Region.attach(device), name="survivor") as directory:
        deadline = time.monotonic() + RECLAIM_DEADLINE_S
        while directory.lookup([CHURNED])[0].name != "PENDING":
            require(time.monotonic() < deadline, directory.core.usage())
            time.sleep(0.01)
        sys.stdout.write("pending\n")
        sys.stdout.flush()
        require(directory.put([CHURNED], [bytes(1)])[0].name == "PENDING", "was not held off")
        deadline = time.monotonic() + RECLAIM_DEADLINE_S
        while directory.lookup([CHURNED])[0].name == "PENDING":
            require(time.monotonic() < deadline, directory.core.participants())
            time.sleep(0.05)
        require(directory.stats()["reclaimed"] == 1, directory.stats())
        require(directory.core.usage()["writing"] == 0, directory.core.usage())
        require(directory.put([CHURNED], [content_of(9, size)])[0].name == "OK", "not stored")
        into = bytearray(size)
        require(directory.get([CHURNED], [into])[0].name == "OK", "not loaded")
        require(into == content_of(9, size), "differs")


if __name__ == "__main__":
    action, device, *numbers = sys.argv[1:]
    if action == "format":
        format_region(device, int(numbers[0]), int(numbers[1]), float(numbers[2]))
    elif action == "churn":
        churn(device, int(numbers[0]))
    elif action == "await_reclaim":
        await_reclaim(device, int(numbers[0]))
    else:
        {"store": store, "verify": verify}[action](device, int(numbers[0]), int(numbers[1]))
