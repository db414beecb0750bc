"""Waits until nobody holds a device, or ends those who do.

Nothing is polled quickly: the end of a process shows on its pidfd. A process that closes the
device and lives on is noticed at the next look, `_LOOK_AGAIN_S` later at most.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from typing import Final

from hymcache.dra.host_agent.holders import DeviceIdentity, find_holders
from hymcache.dra.host_agent.resources import Holder

_LOOK_AGAIN_S: Final = 10.0
# A killed process gives its memory back, which takes a while where that is much.
_KILL_S: Final = 30.0

FindHolders = Callable[..., tuple[Holder, ...]]


async def wait_until_free(
    identity: DeviceIdentity,
    *,
    wait_s: float,
    fence: bool,
    find: FindHolders = find_holders,
    on_kill: Callable[[Holder], None] = lambda _holder: None,
) -> tuple[Holder, ...]:
    """Who holds the device still when it returns: nobody, or the time is up.

    With `fence` holders are killed (SIGKILL), those included that come while it waits.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + (max(wait_s, _KILL_S) if fence else wait_s)
    while True:
        holders = await asyncio.to_thread(find, identity)
        left_s = deadline_s - loop.time()
        if not holders or left_s <= 0:
            return holders
        with ExitStack() as stack:
            ends = _watch_ends(holders, stack)
            if fence:
                await asyncio.to_thread(_kill, identity, holders, ends, find, on_kill)
            await _wait_for_end(ends.values(), min(left_s, _LOOK_AGAIN_S))


def _watch_ends(holders: Collection[Holder], stack: ExitStack) -> dict[int, int]:
    """The pidfd of each holder that lives."""
    ends: dict[int, int] = {}
    for holder in holders:
        # It has ended in the meantime: the next look shows.
        with suppress(ProcessLookupError):
            ends[holder.pid] = os.pidfd_open(holder.pid)
            stack.callback(os.close, ends[holder.pid])
    return ends


def _kill(
    identity: DeviceIdentity,
    holders: Collection[Holder],
    ends: dict[int, int],
    find: FindHolders,
    on_kill: Callable[[Holder], None],
) -> None:
    # The pidfd is of whoever has the id now; who holds the device under it is the one meant.
    confirmed = {holder.pid for holder in find(identity, pids=tuple(ends))}
    for holder in holders:
        if holder.pid in confirmed and holder.pid != os.getpid():
            on_kill(holder)
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(ends[holder.pid], signal.SIGKILL)


async def _wait_for_end(pidfds: Collection[int], timeout_s: float) -> None:
    """Returns when one of the processes has ended, or the time is up."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    if not pidfds:
        return
    for pidfd in pidfds:
        loop.add_reader(pidfd, ended.set)
    try:
        async with asyncio.timeout(timeout_s):
            await ended.wait()
    except TimeoutError:
        pass
    finally:
        for pidfd in pidfds:
            loop.remove_reader(pidfd)
