"""`hymcache dra simulate`."""

from __future__ import annotations

import re
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Final

import typer

from hymcache.address import Address
from hymcache.dra.host_agent.sessions import Credentials
from hymcache.dra.service_process import AddressOption, run_services
from hymcache.dra.simulator.service import Dialect
from hymcache.dra.simulator.system import RemoteAgents, SimulatedSystem, SimulationOptions
from hymcache.errors import ConfigError
from hymcache.limits import MIB
from hymcache.quantity import parse_size

_HOST: Final = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)
_LISTEN: Final = Address("127.0.0.1", 8080)
_BLOCKS_MAX: Final = 65_536
# Devices are whole pages of 2 MiB.
_ALIGN_MIB: Final = 2


def simulate(
    *,
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A host; again for each more. [default: node-1, node-2]"),
    ] = None,
    blades: Annotated[int, typer.Option(min=1, max=64, help="Blades, cabled to all hosts.")] = 1,
    capacity: Annotated[str, typer.Option(metavar="SIZE", help="Memory of a blade.")] = "64GiB",
    block: Annotated[
        str, typer.Option(metavar="SIZE", help="Of a resource block; regions are multiples.")
    ] = "256MiB",
    channels: Annotated[
        int, typer.Option(min=1, max=64, help="Channels (DIMMs) of a blade: the largest QoS.")
    ] = 8,
    dialect: Annotated[
        Dialect, typer.Option(help="paper: composes and attaches in one call; public: in steps.")
    ] = Dialect.PAPER,
    offsets: Annotated[
        bool, typer.Option(help="Regions tell where they begin (addressRangeOffsetMiB).")
    ] = True,
    listen: Annotated[
        Address, AddressOption("Where the fabric manager listens.", default="127.0.0.1:8080")
    ] = _LISTEN,
    state: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Kept there; without it, gone at the end."),
    ] = None,
    agent_url: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Agents that run elsewhere, e.g. https://{host}:8443; else they are simulated.",
        ),
    ] = "",
    credentials: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --agent-url: folder with the files username and password.",
        ),
    ] = None,
    ca_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --agent-url: their CA, PEM."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log what happens, not only what is wrong.")
    ] = False,
) -> None:
    """Run a fabric manager without hardware, and agents of hosts whose memory is files."""
    block_mib = _size_mib("--block", block)
    capacity_mib = _size_mib("--capacity", capacity)
    blocks, rest = divmod(capacity_mib, block_mib * channels)
    if rest or not 0 < blocks * channels <= _BLOCKS_MAX:
        raise ConfigError(
            f"--capacity {capacity}: should be a multiple of {channels} channels times "
            f"--block {block}, and at most {_BLOCKS_MAX} blocks"
        )
    with ExitStack() as stack:
        if state is None:
            state = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hymcache-dra-")))
        options = SimulationOptions(
            listen=listen,
            state=state,
            hosts=_hosts(host or ["node-1", "node-2"]),
            blades=blades,
            channels=channels,
            block_mib=block_mib,
            blocks_a_channel=blocks,
            dialect=dialect,
            tells_offsets=offsets,
            agents=_remote_agents(agent_url, credentials, ca_file),
        )
        run_services(SimulatedSystem(options), verbose=verbose)


def _hosts(names: list[str]) -> tuple[str, ...]:
    for name in names:
        if not _HOST.fullmatch(name):
            raise ConfigError(f"--host {name}: not a node's name; write e.g. node-1")
    if len(set(names)) < len(names):
        raise ConfigError(f"--host: {', '.join(names)}: name each host once")
    return tuple(names)


def _size_mib(option: str, text: str) -> int:
    try:
        size_bytes = parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from error
    size_mib, rest = divmod(size_bytes, MIB)
    if rest or size_mib == 0 or size_mib % _ALIGN_MIB:
        raise ConfigError(f"{option} {text}: should be a multiple of {_ALIGN_MIB}MiB")
    return size_mib


def _remote_agents(url: str, credentials: Path | None, ca_file: Path | None) -> RemoteAgents | None:
    if not url:
        if credentials is not None or ca_file is not None:
            raise ConfigError("--credentials and --ca-file go with --agent-url; name that too")
        return None
    if credentials is None:
        raise ConfigError("--agent-url: needs --credentials, a folder with username and password")
    return RemoteAgents(url, Credentials.read(credentials), ca_file)
