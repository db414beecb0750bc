"""The simulator's state on a slow disk: others are served, and what was answered is there."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from hymcache.dra.fabric.models import CredentialsBody
from hymcache.dra.simulator import service as service_module
from hymcache.dra.simulator.hardware import Fabric
from hymcache.dra.simulator.service import FabricService
from hymcache.dra.state_file import StateFile, write_atomically


class SlowDisk:
    """Writes are done once it is `free`."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.writes = 0

    def write(self, path: Path, content: bytes) -> None:
        self.writes += 1
        assert self.free.wait(10)
        write_atomically(path, content)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    made = SlowDisk()
    monkeypatch.setattr(service_module, "write_atomically", made.write)
    return made


def body(name: str) -> CredentialsBody:
    return CredentialsBody(
        username="u", password="p", ip_address="127.0.0.1", port=443, custom_id=name
    )


def hosts_on_disk(path: Path) -> set[str]:
    return set(StateFile(path, Fabric).load().hosts)


def test_changes_are_on_disk_when_they_are_answered(tmp_path: Path, disk: SlowDisk) -> None:
    path = tmp_path / "fabric.json"
    service = FabricService(state_path=path)

    async def change() -> None:
        first = asyncio.create_task(service.add_host(body("one")))
        await asyncio.sleep(0.1)
        others = [asyncio.create_task(service.add_host(body(name))) for name in ("two", "three")]
        # The disk is busy; this goes on all the same.
        await asyncio.sleep(0.1)
        assert set(service.fabric.hosts) == {"one", "two", "three"}
        assert not any(task.done() for task in (first, *others))
        disk.free.set()
        await first
        assert "one" in hosts_on_disk(path)
        await asyncio.gather(*others)

    asyncio.run(change())
    assert hosts_on_disk(path) == {"one", "two", "three"}
    # What came while the first was written is written together.
    assert disk.writes == 2


def test_who_gives_up_does_not_bring_an_older_state_back(tmp_path: Path, disk: SlowDisk) -> None:
    path = tmp_path / "fabric.json"
    service = FabricService(state_path=path)

    async def change() -> None:
        first = asyncio.create_task(service.add_host(body("one")))
        await asyncio.sleep(0.1)
        first.cancel()
        second = asyncio.create_task(service.add_host(body("two")))
        await asyncio.sleep(0.1)
        # Not beside the other, which might be done after it.
        assert disk.writes == 1
        disk.free.set()
        await second

    asyncio.run(change())
    assert hosts_on_disk(path) == {"one", "two"}
