"""The tiers: two engines each, which differ in where they can reuse KV from and in nothing else."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hymcache.bench.engine_process import EngineOptions, EngineProcess
from hymcache.bench.region_reuse.request_log import Tier
from hymcache.bench.service import ServiceOptions, running_service
from hymcache.bench.ttft_system import hymcache_transfer_config
from hymcache.limits import GIB, MIB

_ENGINES: Final = ("a", "b")
_HEADER_BYTES: Final = 2 * MIB  # what a device-dax maps at the least
TransferConfig = dict[str, Any]


class TierMissing(Exception):
    """A tier that this machine has not; the text says why."""


@dataclass(frozen=True)
class Place:
    """Where a run keeps things, the model, and the region's file and size."""

    cache_dir: Path
    log_dir: Path
    model: Path
    dtype: str
    devices: tuple[str, ...]  # of GPUs, one for each engine; none on a CPU
    region: Path
    region_bytes: int
    prefault: bool
    tokens_max: int


@dataclass(frozen=True)
class Engines:
    """Two engines, ready, and where they log to."""

    first: EngineProcess
    second: EngineProcess


def region_transfer_config(region: Path, size_bytes: int, **extra: object) -> TransferConfig:
    """The `--kv-transfer-config` of an engine with a shared region, as users write it."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "SharedRegionOffloadingSpec",
            "spec_module_path": "hymcache.connector.shared_region",
            "device": str(region),
            "size": size_bytes,
            **extra,
        },
    }


@contextmanager
def running_engines(tier: Tier, place: Place, repetition: int) -> Iterator[Engines]:
    """Starts a tier anew: engines, and what they share, that have seen nothing.

    Raises:
        TierMissing: this platform does not have the tier.
        ChildFailed: an engine did not start.
    """
    with _backend(tier, place) as config:

        def options(name: str) -> EngineOptions:
            return EngineOptions(
                name=f"{tier}-{repetition}-{name}",
                model=place.model,
                dtype=place.dtype,
                kv_transfer_config=config,
                tokens_max=place.tokens_max,
                # As in the paper: with a tier under test, the engine's own cache is off.
                prefix_caching=tier is Tier.T1,
                environment=_device_environment(place, _ENGINES.index(name)),
            )

        with (
            EngineProcess(options(_ENGINES[0]), place.log_dir) as first,
            EngineProcess(options(_ENGINES[1]), place.log_dir) as second,
        ):
            for engine in (first, second):
                engine.open()
            for engine in (first, second):
                engine.wait_open()
            yield Engines(first, second)


def _device_environment(place: Place, index: int) -> dict[str, str]:
    if not place.devices:
        return {}
    return {"CUDA_VISIBLE_DEVICES": place.devices[index % len(place.devices)]}


def _backend(tier: Tier, place: Place) -> AbstractContextManager[TransferConfig | None]:
    backends: dict[Tier, Callable[[], AbstractContextManager[TransferConfig | None]]] = {
        Tier.T0: nullcontext,
        Tier.T1: nullcontext,
        Tier.T2: _cpu_offload,
        Tier.T3: lambda: _remote(place),
        Tier.T4: lambda: _region(place),
    }
    return backends[tier]()


@contextmanager
def _cpu_offload() -> Iterator[TransferConfig]:
    from vllm.platforms import current_platform

    if not (current_platform.is_cuda_alike() or current_platform.is_xpu()):
        raise TierMissing(
            f"vLLM's CPU offload copies from a GPU's memory, and the platform here is "
            f"{current_platform.device_type}"
        )
    yield {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 2 * GIB},
    }


@contextmanager
def _remote(place: Place) -> Iterator[TransferConfig]:
    with tempfile.TemporaryDirectory(prefix="device-", dir=place.cache_dir) as folder:
        options = ServiceOptions(capacity_bytes=4 * GIB, staging_bytes=GIB, write_buffer_bytes=GIB)
        with running_service(
            Path(folder), place.log_dir, embedded=True, options=options
        ) as service:
            yield hymcache_transfer_config(service.master)


@contextmanager
def _region(place: Place) -> Iterator[TransferConfig]:
    # A file is the run's own: the command takes no other.
    is_device = place.region.is_char_device()
    if is_device:
        _blank(place.region)
    try:
        yield region_transfer_config(place.region, place.region_bytes, prefault=place.prefault)
    finally:
        if not is_device:
            place.region.unlink(missing_ok=True)


def _blank(device: Path) -> None:
    """Whoever opens the region next formats it."""
    with device.open("r+b") as file, mmap.mmap(file.fileno(), _HEADER_BYTES) as header:
        header[:] = bytes(_HEADER_BYTES)
