"""What the scheduler sees of a region: which chunks it holds."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from hymcache.connector.shared_region.attachment import Attachment
from hymcache.connector.shared_region.keys import RegionKeys
from hymcache.connector.shared_region.mapped_region import holds_all
from hymcache.errors import ConfigError, HymcacheError

if TYPE_CHECKING:
    from hymcache.lookup.region_directory import RegionDirectory

_SALT_BYTES: Final = 8


class Directory:
    """The chunks of one engine in its region.

    The region is attached at the start, once the engine's workers have formatted it; where that
    does not succeed, or it is formatted anew, nothing is found, and it is tried again each second.
    """

    def __init__(
        self,
        attach: Callable[[], RegionDirectory],
        keys: Callable[[Mapping[str, str | int]], RegionKeys],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`attach` maps the directory; `keys` makes keys of the facts that the region has."""
        self._attach_region = attach
        self._make_keys = keys
        self._keys: RegionKeys | None = None
        self._facts: Mapping[str, str | int] | None = None
        self._salt = b""
        self.attachment: Final = Attachment(self._attach, clock=clock)
        self.attachment.attached()

    def name_of(self, chunk: bytes) -> bytes:
        """What workers know a chunk by: its key, marked after a change of weights."""
        return self._salt + chunk

    def holds(self, chunk: bytes) -> bool:
        """Whether all parts of a chunk, of all ranks, can be loaded now."""
        return bool(self.attachment.use(lambda found: holds_all(found, self._keys_of(chunk))))

    def touch(self, chunk: bytes) -> None:
        """Marks a chunk as used."""
        self.attachment.use(lambda found: found.core.touch(self._keys_of(chunk)))

    def renew(self) -> None:
        """Leaves all chunks behind. No other engine can know the weights of this one now."""
        self._salt = secrets.token_bytes(_SALT_BYTES)

    def close(self) -> None:
        """Leaves the region."""
        self.attachment.close()

    def _attach(self) -> RegionDirectory:
        directory = self._attach_region()
        try:
            facts = directory.region.facts
            if self._facts not in (None, facts):
                raise ConfigError(
                    f"{directory.region.path} was formatted anew for another configuration; "
                    "restart this engine, or format it for this one"
                )
            self._keys, self._facts = self._make_keys(facts), facts
        except HymcacheError:
            directory.close()
            raise
        return directory

    def _keys_of(self, chunk: bytes) -> bytes:
        if self._keys is None:
            raise ValueError("there are no keys before the region is attached")
        return self._keys.of_chunk(self.name_of(chunk))
