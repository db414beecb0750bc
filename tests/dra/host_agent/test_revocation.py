"""Waiting for holders of a device, and ending them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from hymcache.dra.host_agent import revocation
from hymcache.dra.host_agent.holders import DeviceIdentity, find_holders
from hymcache.dra.host_agent.resources import Holder
from hymcache.dra.host_agent.revocation import wait_until_free
from tests.dra.host_agent.conftest import Hold, HoldingProcess


@pytest.fixture
def device(tmp_path: Path) -> Path:
    path = tmp_path / "hosts" / "a" / "region"
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(4096))
    return path


@pytest.fixture
def identity(device: Path) -> DeviceIdentity:
    return DeviceIdentity.of_file(device, "/dev/region")


def test_a_free_device_is_not_waited_for(identity: DeviceIdentity) -> None:
    assert asyncio.run(wait_until_free(identity, wait_s=0, fence=False)) == ()


def test_without_time_the_holder_is_told_at_once(
    identity: DeviceIdentity, device: Path, hold: Hold
) -> None:
    holder = hold(device)
    start_s = time.monotonic()
    (found,) = asyncio.run(wait_until_free(identity, wait_s=0, fence=False))
    assert found.pid == holder.pid
    assert time.monotonic() - start_s < 5


def test_the_end_of_the_holder_is_noticed_at_once(
    identity: DeviceIdentity, device: Path, hold: Hold
) -> None:
    async def wait() -> float:
        waiting = asyncio.create_task(wait_until_free(identity, wait_s=30, fence=False))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        start_s = time.monotonic()
        await asyncio.to_thread(holder.end)
        assert await waiting == ()
        return time.monotonic() - start_s

    holder = hold(device)
    # Far below the 10 s after which it would look again.
    assert asyncio.run(wait()) < 5


def test_a_holder_that_lives_on_without_the_device_is_noticed(
    identity: DeviceIdentity, device: Path, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revocation, "_LOOK_AGAIN_S", 0.2)

    async def wait() -> None:
        waiting = asyncio.create_task(wait_until_free(identity, wait_s=30, fence=False))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(holder.close_device)
        assert await waiting == ()

    holder = hold(device)
    asyncio.run(wait())
    assert holder.process.poll() is None


def test_when_the_time_is_up_the_holders_are_told(
    identity: DeviceIdentity, device: Path, hold: Hold
) -> None:
    first, second = hold(device), hold(device, "map")
    start_s = time.monotonic()
    found = asyncio.run(wait_until_free(identity, wait_s=0.5, fence=False))
    assert {holder.pid for holder in found} == {first.pid, second.pid}
    assert 0.5 <= time.monotonic() - start_s < 5


def test_a_fence_kills_all_holders_and_nobody_else(
    identity: DeviceIdentity, device: Path, tmp_path: Path, hold: Hold
) -> None:
    (tmp_path / "other").write_bytes(bytes(4096))
    holders = [hold(device), hold(device, "map"), hold(device)]
    bystander = hold(tmp_path / "other")
    killed: list[Holder] = []
    result = asyncio.run(wait_until_free(identity, wait_s=0, fence=True, on_kill=killed.append))
    assert result == ()
    assert {holder.pid for holder in killed} == {holder.pid for holder in holders}
    assert all(holder.process.wait(10) == -signal.SIGKILL for holder in holders)
    assert bystander.process.poll() is None


def test_a_fence_ends_those_too_that_come_while_it_waits(
    identity: DeviceIdentity, device: Path, hold: Hold
) -> None:
    late: list[HoldingProcess] = []

    def on_kill(_holder: Holder) -> None:
        if len(late) < 2:
            late.append(hold(device))

    hold(device)
    assert asyncio.run(wait_until_free(identity, wait_s=0, fence=True, on_kill=on_kill)) == ()
    assert len(late) == 2
    assert all(holder.process.wait(10) == -signal.SIGKILL for holder in late)


def test_a_process_id_that_was_given_to_another_is_not_killed(
    identity: DeviceIdentity, device: Path, tmp_path: Path, hold: Hold
) -> None:
    (tmp_path / "other").write_bytes(bytes(4096))
    innocent = hold(tmp_path / "other")
    looks = 0

    def find(identity: DeviceIdentity, *, pids: tuple[int, ...] | None = None) -> object:
        nonlocal looks
        looks += 1
        if looks == 1:
            # By the time it is killed, the holder's id is another process's.
            return (Holder(pid=innocent.pid, command="gone", kinds=()),)
        return find_holders(identity, pids=pids)

    waiting = wait_until_free(identity, wait_s=0.3, fence=True, find=find)  # type: ignore[arg-type] # a script of answers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(revocation, "_LOOK_AGAIN_S", 0.2)
        assert asyncio.run(waiting) == ()
    assert innocent.process.poll() is None


def test_the_agent_does_not_kill_itself(identity: DeviceIdentity, device: Path) -> None:
    with device.open() as _held, pytest.MonkeyPatch.context() as patch:
        patch.setattr(revocation, "_KILL_S", 0.3)
        (found,) = asyncio.run(wait_until_free(identity, wait_s=0, fence=True))
    assert found.pid == os.getpid()
