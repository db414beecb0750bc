"""`hymcache drain | undrain | forget`: what an operator does to a node, at its master."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hymcache.address import Address
from hymcache.cli.configuration import ConfigOption, SettingsOption
from hymcache.config_source import load_config
from hymcache.errors import ConfigError

if TYPE_CHECKING:
    from hymcache.master import AdminClient

NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="The node's name.")]
GrpcOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help="The master's gRPC address instead of the configured one."
    ),
]


def admin_client(grpc: str | None, config: ConfigOption, settings: SettingsOption) -> AdminClient:
    """A client of the configured master, or of the one at `grpc`. Raises ConfigError."""
    from hymcache.master import AdminClient

    loaded = load_config(config, settings=settings or ())
    address = loaded.master.grpc if grpc is None else _parse_address(grpc)
    if address is None:
        raise ConfigError("master.grpc is off in the configuration; name an address with --grpc")
    return AdminClient(
        str(address), secret=loaded.secret_bytes(), timeout_s=loaded.client.deadline_s
    )


def drain(
    node: NodeArgument,
    grpc: GrpcOption = None,
    config: ConfigOption = None,
    settings: SettingsOption = None,
) -> None:
    """Have a node take no more writes; what it holds is read as before."""
    with admin_client(grpc, config, settings) as client:
        drained = client.drain(node)
    typer.echo(f"{drained.name} takes no more writes; with several masters, drain it at each")


def undrain(
    node: NodeArgument,
    grpc: GrpcOption = None,
    config: ConfigOption = None,
    settings: SettingsOption = None,
) -> None:
    """Have a drained node take writes again."""
    with admin_client(grpc, config, settings) as client:
        name = client.undrain(node).name
    typer.echo(f"{name} takes writes again")


def forget(
    node: NodeArgument,
    grpc: GrpcOption = None,
    config: ConfigOption = None,
    settings: SettingsOption = None,
) -> None:
    """Drop a lost node from the master's list, with what it is remembered to hold."""
    with admin_client(grpc, config, settings) as client:
        client.forget(node)
    typer.echo(f"{node} is forgotten; it is listed again if it comes back")


def _parse_address(text: str) -> Address:
    try:
        return Address.parse(text)
    except ValueError as error:
        raise ConfigError(f"--grpc {text}: {error}") from error
