"""`hymcache stats`: what a master and its nodes hold and do."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table

from hymcache.cli.configuration import ConfigOption, SettingsOption
from hymcache.cli.nodes import GrpcOption, admin_client
from hymcache.cli.output import JsonOption, output_console

if TYPE_CHECKING:
    from hymcache.master import AdminClient
    from hymcache.master.admin_pb2 import GetStatusResponse, Node

_WATCH_S: Final = 1.0


def stats(
    grpc: GrpcOption = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it anew every second, until Ctrl-C.")
    ] = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    settings: SettingsOption = None,
) -> None:
    """Show what a master and its nodes hold and do."""
    with admin_client(grpc, config, settings) as client:
        if as_json:
            _print_json(client)
        elif watch:
            _watch(client)
        else:
            output_console().print(_picture(client))


def _print_json(client: AdminClient) -> None:
    from google.protobuf.json_format import MessageToDict
    from google.protobuf.message import Message

    def fields(message: Message) -> object:
        return MessageToDict(
            message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )

    shown = {"master": fields(client.status()), "nodes": [fields(n) for n in client.nodes()]}
    typer.echo(json.dumps(shown, indent=2))


def _watch(client: AdminClient) -> None:
    with Live(_picture(client), console=output_console(), screen=True) as live:
        while True:
            time.sleep(_WATCH_S)
            live.update(_picture(client))


def _picture(client: AdminClient) -> Group:
    return Group(_master_table(client.status()), "", _node_table(client.nodes()))


def _master_table(status: GetStatusResponse) -> Table:
    uptime = datetime.now(UTC) - status.start_time.ToDatetime(UTC)
    hit_rate = status.lookup_hits / status.lookup_keys if status.lookup_keys else 0.0
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    rows = {
        "master": f"{', '.join(status.endpoints)}  (hymcache {status.version})",
        "up": str(uptime).partition(".")[0],
        "nodes": f"{status.nodes_alive} alive, {status.nodes_lost} lost",
        "objects": f"{status.objects_listed:,} in {_bytes(status.index_bytes)} of index",
        "lookups": f"{status.lookups:,} for {status.lookup_keys:,} keys, {hit_rate:.1%} hits",
        "connections": f"{status.connections:,}",
        "protocol errors": f"{status.protocol_errors:,}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _node_table(nodes: list[Node]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("node", "state", "address"):
        table.add_column(column)
    for column in ("objects", "listed", "used", "capacity", "sessions"):
        table.add_column(column, justify="right")
    for node in nodes:
        table.add_row(
            node.name,
            _state(node),
            node.tcp_endpoint,
            f"{node.objects:,}",
            f"{node.objects_listed:,}",
            _bytes(node.used_bytes),
            _bytes(node.capacity_bytes),
            f"{node.sessions:,}",
        )
    return table


def _state(node: Node) -> str:
    from hymcache.master.admin_pb2 import NodeState

    name = NodeState.Name(node.state).removeprefix("NODE_STATE_").lower()
    return f"[red]{name}[/red]" if name == "lost" else name


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"
