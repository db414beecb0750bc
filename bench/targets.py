"""The numbers that a release is held to, in one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from hymcache.limits import MIB


@dataclass(frozen=True)
class Target:
    """`limit` is the largest value that is good enough."""

    limit: float
    meaning: str
    unit: str = "x"


class Verdict(Enum):
    """What a number is worth beside its target."""

    MET = "met"
    MISSED = "missed"
    SKIPPED = "skipped"


METADATA_OBJECTS: Final = 655_360  # 10 TB in objects of 16 MiB
_METADATA_BYTES_MAX: Final = 64 * MIB

_MEMCPY: Final = "CPU per GB, of a plain memcpy through shared memory"
_SOCKET: Final = "CPU per GB, of a plain socket loop"
_BARE_COPY: Final = "CPU per GB of a load from a region, of a bare streaming copy"
# A load keeps this much of the bare copy's bandwidth, without and with checksums.
_LOAD_SHARE: Final = 0.85
_LOAD_SHARE_CRC: Final = 0.6

TARGETS: Final[Mapping[str, Target]] = {
    "shm_get_16m": Target(0.70, _MEMCPY),
    "shm_put_16m": Target(0.70, _MEMCPY),
    "shm_get_1m": Target(0.70, _MEMCPY),
    "shm_put_1m": Target(0.70, _MEMCPY),
    "shm_get_16m_crc": Target(1.00, _MEMCPY + ", with crc32c"),
    "shm_put_16m_crc": Target(1.00, _MEMCPY + ", with crc32c"),
    "shm_get_1m_crc": Target(1.00, _MEMCPY + ", with crc32c"),
    "shm_put_1m_crc": Target(1.00, _MEMCPY + ", with crc32c"),
    "tcp_get_16m": Target(1.15, _SOCKET),
    "tcp_put_16m": Target(1.15, _SOCKET),
    "tcp_get_1m": Target(1.15, _SOCKET),
    "tcp_put_1m": Target(1.15, _SOCKET),
    "lookup32_server_us": Target(25.0, "server CPU of a lookup of 32 keys", "us"),
    "lookup32_p50_ratio": Target(1.30, "p50 of a lookup of 32 keys, of an echo of its bytes"),
    "region_lookup32_hit_us": Target(10.0, "p50 of a lookup of 32 keys in a region", "us"),
    "region_lookup32_miss_us": Target(10.0, "the same for 32 keys that are not there", "us"),
    "region_load_16m": Target(1 / _LOAD_SHARE, _BARE_COPY),
    "region_load_1m": Target(1 / _LOAD_SHARE, _BARE_COPY),
    "region_load_16m_crc": Target(1 / _LOAD_SHARE_CRC, _BARE_COPY + ", with crc32c"),
    "region_load_1m_crc": Target(1 / _LOAD_SHARE_CRC, _BARE_COPY + ", with crc32c"),
    "region_cross_over_same": Target(1.05, "TTFT of reuse by another engine, of the same one's"),
    "metadata_bytes_per_object": Target(
        _METADATA_BYTES_MAX / METADATA_OBJECTS, "resident memory of the master", "B"
    ),
    "hit_ttft_ratio": Target(1.60, "TTFT of a remote hit, of a local hit, at 2k tokens"),
    "remote_minus_local_8k_ms": Target(80.0, "TTFT of a remote hit over a local one, 8k", "ms"),
    "remote_of_mooncake_8k": Target(0.40, "TTFT of a remote hit, of Mooncake's, 8k tokens"),
    "attach_own_p50_ms": Target(100.0, "allocation to Attached, fabric calls apart", "ms"),
    "prepare_p50_ms": Target(50.0, "NodePrepareResources", "ms"),
    "reconcile_s": Target(60.0, "many claims (1000) allocated at once, until attached", "s"),
    "controller_peak_mib": Target(200.0, "resident memory of the controller with them", "MiB"),
}


def verdict(name: str, value: float | None) -> Verdict | None:
    """None for a number that has no target."""
    target = TARGETS.get(name)
    if target is None:
        return None
    if value is None:
        return Verdict.SKIPPED
    return Verdict.MET if value <= target.limit else Verdict.MISSED
