"""The copies that `hymcache bench micro` measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from hymcache.bench.reference import Transport
from hymcache.limits import KIB, MIB

Operation = Literal["get", "put"]

BATCH_BLOCKS: Final = 8


@dataclass(frozen=True)
class CopyCase:
    """Blocks of one size, one way, through one transport.

    Sides are the ways in which ours is measured beside the reference (micro_summary.SUFFIXES):
    without and with checksums; our copy without the service around it (the least that it could
    cost); objects that must be read from the device; writes together with their flush to it.
    """

    transport: Transport
    operation: Operation
    block_bytes: int
    sides: tuple[str, ...]

    @property
    def name(self) -> str:
        """As in summary.json, e.g. shm_get_16m."""
        size = self.block_bytes
        unit = f"{size // MIB}m" if size >= MIB else f"{size // KIB}k"
        return f"{self.transport}_{self.operation}_{unit}"


def copy_cases(transports: tuple[Transport, ...]) -> list[CopyCase]:
    """Cases in the order in which a round takes them: what is put is then got."""
    cases = []
    for transport in transports:
        for block_bytes in (16 * MIB, MIB):
            put, get = ["plain"], ["plain"]
            if transport == "shm":
                put += ["crc", "copy_alone"]
                get += ["crc", "copy_alone"]
                if block_bytes == 16 * MIB:
                    put.append("flushed")
                    get.append("device")
            cases.append(CopyCase(transport, "put", block_bytes, tuple(put)))
            cases.append(CopyCase(transport, "get", block_bytes, tuple(get)))
    return cases
