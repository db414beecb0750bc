"""What became of a block, beside what BlockStatus has: the region's own reasons to refuse one."""

from __future__ import annotations

from enum import IntEnum, unique
from typing import Final

from hymcache._core import BlockStatus


@unique
class Refusal(IntEnum):
    """A status of a store, as a byte like those of BlockStatus and apart from them."""

    PENDING = 128
    """Somebody is storing it at this moment."""

    LOST = 129
    """The slot was taken away during the store: this process was held for dead."""


TAKEN: Final[frozenset[int]] = frozenset(
    {BlockStatus.OK, BlockStatus.STORED_ALREADY, Refusal.PENDING}
)
"""The block is there, or will be in a moment, whoever stored it."""


def reason_of(status: int) -> str:
    """The label of a block that was not moved, in the metrics and the log."""
    if status in set(Refusal):
        return Refusal(status).name.lower()
    return BlockStatus(status).name.lower().removeprefix("skip_")
