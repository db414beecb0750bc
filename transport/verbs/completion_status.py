"""What a work completion says, and what to do about it (ibv_wc_status of rdma-core)."""

from __future__ import annotations

from typing import Final

SUCCESS: Final = 0
FLUSHED: Final = 5
REMOTE_ACCESS: Final = 10
RETRIES_EXCEEDED: Final = 12

_NAMES: Final = {
    1: ("LOC_LEN_ERR", "a message is longer than the port allows"),
    2: ("LOC_QP_OP_ERR", "the queue pair refused the request"),
    4: ("LOC_PROT_ERR", "the local memory is not registered, or not for this"),
    5: ("WR_FLUSH_ERR", "the queue pair had failed before"),
    6: ("MW_BIND_ERR", "the memory window could not be bound"),
    8: ("LOC_ACCESS_ERR", "the local memory is not registered for writing"),
    9: ("REM_INV_REQ_ERR", "the peer refused the request: too long, or too many READs at once"),
    10: ("REM_ACCESS_ERR", "the key is not, or no longer, good for that memory of the peer"),
    11: ("REM_OP_ERR", "the peer could not carry the request out"),
    12: ("RETRY_EXC_ERR", "the peer does not answer: it is gone, or the link is down"),
    13: ("RNR_RETRY_EXC_ERR", "the peer is not ready"),
    19: ("FATAL_ERR", "the device has failed"),
    20: ("RESP_TIMEOUT_ERR", "the peer's answer did not come"),
    21: ("GENERAL_ERR", "the device reports an error of its transport"),
}


def describe(status: int, vendor_error: int = 0) -> str:
    """One phrase with the name that rdma-core's tools use."""
    name, meaning = _NAMES.get(status, (f"status {status}", "the request failed"))
    vendor = f", vendor error {vendor_error:#x}" if vendor_error else ""
    return f"{meaning} ({name}{vendor})"
