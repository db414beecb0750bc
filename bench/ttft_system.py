"""The systems whose hits are timed: each gives two engines a way to share KV.

A system is a context: what serves it runs inside. Engines of all systems are made of the same
model and the same options; only the connector differs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from hymcache.bench.engine_process import EngineOptions
from hymcache.bench.mooncake_peer import running_mooncake
from hymcache.bench.service import ServiceOptions, running_service
from hymcache.bench.transport_choice import TransportChoice
from hymcache.limits import GIB

OURS: Final = "hymcache"


class Peer(StrEnum):
    """What HyMCache can be timed beside."""

    MOONCAKE = "mooncake"
    EXAMPLE = "example"


@dataclass(frozen=True)
class RunningSystem:
    """How its engines are made, and the processes that serve them."""

    name: str
    options: Callable[[str], EngineOptions]
    server_pids: tuple[int, ...] = field(default=())


@dataclass(frozen=True)
class Place:
    """Where a run keeps what it needs: a cache that stays, logs, and the model."""

    cache_dir: Path
    log_dir: Path
    model: Path

    def engine(self, name: str, kv_transfer_config: dict[str, Any], **other: Any) -> EngineOptions:
        """Options of an engine with this connector; all else is the same for all systems."""
        return EngineOptions(
            name=name, model=self.model, kv_transfer_config=kv_transfer_config, **other
        )


def hymcache_transfer_config(master: str, **extra: object) -> dict[str, Any]:
    """The `--kv-transfer-config` of an engine that uses HyMCache, as users write it."""
    return {
        "kv_connector": "HyMCacheConnector",
        "kv_connector_module_path": "hymcache.connector.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"master": master, **extra},
    }


@contextmanager
def hymcache_system(place: Place, transport: TransportChoice) -> Iterator[RunningSystem]:
    """The embedded service, `hymcache up`, with DRAM and disk for all prompts of a run."""
    with tempfile.TemporaryDirectory(prefix="device-", dir=place.cache_dir) as folder:
        options = ServiceOptions(capacity_bytes=4 * GIB, staging_bytes=GIB, write_buffer_bytes=GIB)
        with running_service(
            Path(folder), place.log_dir, embedded=True, options=options
        ) as service:
            config = hymcache_transfer_config(service.master, transport=transport.value)
            yield RunningSystem(
                OURS, lambda name: place.engine(f"{OURS}-{name}", config), service.pids
            )


@contextmanager
def mooncake_system(place: Place) -> Iterator[RunningSystem]:
    """Mooncake Store over tcp. Raises PeerMissing where it cannot be had."""
    with running_mooncake(place.cache_dir, place.log_dir) as peer:
        yield RunningSystem(
            Peer.MOONCAKE,
            lambda name: place.engine(
                f"{Peer.MOONCAKE}-{name}",
                peer.kv_transfer_config,
                environment=peer.environment,
                python=peer.python,
            ),
            peer.server_pids,
        )


@contextmanager
def example_system(place: Place) -> Iterator[RunningSystem]:
    """vLLM's ExampleConnector, files in the page cache: next to no machinery, so a floor."""
    with tempfile.TemporaryDirectory(prefix="example-", dir=place.cache_dir) as folder:
        config = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"shared_storage_path": folder},
        }
        yield RunningSystem(
            Peer.EXAMPLE, lambda name: place.engine(f"{Peer.EXAMPLE}-{name}", config)
        )


def peer_system(peer: Peer, place: Place) -> AbstractContextManager[RunningSystem]:
    """Starts a peer. Raises PeerMissing where it cannot be had."""
    return mooncake_system(place) if peer is Peer.MOONCAKE else example_system(place)
