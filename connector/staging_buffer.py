"""Host memory between the store and a device, in slots of one block each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hymcache.connector.block_layout import GroupLayout, Run
from hymcache.errors import ConfigError

_ALIGNMENT_BYTES: Final = 4096


class BlockCopies(NamedTuple):
    """Copies between addresses, all three arrays int64 and of one length."""

    sources: NDArray[np.int64]
    targets: NDArray[np.int64]
    sizes: NDArray[np.int64]


class StagingBuffer:
    """Slots for blocks, each at the same place in all layouts: an object, contiguous."""

    def __init__(self, staging_bytes: int, layouts: Sequence[GroupLayout]) -> None:
        """Raises ConfigError if not even two blocks fit."""
        block_bytes = max(layout.block_bytes for layout in layouts)
        self.slot_bytes = -(-block_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.slots = staging_bytes // self.slot_bytes
        if self.slots < 2:
            raise ConfigError(
                f"staging_bytes = {staging_bytes} is too small for two blocks of {block_bytes} "
                f"bytes; set it to {2 * self.slot_bytes} or more"
            )
        self.memory = torch.empty(self.slots * self.slot_bytes, dtype=torch.uint8)
        self._base = self.memory.data_ptr()
        self._layouts = layouts
        self._free = list(range(self.slots))

    @property
    def free_slots(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def take(self, count: int) -> NDArray[np.int64]:
        """Takes `count` of the free slots."""
        taken = self._free[:count]
        del self._free[:count]
        return np.asarray(taken, dtype=np.int64)

    def give_back(self, slots: NDArray[np.int64]) -> None:
        """Makes slots free again."""
        self._free += slots.tolist()

    def store_layouts(self) -> list[GroupLayout]:
        """The slots as the store should see them: block b of each layout is slot b."""
        return [
            GroupLayout(
                layout.group_id,
                self.slots,
                (Run(self._base, self.slot_bytes, layout.block_bytes),),
                layout.layout_id,
            )
            for layout in self._layouts
        ]

    def copies(
        self,
        layout: int,
        slots: NDArray[np.int64],
        block_ids: NDArray[np.int64],
        *,
        to_device: bool,
    ) -> BlockCopies:
        """The copies between slots and the device's blocks, run by run."""
        runs = np.asarray(self._layouts[layout].runs, dtype=np.int64)
        bases, strides, sizes = runs[:, 0], runs[:, 1], runs[:, 2]
        offsets = np.cumsum(sizes) - sizes
        staged = (self._base + slots[:, None] * self.slot_bytes + offsets).ravel()
        device = (bases + block_ids[:, None] * strides).ravel()
        all_sizes = np.tile(sizes, len(slots))
        if to_device:
            return BlockCopies(staged, device, all_sizes)
        return BlockCopies(device, staged, all_sizes)
