"""Makes what the connector needs out of the C++ core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vllm.logger import init_logger

from hymcache._core import BlockLayout, PrefixMatcher, StoreClient, TransferEngine
from hymcache.connector.block_layout import GroupLayout
from hymcache.connector.ports import Matcher, Transfers
from hymcache.connector.settings import ConnectorSettings
from hymcache.errors import HymcacheError
from hymcache.lookup.keys import KEY_BYTES

logger = init_logger("vllm.hymcache.store")


class Store(Protocol):
    """A connection to the service, for one half of the connector."""

    def matcher(self) -> Matcher:
        """The scheduler's way in."""

    def transfers(self, layouts: Sequence[GroupLayout]) -> Transfers:
        """A worker's way in, over memory of the host."""

    def close(self) -> None:
        """Closes all connections."""


class CoreStore:
    """The service by the C++ core."""

    def __init__(self, settings: ConnectorSettings, name: str) -> None:
        """Connects in the background; a master that is not there is tried again and again."""
        self._settings = settings
        self._client = StoreClient(
            masters=settings.master_addresses(),
            transport=settings.transport,
            secret=settings.secret_bytes(),
            deadline_s=settings.deadline_s,
            connect_timeout_s=settings.connect_timeout_s,
            verify_checksums=settings.verify_checksums,
            name=name,
        )

    def warn_if_unreachable(self) -> None:
        """Says at the start what would otherwise show as a hit rate of zero."""
        try:
            self._client.lookup(bytes(KEY_BYTES))
        except HymcacheError as error:
            logger.warning(
                "HyMCache: no master answers (%s); the engine goes on without remote KV until one "
                "does",
                error,
            )

    def matcher(self) -> Matcher:
        """Lookups and prefetch on a thread of their own."""
        return PrefixMatcher(self._client)

    def transfers(self, layouts: Sequence[GroupLayout]) -> Transfers:
        """Copies straight between the store and these layouts, on threads of their own."""
        return TransferEngine(
            self._client,
            [
                BlockLayout(
                    [run.base for run in layout.runs],
                    [run.stride for run in layout.runs],
                    [run.size for run in layout.runs],
                    layout.num_blocks,
                )
                for layout in layouts
            ],
            load_threads=self._settings.load_threads,
            save_threads=self._settings.save_threads,
        )

    def close(self) -> None:
        """Closes all connections."""
        self._client.close()
