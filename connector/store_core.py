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
from hymcache.transport.verbs import make_initiator

logger = init_logger("vllm.hymcache.store")


class Store(Protocol):
    """A connection to the service, for one half of the connector."""

    def matcher(self) -> Matcher:
        """The scheduler's way in."""

    def transfers(self, layouts: Sequence[GroupLayout]) -> Transfers:
        """A worker's way in, over memory of the host."""

    def verbs_fallbacks(self) -> int:
        """Calls so far whose bytes went over TCP although RDMA was to be used."""

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
            verbs=make_initiator(settings.transport, settings.verbs()),
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
        self._register(layouts)
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

    def _register(self, layouts: Sequence[GroupLayout]) -> None:
        """For RDMA, which goes through other memory where this fails."""
        try:
            for address, size_bytes in memory_ranges(layouts):
                self._client.register_memory(address, size_bytes)
        except HymcacheError as error:
            if self._settings.transport == "verbs":
                raise
            logger.warning("HyMCache: RDMA has to copy, %s", error)

    def verbs_fallbacks(self) -> int:
        """Calls so far whose bytes went over TCP although RDMA was to be used."""
        return int(self._client.stats()["verbs_fallbacks"])

    def close(self) -> None:
        """Closes all connections."""
        self._client.close()


def memory_ranges(layouts: Sequence[GroupLayout]) -> list[tuple[int, int]]:
    """(address, bytes) of the memory that the layouts' blocks lie in, each byte once."""
    spans = sorted(
        (run.base, run.base + run.stride * (layout.num_blocks - 1) + run.size)
        for layout in layouts
        for run in layout.runs
        if layout.num_blocks > 0
    )
    merged: list[tuple[int, int]] = []
    for start, end in spans:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return [(start, end - start) for start, end in merged]
