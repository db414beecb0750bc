"""Reads a region's bytes, from docs/region-format.md alone."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

_MAGIC: Final = struct.Struct("<7sBQ")
_LAYOUT: Final = struct.Struct("<QQQIIIHHHHI")
_PARTICIPANT: Final = struct.Struct("<QQQ40s")
_ENTRY: Final = struct.Struct("<16sQIIQQ16s")
_POLYNOMIAL: Final = 0x82F63B78


def crc32c(data: bytes) -> int:
    """Bit by bit, as RFC 3720 has it."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (_POLYNOMIAL if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def _up(value: int, to: int) -> int:
    return -(-value // to) * to


@dataclass(frozen=True)
class Slot:
    """The word of a slot, taken apart, and its entry."""

    state: int
    referenced: bool
    held: bool
    owner: int
    epoch: int
    tag: int
    generation: int
    key: bytes
    name_space: int
    length: int
    crc32c: int
    flags: int
    stored_at_ms: int
    entry_reserved: bytes
    data: bytes


class RegionBytes:
    """The parts of a region."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.magic, self.version, self.claim = _MAGIC.unpack_from(raw, 0)
        (
            self.region_bytes,
            self.slot_bytes,
            self.data_offset,
            self.slots,
            self.config_bytes,
            self.lease_ms,
            self.participants,
            self.pins,
            self.probe_slots,
            self.reserved,
            self.crc32c,
        ) = _LAYOUT.unpack_from(raw, 16)
        self.config = raw[64 : 64 + self.config_bytes]
        self.control = _up(64 + self.config_bytes, 64)
        self.participants_at = self.control + 64
        self.participant_bytes = _up(64 + 8 * self.pins, 64)
        self.words_at = self.participants_at + self.participants * self.participant_bytes
        self.entries_at = _up(self.words_at + 8 * self.slots, 64)

    @property
    def header_checksum(self) -> int:
        """What crc32c should be."""
        return crc32c(self.raw[:8] + self.raw[16:60] + self.config)

    def participant(self, index: int) -> tuple[int, int, int, int, str]:
        """State, epoch, beats, pins_used and name."""
        place = self.participants_at + index * self.participant_bytes
        state, beats, used, name = _PARTICIPANT.unpack_from(self.raw, place)
        return state & 3, state >> 8, beats, used, name.rstrip(b"\0").decode()

    def pins_of(self, index: int) -> list[tuple[int, int]]:
        """Slot and generation of each pin."""
        place = self.participants_at + index * self.participant_bytes + 64
        cells = struct.unpack_from(f"<{self.pins}Q", self.raw, place)
        return [((cell & 0xFFFFFFFF) - 1, cell >> 32) for cell in cells if cell]

    def home(self, key: bytes) -> int:
        """The first slot where a key may be."""
        slots: int = self.slots
        return int.from_bytes(key[:8], "little") * slots >> 64

    def slot(self, index: int) -> Slot:
        """Word, entry and data of a slot."""
        (word,) = struct.unpack_from("<Q", self.raw, self.words_at + 8 * index)
        key, name_space, length, crc, flags, stored_at_ms, reserved = _ENTRY.unpack_from(
            self.raw, self.entries_at + 64 * index
        )
        place = self.data_offset + index * self.slot_bytes
        return Slot(
            state=word & 3,
            referenced=bool(word & 4),
            held=bool(word & 8),
            owner=word >> 4 & 0xFF,
            epoch=word >> 12 & 0xFF,
            tag=word >> 20 & 0xFFF,
            generation=word >> 32,
            key=key,
            name_space=name_space,
            length=length,
            crc32c=crc,
            flags=flags,
            stored_at_ms=stored_at_ms,
            entry_reserved=reserved,
            data=self.raw[place : place + self.slot_bytes],
        )

    def object_checksum(self, slot: Slot) -> int:
        """What the crc32c of an object should be."""
        seed = slot.key + struct.pack("<II", slot.generation, slot.length)
        return crc32c(seed + slot.data[: slot.length])
