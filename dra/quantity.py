"""Quantities as Kubernetes writes them: `"24Gi"`, `"500m"`, `"1e3"`."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

_FACTORS: Final = {
    "": Decimal(1),
    **{f"{prefix}i": Decimal(1 << 10 * (n + 1)) for n, prefix in enumerate("KMGTPE")},
    **{prefix: Decimal(10) ** (3 * (n + 1)) for n, prefix in enumerate("kMGTPE")},
    **{prefix: Decimal(10) ** (-3 * (n + 1)) for n, prefix in enumerate("mun")},
}
_QUANTITY: Final = re.compile(
    r"([+-]?(?:[0-9]{1,19}\.?[0-9]{0,9}|\.[0-9]{1,9}))(?:[eE]([+-]?[0-9]{1,2})|([A-Za-z]{0,2}))",
    re.ASCII,
)


def parse_quantity(text: object) -> Decimal:
    """The number that a quantity stands for. Raises ValueError."""
    match = _QUANTITY.fullmatch(str(text).strip())
    if match is None:
        raise ValueError(f'"{text}" is not a quantity; write e.g. "24Gi" or "24576"')
    number, exponent, suffix = match.groups()
    if exponent is not None:
        return Decimal(number) * Decimal(10) ** int(exponent)
    factor = _FACTORS.get(suffix)
    if factor is None:
        raise ValueError(f'"{text}": "{suffix}" is not a suffix of quantities; write e.g. "Gi"')
    return Decimal(number) * factor


def whole_quantity(text: object) -> int:
    """A quantity that is a whole number. Raises ValueError."""
    value = parse_quantity(text)
    if value != int(value):
        raise ValueError(f'"{text}" is not a whole number')
    return int(value)
