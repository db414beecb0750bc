"""The engine's memory: what decides the order of its bytes, and how blocks get there."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import torch
from vllm.platforms import current_platform
from vllm.version import __version__ as vllm_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig

    from hymcache.connector.block_layout import GroupLayout
    from hymcache.connector.ports import Transfers
    from hymcache.connector.settings import ConnectorSettings
    from hymcache.connector.store_core import Store


def backend_facts(vllm_config: VllmConfig) -> list[str]:
    """What the order inside a block depends on beside the strides of its views.

    A backend may pack a page as it likes, and may pack it otherwise in its next version; on a CPU
    the page depends on the instruction set.
    """
    layers = vllm_config.compilation_config.static_forward_context.values()
    backends = {
        layer.get_attn_backend().get_name()
        for layer in layers
        if hasattr(layer, "get_attn_backend")
    }
    facts = [
        "vllm " + ".".join(vllm_version.split(".")[:2]),
        "device " + current_platform.device_type,
        "backends " + ",".join(sorted(backends)),
    ]
    if current_platform.is_cpu():
        isas = {str(layer.isa) for layer in layers if hasattr(layer, "isa")}
        facts += [
            "machine " + platform.machine(),
            "capability " + torch.backends.cpu.get_cpu_capability(),
            "isa " + ",".join(sorted(isas)),
        ]
    return facts


def engine_transfers(
    store: Store,
    layouts: Sequence[GroupLayout],
    device: torch.device,
    settings: ConnectorSettings,
) -> Transfers:
    """Transfers to the engine's memory: direct on a CPU, by pinned host memory on a GPU."""
    if device.type == "cpu":
        return store.transfers(layouts)
    # Loaded for a GPU only.
    from hymcache.connector.cuda_device import CudaDevice
    from hymcache.connector.staged_transfers import StagedTransfers

    return StagedTransfers(
        store.transfers, layouts, CudaDevice(device), staging_bytes=settings.staging_bytes
    )
