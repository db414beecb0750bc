"""Shared regions: memory that several hosts map, laid out by whoever comes first.

A region lies in a device-dax (composed CXL memory), a file, or a memfd; docs/region-format.md
describes it to the last byte. There is no service and no order in which its users must start: one
that finds it blank formats it, the others attach, and refuse what was formatted for another model
or another geometry.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from hymcache._core import SharedRegion
from hymcache.errors import ConfigError

if TYPE_CHECKING:
    from hymcache._core import RegionGeometry

Facts = Mapping[str, str | int]
"""What the bytes of an object depend on, by name: model, dtype, block size, ..."""

PARTICIPANTS: Final = 256
"""Processes that may be attached at a time, the most that the format has room for: an engine with
tensor parallelism of 8 is nine, its scheduler included."""

PINS: Final = 1016
"""Pins of one process; with its header a participant takes 8 KiB."""

LEASE_S: Final = 10.0
"""How long a process may be silent before its slots and pins are taken back. A host that swaps or
a virtual machine that moves is silent for seconds; a dead writer costs one slot for this long."""

FORMAT_WAIT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class RegionFormat:
    """What a region is formatted with by the first that opens it.

    `slot_bytes` is the length of the largest object, `facts` what all users have to agree on.
    """

    slot_bytes: int
    facts: Facts
    participants: int = PARTICIPANTS
    pins: int = PINS
    lease_s: float = LEASE_S

    @property
    def config(self) -> str:
        """The facts as the region has them: JSON in the order of their names."""
        return json.dumps(dict(self.facts), sort_keys=True, separators=(",", ":"))


class Region:
    """A region that is mapped; closed when nothing refers to it any more."""

    def __init__(self, core: SharedRegion, path: str) -> None:
        """Takes what `open` or `attach` has mapped."""
        self.core: Final = core
        self.path: Final = path

    @classmethod
    def open(
        cls,
        path: str | Path,
        form: RegionFormat,
        *,
        offset: int = 0,
        size_bytes: int = 0,
        map_data: bool = True,
        prefault: bool = False,
        durable: bool = False,
        force: bool = False,
        wait_s: float = FORMAT_WAIT_S,
    ) -> Self:
        """Formats the region if it is blank (with `force`, whatever it holds), else attaches.

        A file that does not exist is made, with `size_bytes` (below /dev only in /dev/shm and
        /dev/hugepages), and one that ends in front of `offset` grows by them; 0 takes all from
        `offset` on. Who formats takes all of a file's room at once. Without `map_data` only headers
        and directory are mapped: enough to look up, pin and remove. `durable` has each object, its
        entry and its word on a file's disk when it is stored.

        Raises:
            ConfigError: it was formatted for other facts, has another geometry or version, or
                holds something that is not a region, lies inside a region in front of it, or there
                is no such device.
            Unavailable: another process does not come to an end of formatting it.
            DeviceError: the operating system refused; the file system has no room for it.
        """
        core = SharedRegion(
            str(path),
            offset=offset,
            size_bytes=size_bytes,
            slot_bytes=form.slot_bytes,
            config=form.config,
            participants=form.participants,
            pins=form.pins,
            lease_ms=round(form.lease_s * 1000),
            map_data=map_data,
            prefault=prefault,
            durable=durable,
            force=force,
            wait_s=wait_s,
        )
        region = cls(core, str(path))
        region.require(form)
        return region

    @classmethod
    def attach(
        cls,
        path: str | Path,
        *,
        offset: int = 0,
        size_bytes: int = 0,
        map_data: bool = True,
        writable: bool = True,
        wait_s: float = FORMAT_WAIT_S,
    ) -> Self:
        """Attaches to a region whatever it was formatted for; never formats. Raises as `open`."""
        core = SharedRegion(
            str(path),
            offset=offset,
            size_bytes=size_bytes,
            map_data=map_data,
            writable=writable,
            wait_s=wait_s,
        )
        return cls(core, str(path))

    @property
    def formatted_here(self) -> bool:
        """True in the one process that formatted it."""
        return self.core.formatted_here

    @property
    def geometry(self) -> RegionGeometry:
        """What its headers say."""
        return self.core.geometry

    @property
    def facts(self) -> dict[str, str | int]:
        """What it was formatted for. Raises ConfigError where that is not a JSON object."""
        try:
            facts = json.loads(self.core.config or "{}")
        except ValueError:  # no JSON, or no UTF-8
            facts = None
        if not isinstance(facts, dict):
            raise ConfigError(
                f"{self.path}: its configuration is not a JSON object; "
                f"format it anew: hymcache region format --force {self.path}"
            )
        return facts

    def require(self, form: RegionFormat) -> None:
        """Raises ConfigError, with both sides named, unless it was formatted for the same."""
        theirs, ours = self.facts, dict(form.facts)
        differing = [
            name for name in sorted(theirs.keys() | ours) if theirs.get(name) != ours.get(name)
        ]
        if differing:
            raise ConfigError(
                f"{self.path} was formatted for {_named(theirs, differing)}, "
                f"this process has {_named(ours, differing)}; name another region or offset, "
                f"or format it anew: hymcache region format --force {self.path}"
            )
        if self.geometry["slot_bytes"] < form.slot_bytes:
            raise ConfigError(
                f"{self.path} has slots of {self.geometry['slot_bytes']} bytes, this process needs "
                f"{form.slot_bytes}; format it anew: hymcache region format --force {self.path}"
            )


def _named(facts: Facts, names: list[str]) -> str:
    return " ".join(f"{name}={facts.get(name, '(none)')}" for name in names)
