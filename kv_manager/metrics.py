"""What a storage node says of itself in /metrics, declared once; docs/metrics.md shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hymcache.metric_table import StatRows, TableRow
from hymcache.transport.server_metrics import server_rows

NodeSnapshot = Mapping[str, Any]
"""StorageNode.stats() at one moment."""

_Row = TableRow[NodeSnapshot]
_stat: StatRows[NodeSnapshot] = StatRows("hymcache_node", lambda snapshot: snapshot)

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
    _stat("counter", "bytes_handed", "Bytes that clients read through shared memory or RDMA."),
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
    _stat("gauge", "verbs_peers", "Connections that reach the memory by RDMA."),
    _stat("counter", "verbs_connects", "Such connections made."),
    _stat("counter", "verbs_refused", "Connections that asked for RDMA in vain."),
    _stat("gauge", "verbs_keys_held", "RDMA keys of single blocks in the hands of clients."),
    _stat("counter", "verbs_keys_made", "RDMA keys of single blocks made."),
    _stat("counter", "verbs_keys_missing", "Blocks that had to go another way for want of a key."),
    _stat(
        "counter", "verbs_keys_stuck", "RDMA connections ended because a key of theirs would not."
    ),
    _stat("counter", "flush_failures", "Objects lost because they could not be flushed."),
    *server_rows(_stat),
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
