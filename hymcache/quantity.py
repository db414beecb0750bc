"""Sizes and durations as people write them: `"5GiB"`, `"250ms"`."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

_BYTES_OF_UNIT: Final = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_SECONDS_OF_UNIT: Final = {
    "us": Decimal("0.000001"),
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "min": Decimal(60),
    "h": Decimal(3600),
}
_NUMBER_AND_UNIT: Final = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)", re.ASCII)

_SIZE_FIX: Final = 'not a size; write bytes or a number with a unit, e.g. "10GiB" or "500MB"'
_DURATION_FIX: Final = 'not a duration; write a number with a unit, e.g. "10s" or "250ms"'


def parse_size(value: object) -> int:
    """Bytes of `"10GiB"`, `"500MB"`, `"4096"` or 4096. Raises ValueError with what to write."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _NUMBER_AND_UNIT.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(_SIZE_FIX)
    unit_bytes = _BYTES_OF_UNIT.get(match[2].lower() or "b")
    if unit_bytes is None:
        raise ValueError(f'"{match[2]}" is not a unit of size; write B, KiB, MiB, GiB or TiB')
    size = Decimal(match[1]) * unit_bytes
    if size != int(size):
        raise ValueError(f"{size} bytes is not a whole number")
    return int(size)


def parse_duration_s(value: object, *, bare_unit: str = "s") -> float:
    """Seconds of `"10s"`, `"250ms"` or of a number in `bare_unit`.

    Raises ValueError with what to write.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = f"{value:f}" if isinstance(value, float) else str(value)
    match = _NUMBER_AND_UNIT.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(_DURATION_FIX)
    unit_s = _SECONDS_OF_UNIT.get(match[2] or bare_unit)
    if unit_s is None:
        raise ValueError(f'"{match[2]}" is not a unit of time; write us, ms, s, min or h')
    return float(Decimal(match[1]) * unit_s)


def format_size(size_bytes: int) -> str:
    """The shortest text that parse_size() reads back: `"10GiB"`, `"1536MiB"`, `"12345"`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        unit_bytes = _BYTES_OF_UNIT[unit.lower()]
        if size_bytes and size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes}{unit}"
    return str(size_bytes)
