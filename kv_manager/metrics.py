"""What a storage node says of itself in /metrics, declared once; docs/metrics.md shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from hymcache.metric_table import TableRow

NodeSnapshot = Mapping[str, Any]
"""StorageNode.stats() at one moment."""

_Row = TableRow[NodeSnapshot]


def _stat(kind: Literal["counter", "gauge"], key: str, documentation: str) -> _Row:
    def read(snapshot: NodeSnapshot) -> float:
        return float(snapshot[key])

    return _Row(kind, f"hymcache_node_{key}", documentation, read)


METRICS: Final[tuple[_Row, ...]] = (
    _stat("gauge", "objects", "Objects that can be read."),
    _stat("gauge", "object_bytes", "Their bytes."),
    _stat("gauge", "index_bytes", "Memory of the node's directory."),
    _stat("gauge", "draining", "1 when the node takes no writes."),
    _stat("gauge", "device_capacity_bytes", "Capacity of the device."),
    _stat("gauge", "device_used_bytes", "Addresses given out, dead bytes not reclaimed included."),
    _stat("gauge", "device_live_bytes", "Bytes of the device that objects occupy."),
    _stat("counter", "device_reads", "Objects staged from the device."),
    _stat("counter", "device_read_bytes", "Their bytes."),
    _stat("counter", "device_read_errors", "Reads that the device failed."),
    _stat("counter", "device_writes", "Objects flushed to the device."),
    _stat("counter", "device_written_bytes", "Their bytes."),
    _stat("counter", "device_write_errors", "Writes that the device failed; the object is lost."),
    _stat("counter", "device_resident_hits", "Prefetches answered from bytes still in DRAM."),
    _stat("gauge", "staging_bytes", "Size of the staging window."),
    _stat("gauge", "staging_used_bytes", "Bytes of it that requests hold."),
    _stat("gauge", "write_buffer_bytes", "Size of the write buffer."),
    _stat("gauge", "write_buffer_used_bytes", "Bytes of it granted to writers or not yet flushed."),
    _stat("gauge", "sessions", "Prefetch sessions open."),
    _stat("counter", "sessions_opened", "Prefetch sessions opened."),
    _stat("counter", "sessions_expired", "Prefetch sessions ended by their lease."),
    _stat("counter", "blocks_ready", "Blocks handed to readers."),
    _stat("counter", "blocks_missed", "Blocks asked for by a stale location."),
    _stat("counter", "blocks_failed", "Blocks that the device could not read."),
    _stat("counter", "blocks_revoked", "Staged blocks given up for a request that was waiting."),
    _stat("counter", "bytes_handed", "Bytes that clients read through shared memory."),
    _stat("counter", "bytes_sent", "Bytes sent over TCP."),
    _stat("counter", "writes_offered", "Blocks offered by writers."),
    _stat("counter", "writes_granted", "Blocks granted a slot."),
    _stat("gauge", "writes_open", "Granted and neither committed nor aborted."),
    _stat("counter", "writes_committed", "Blocks stored."),
    _stat("counter", "writes_committed_bytes", "Their bytes."),
    _stat("counter", "writes_aborted", "Grants given back: by the writer, its end, or the lease."),
    _Row(
        "counter",
        "hymcache_node_writes_refused",
        "Blocks refused, by reason.",
        lambda snapshot: {(reason,): count for reason, count in snapshot["writes_refused"].items()},
        ("reason",),
    ),
    _stat("counter", "corrupt_reports", "Blocks that readers found corrupt."),
    _stat("counter", "corrupt_dropped", "Of those, objects that were corrupt here, and dropped."),
    _stat("counter", "flush_failures", "Objects lost because they could not be flushed."),
    _stat("gauge", "connections", "Connections open."),
    _stat("counter", "connections_accepted", "Connections accepted."),
    _stat(
        "counter",
        "connections_refused",
        "Connections refused: too many, another version, a wrong secret, no handshake.",
    ),
    _stat("counter", "protocol_errors", "Connections ended for what they sent."),
    _stat("counter", "frames", "Frames received."),
    _Row(
        "gauge",
        "hymcache_node_master_live",
        "1 for a master that has registered the node and all its objects.",
        lambda snapshot: {
            (link["endpoint"],): float(link["state"] == "live") for link in snapshot["masters"]
        },
        ("master",),
    ),
    _Row(
        "counter",
        "hymcache_node_master_connects",
        "Connections made to a master.",
        lambda snapshot: {(link["endpoint"],): link["connects"] for link in snapshot["masters"]},
        ("master",),
    ),
)
