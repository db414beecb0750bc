"""Copies between the memory of a GPU and pinned memory of the host, on streams of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm import _custom_ops as custom_ops
from vllm.v1.kv_offload.cpu.host_register import host_register, host_unregister

if TYPE_CHECKING:
    from hymcache.connector.staging_buffer import BlockCopies


class CudaDevice:
    """A GPU's side of StagedTransfers.

    Loads and saves have a stream each, of low priority so that the engine's kernels come first.
    All copies of a batch go to the driver in one call (cuMemcpyBatchAsync on CUDA 12.8 and newer).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        lowest, _ = torch.cuda.Stream.priority_range()
        self._load_stream = torch.cuda.Stream(device, priority=lowest)
        self._save_stream = torch.cuda.Stream(device, priority=lowest)

    def pin(self, buffer: torch.Tensor) -> None:
        """Registers host memory; where that fails the copies work all the same, slower."""
        host_register(buffer.data_ptr(), buffer.nbytes)

    def unpin(self, buffer: torch.Tensor) -> None:
        """Takes the registration back."""
        host_unregister(buffer.data_ptr())

    def enter_thread(self) -> None:
        """Called once on the thread that copies."""
        torch.cuda.set_device(self._device)

    def fence(self) -> Any:
        """An event behind all that the engine has submitted to the GPU so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, copies: BlockCopies, fence: Any, *, to_device: bool) -> Any:
        """Starts copies behind a fence; returns an event that comes after them."""
        stream = self._load_stream if to_device else self._save_stream
        event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            stream.wait_event(fence)
            # Loaded bytes lie still in pinned memory; those to save were just computed.
            custom_ops.swap_blocks_batch(
                torch.from_numpy(copies.sources),
                torch.from_numpy(copies.targets),
                torch.from_numpy(copies.sizes),
                is_src_access_order_any=to_device,
            )
            event.record(stream)
        return event

    def done(self, event: Any) -> bool:
        """Whether an event has come. Never blocks."""
        return bool(event.query())

    def close(self) -> None:
        """Waits for the copies that were started."""
        self._load_stream.synchronize()
        self._save_stream.synchronize()
