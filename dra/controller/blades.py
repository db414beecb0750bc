"""What is known of the blades: as the fabric manager sees them, and as the ledger does.

    published capacity = total - foreign - regions that no claim has any more - what regions take
                         beyond what the scheduler counts for them

so that capacity which the scheduler takes for free, but which is not detached yet, is not sold.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from hymcache.dra.controller.ledger import Ledger
from hymcache.dra.controller.region_record import RecordState, RegionRecord
from hymcache.dra.fabric import Blade, BladeKey, HostId

_NOT_A_LABEL: Final = re.compile(r"[^a-z0-9-]+")
_LABEL_CHARS_MAX: Final = 50
_FREED: Final = RecordState.FREED


@dataclass
class BladeState:
    """A blade, and what was found on it.

    foreign_mib      what regions take that are not in the ledger
    missing          names of regions that were not there at the last look
    quarantine       hosts that get no new pods, and until when
    refused_mib      the smallest region that the blade refused although it has the room (it may be
                     fragmented), and until when none of that size is offered
    """

    blade: Blade
    foreign_mib: int = 0
    foreign_regions: int = 0
    missing: frozenset[str] = frozenset()
    quarantine: dict[HostId, float] = field(default_factory=dict)
    refused_mib: int | None = None
    refused_until: float = 0.0


class BladeBook:
    """All blades that there are or were. `clock` is monotonic."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._clock = clock
        self._states: dict[BladeKey, BladeState] = {}
        self._pools: dict[str, BladeKey] = {}
        # Whether the fabric manager has said which blades there are: others are gone then.
        self.complete = False

    def update(self, blades: tuple[Blade, ...]) -> None:
        """What the fabric manager says now. A blade that is gone stays, offline, while in use."""
        self.complete = True
        present = set()
        for blade in blades:
            present.add(blade.key)
            self.note(blade)
        for key in self._states.keys() - present:
            if self._ledger.of_blade(key):
                self._states[key].blade = _offline(self._states[key].blade)
            else:
                del self._states[key]
                self._pools.pop(pool_name(key), None)

    def note(self, blade: Blade) -> None:
        """What the fabric manager says of one blade."""
        state = self._states.get(blade.key)
        if state is None:
            self._states[blade.key] = BladeState(blade)
            self._pools[pool_name(blade.key)] = blade.key
        elif blade.online or not state.blade.ports:
            state.blade = blade
        else:
            # Its ports are not known while it is offline; the cables are still there.
            state.blade = _offline(state.blade)

    @property
    def states(self) -> tuple[BladeState, ...]:
        """All blades, sorted."""
        return tuple(self._states[key] for key in sorted(self._states))

    def state(self, key: BladeKey) -> BladeState | None:
        """One blade."""
        return self._states.get(key)

    def of_pool(self, pool: str) -> BladeState | None:
        """The blade that a pool stands for."""
        key = self._pools.get(pool)
        return self._states.get(key) if key else None

    def quarantine(self, key: BladeKey, host: HostId, seconds: float) -> None:
        """Sends no new pods for this blade to a host for a while."""
        state = self._states.get(key)
        if state is not None:
            state.quarantine[host] = self._clock() + seconds

    def welcome(self, key: BladeKey, host: HostId) -> bool:
        """Ends a quarantine; whether there was one."""
        state = self._states.get(key)
        return state is not None and state.quarantine.pop(host, None) is not None

    def refuse(self, key: BladeKey, size_mib: int, seconds: float) -> None:
        """Offers no regions of that size or a larger one for a while."""
        state = self._states.get(key)
        if state is not None:
            state.refused_mib = min(size_mib, state.refused_mib or size_mib)
            state.refused_until = self._clock() + seconds

    def accept(self, key: BladeKey) -> None:
        """Memory came back to the blade: what it refused may fit now."""
        state = self._states.get(key)
        if state is not None:
            state.refused_mib = None

    def quarantine_ends(self) -> float | None:
        """Seconds until the next quarantine or refusal is over."""
        states = self._states.values()
        ends = [end for state in states for end in state.quarantine.values()]
        ends += [state.refused_until for state in states if state.refused_mib is not None]
        return max(0.0, min(ends) - self._clock()) if ends else None

    def expire_quarantines(self) -> bool:
        """Ends those that are over; whether any was."""
        now, changed = self._clock(), False
        for state in self._states.values():
            for host in [host for host, end in state.quarantine.items() if end <= now]:
                del state.quarantine[host]
                changed = True
            if state.refused_mib is not None and state.refused_until <= now:
                state.refused_mib = None
                changed = True
        return changed

    def hosts(self, state: BladeState) -> tuple[HostId, ...]:
        """Hosts that new regions of the blade may go to."""
        return tuple(host for host in state.blade.hosts if host not in state.quarantine)

    def sellable_mib(self, state: BladeState) -> int:
        """The capacity for a scheduler that counts what claims have."""
        records = self._ledger.of_blade(state.blade.key)
        withheld = sum(r.size_mib for r in records if not r.live)
        beyond = sum(r.size_mib - r.request_mib for r in records if r.live)
        return _whole_blocks(
            state.blade, state.blade.total_mib - state.foreign_mib - withheld - beyond
        )

    def free_mib(self, state: BladeState) -> int:
        """What is not allocated: the capacity for a scheduler that does not count."""
        return _whole_blocks(state.blade, state.blade.total_mib - self.committed_mib(state))

    def committed_mib(self, state: BladeState, *, but: RegionRecord | None = None) -> int:
        """What is taken of a blade, by regions of the ledger and by others'."""
        records = self._ledger.of_blade(state.blade.key)
        own = sum(r.size_mib for r in records if but is None or r.key != but.key)
        return own + state.foreign_mib

    def leaking_mib(self, state: BladeState) -> int:
        """What no claim has and is not free yet."""
        return sum(r.size_mib for r in self._ledger.of_blade(state.blade.key) if not r.live)

    def lost_all(self, key: BladeKey) -> bool:
        """Whether it lost all its regions and they are not cleaned up yet: a power cycle."""
        records = [r for r in self._ledger.of_blade(key) if r.ref and r.state is not _FREED]
        return bool(records) and all(record.lost for record in records)

    def has_lost(self, key: BladeKey) -> bool:
        """Whether the blade lost regions that are not cleaned up yet."""
        return any(r.lost and r.state is not _FREED for r in self._ledger.of_blade(key))


def pool_name(key: BladeKey) -> str:
    """The pool of a blade: one slice, one blade."""
    return f"{_label(key.appliance_id)}/{_label(key.blade_id)}"


def slice_name(driver: str, key: BladeKey) -> str:
    """The name of a blade's ResourceSlice."""
    return f"{_label(driver.replace('.', '-'))}-{_label(key.appliance_id)}-{_label(key.blade_id)}"


def device_name(key: BladeKey) -> str:
    """The name of a blade's device."""
    return _label(key.blade_id)


def _label(text: str) -> str:
    """A DNS label; one that had to be changed ends in a hash of the text, so that two differ."""
    cleaned = _NOT_A_LABEL.sub("-", text.lower()).strip("-")[:_LABEL_CHARS_MAX].strip("-")
    if cleaned == text:
        return text
    return f"{cleaned or 'x'}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def _whole_blocks(blade: Blade, size_mib: int) -> int:
    block = max(1, blade.block_mib)
    return max(0, size_mib // block * block)


def _offline(blade: Blade) -> Blade:
    return replace(blade, online=False)
