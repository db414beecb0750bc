"""The metrics of a frame server, which masters and storage nodes have alike."""

from __future__ import annotations

from hymcache.metric_table import Snapshot, StatRows, TableRow


def server_rows(stat: StatRows[Snapshot]) -> tuple[TableRow[Snapshot], ...]:
    """Connections and frames of the server whose statistics `stat` makes rows of."""
    return (
        stat("gauge", "connections", "Connections open."),
        stat("counter", "connections_accepted", "Connections accepted."),
        stat(
            "counter",
            "connections_refused",
            "Connections refused: too many, another version, a wrong secret, no handshake.",
        ),
        stat("counter", "protocol_errors", "Connections ended for what they sent."),
        stat("counter", "frames", "Frames received."),
    )
