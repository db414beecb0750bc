"""What a master says of itself in /metrics, declared once; docs/metrics.md is made from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from hymcache.metric_table import StatRows, TableRow
from hymcache.transport.server_metrics import server_rows

if TYPE_CHECKING:
    from hymcache._core import MasterStats, MemberInfo


@dataclass(frozen=True, slots=True)
class MasterSnapshot:
    """A master at one moment."""

    stats: MasterStats
    members: list[MemberInfo]


_Row = TableRow[MasterSnapshot]
_stat: StatRows[MasterSnapshot] = StatRows(
    "hymcache_master", lambda snapshot: cast("Mapping[str, Any]", snapshot.stats)
)

METRICS: Final[tuple[_Row, ...]] = (
    _stat("counter", "lookups", "LOOKUP requests answered, each of up to 32 keys."),
    _stat("counter", "lookup_keys", "Keys looked up."),
    _stat("counter", "lookup_hits", "Keys for which a live node was named."),
    _stat("counter", "rows_published", "Rows that nodes published and the index took."),
    _stat("counter", "rows_refused", "Rows that the index had no room for."),
    _stat("counter", "rows_withdrawn", "Rows that nodes withdrew."),
    _stat("counter", "rows_swept", "Rows of lost or restarted nodes that were reclaimed."),
    _stat("counter", "registrations", "Times that a node registered."),
    _stat(
        "counter",
        "registrations_refused",
        "Times that a node was refused: its name is taken, or there are too many.",
    ),
    _stat("counter", "leases_lapsed", "Times that a node was lost."),
    *server_rows(_stat),
    _stat("counter", "cpu_seconds", "CPU time of the thread that answers."),
    _stat("gauge", "rows", "Rows in the index, those not yet reclaimed included."),
    _stat(
        "gauge",
        "rows_hidden",
        "Rows in the index that clients are not shown, and that will be reclaimed.",
    ),
    _stat("gauge", "rows_max", "Rows that the index may hold."),
    _stat("gauge", "index_bytes", "Memory of the index."),
    _Row(
        "gauge",
        "hymcache_master_nodes",
        "Nodes by state: alive, draining, lost.",
        lambda snapshot: _count_states(snapshot.members),
        ("state",),
    ),
    _stat("gauge", "namespaces", "Namespaces that rows in the index are of."),
    _Row(
        "gauge",
        "hymcache_master_namespace_rows",
        "Rows of each of the 32 largest namespaces, by fingerprint.",
        lambda snapshot: {
            (f"{fingerprint:016x}",): rows
            for fingerprint, rows in snapshot.stats["largest_namespaces"]
        },
        ("namespace",),
    ),
    _Row(
        "gauge",
        "hymcache_master_node_objects_listed",
        "Objects of a node that clients are shown.",
        lambda snapshot: {(member["name"],): member["rows"] for member in snapshot.members},
        ("node",),
    ),
    _Row(
        "gauge",
        "hymcache_master_node_capacity_bytes",
        "Capacity of a node's device, as of its last heartbeat.",
        lambda snapshot: {
            (member["name"],): member["capacity_bytes"] for member in snapshot.members
        },
        ("node",),
    ),
    _Row(
        "gauge",
        "hymcache_master_node_used_bytes",
        "Bytes in use on a node's device, as of its last heartbeat.",
        lambda snapshot: {(member["name"],): member["used_bytes"] for member in snapshot.members},
        ("node",),
    ),
    _Row(
        "gauge",
        "hymcache_master_node_lease_seconds",
        "Time until a node is lost if it says nothing more; 0 of a lost one.",
        lambda snapshot: {
            (member["name"],): member["lease_left_ms"] / 1e3 for member in snapshot.members
        },
        ("node",),
    ),
)


def _count_states(members: list[MemberInfo]) -> dict[tuple[str, ...], float]:
    states = {"alive": 0, "draining": 0, "lost": 0}
    for member in members:
        states[member["state"]] += 1
    return {(state,): count for state, count in states.items()}
