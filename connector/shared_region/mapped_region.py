"""How the two halves of an engine map their region."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import numpy as np
from vllm.logger import init_logger

from hymcache._core import BlockStatus, RegionStatus
from hymcache.chm_device.region import FORMAT_WAIT_S, Region, RegionFormat
from hymcache.connector.shared_region.attachment import Attachment
from hymcache.connector.shared_region.outcomes import Refusal
from hymcache.connector.shared_region.settings import ORIGIN
from hymcache.errors import ConfigError
from hymcache.lookup.region_directory import RegionDirectory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hymcache.connector.shared_region.facts import Facts
    from hymcache.connector.shared_region.settings import RegionSettings

logger = init_logger("vllm.hymcache.region")

# What a region answers, in the words of Transfers.
_OF_STORE: Final[Mapping[RegionStatus, int]] = {
    RegionStatus.OK: BlockStatus.OK,
    RegionStatus.STORED_ALREADY: BlockStatus.STORED_ALREADY,
    RegionStatus.PENDING: Refusal.PENDING,
    RegionStatus.FULL: BlockStatus.SKIP_DEVICE_FULL,
    RegionStatus.WRONG_SIZE: BlockStatus.SKIP_TOO_LARGE,
    RegionStatus.LOST: Refusal.LOST,
}
_OF_LOAD: Final = {
    RegionStatus.OK: BlockStatus.OK,
    RegionStatus.CORRUPT: BlockStatus.CORRUPT,
    # An object of another length under this key is not what was asked for.
    RegionStatus.WRONG_SIZE: BlockStatus.CORRUPT,
}


def open_store(settings: RegionSettings, facts: Facts, block_bytes: int) -> RegionStore:
    """Maps a region with its data, and formats it if nobody has.

    `block_bytes` is the longest object of this engine. Raises ConfigError where it was formatted
    for other facts (both sides are named), is not a region, or has slots too small for a block;
    DeviceError, Unavailable.
    """
    form = RegionFormat(settings.slot_bytes or block_bytes, facts)
    if form.slot_bytes < block_bytes:
        raise ConfigError(
            f"{ORIGIN}: slot_bytes = {form.slot_bytes} is less than a block of this engine, "
            f"{block_bytes} bytes; write at least that, or remove the key"
        )
    directory = _open_directory(settings, form, wait_s=FORMAT_WAIT_S)
    core = directory.region.core
    # Not for one that is attached anew: an engine that runs does not wait for all of the pages.
    prefault = core.kind == "dax" if settings.prefault is None else settings.prefault
    if prefault:
        core.prefault()
    return RegionStore(
        Attachment(lambda: _open_directory(settings, form, wait_s=0.0), directory=directory)
    )


def _open_directory(
    settings: RegionSettings, form: RegionFormat, *, wait_s: float
) -> RegionDirectory:
    region = Region.open(
        settings.device,
        form,
        offset=settings.offset,
        size_bytes=settings.size,
        durable=settings.durable,
        wait_s=wait_s,
    )
    logger.info(
        "HyMCache: %s the region %s: %d slots of %d bytes, %s",
        "formatted" if region.formatted_here else "attached to",
        settings.device,
        region.geometry["slots"],
        region.geometry["slot_bytes"],
        region.core.kind,
    )
    return RegionDirectory(region, name=_name("worker"), verify_checksums=settings.verify_checksums)


def attach_directory(settings: RegionSettings) -> RegionDirectory:
    """Maps the headers and the directory of a region that somebody has formatted, never its data.

    Raises ConfigError, DeviceError, Unavailable; does not wait for one that is being formatted.
    """
    region = Region.attach(
        settings.device,
        offset=settings.offset,
        size_bytes=settings.size,
        map_data=False,
        wait_s=0.0,
    )
    region.core.prefault()
    return RegionDirectory(region, name=_name("scheduler"))


class RegionStore:
    """Copies into and out of a region, in the words of Transfers; see transfers.RegionCopies.

    While the region is gone all blocks are unavailable.
    """

    def __init__(self, attachment: Attachment) -> None:
        self.attachment: Final = attachment

    def holds_all(self, keys: bytes) -> bool:
        """Whether all of these keys can be loaded now."""
        return bool(self.attachment.use(lambda found: holds_all(found, keys)))

    def touch(self, keys: bytes) -> None:
        """Marks objects as used, for CLOCK."""
        self.attachment.use(lambda found: found.core.touch(keys))

    def store(
        self,
        keys: bytes,
        addresses: NDArray[np.int64],
        sizes: NDArray[np.int64],
        name_space: int,
    ) -> bytes:
        """A BlockStatus or Refusal for each key.

        A block is a row of `addresses`, its parts are `sizes` long.
        """
        table = addresses.astype(np.uint64), sizes.astype(np.uint64)
        found = self.attachment.use(lambda region: region.core.store(keys, *table, name_space))
        if found is None:
            return bytes([BlockStatus.UNAVAILABLE]) * len(addresses)
        return bytes(_OF_STORE.get(RegionStatus(s), BlockStatus.DEVICE_ERROR) for s in found)

    def load(self, keys: bytes, addresses: NDArray[np.int64], sizes: NDArray[np.int64]) -> bytes:
        """A BlockStatus for each key, likewise; what is not OK is undefined."""
        table = addresses.astype(np.uint64), sizes.astype(np.uint64)
        found = self.attachment.use(lambda region: region.core.load(keys, *table))
        if found is None:
            return bytes([BlockStatus.UNAVAILABLE]) * len(addresses)
        return bytes(_OF_LOAD.get(RegionStatus(s), BlockStatus.MISS) for s in found)

    def close(self) -> None:
        """Leaves the region."""
        self.attachment.close()


def holds_all(directory: RegionDirectory, keys: bytes) -> bool:
    """Whether all of these keys can be loaded now; plain loads."""
    return not directory.core.lookup(keys).strip(bytes([RegionStatus.OK]))


def _name(half: str) -> str:
    return f"vllm-{half} {socket.gethostname()}:{os.getpid()}"
