"""`hymcache rdma check`: whether this machine can move blocks by RDMA, and what to fix."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer
from rich.table import Table

from hymcache.cli.configuration import ConfigOption, SettingsOption
from hymcache.cli.output import JsonOption, output_console
from hymcache.config_source import load_config
from hymcache.limits import MIB

if TYPE_CHECKING:
    from hymcache.config import Config, VerbsConfig
    from hymcache.transport.verbs import PortReport, Survey, VerbsLibrary

# The most that a packet of RoCE may carry.
_FULL_MTU_BYTES: Final = 4096
_DEVICE_FILES: Final = Path("/dev/infiniband")

app = typer.Typer(
    help="RDMA on this machine.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root() -> None:
    # One command alone would otherwise be the whole of `rdma`.
    pass


@dataclass(frozen=True)
class Check:
    """What was found."""

    library: str
    survey: Survey
    lock_soft_bytes: int | None
    lock_hard_bytes: int | None
    ignores_lock_limit: bool
    needed_bytes: int
    fixes: tuple[str, ...]

    @property
    def chosen(self) -> PortReport | None:
        """The port that would be used."""
        return self.survey.usable[0] if self.survey.usable else None

    @property
    def is_locked_out(self) -> bool:
        """Whether a node with this configuration could not register its memory."""
        soft = self.lock_soft_bytes
        return soft is not None and soft < self.needed_bytes and not self.ignores_lock_limit


@app.command()
def check(
    as_json: JsonOption = False,
    config: ConfigOption = None,
    settings: SettingsOption = None,
) -> None:
    """Show devices, ports, GIDs and limits, which would be used and why, and what to fix.

    Exit code 0: RDMA would be used. 1: not as things are: no port can be used, or a node may not
    lock the memory that it registers.
    """
    from hymcache.transport.verbs import load_library

    loaded = load_config(config, settings=settings or ())
    found = run_check(loaded, load_library())
    if as_json:
        typer.echo(json.dumps(_as_dict(found, loaded.verbs), indent=2))
    else:
        _print(found, loaded.verbs)
    if found.chosen is None or found.is_locked_out:
        raise typer.Exit(1)


def run_check(config: Config, library: VerbsLibrary) -> Check:
    """Asks the library and the system."""
    from hymcache.transport.verbs import (
        ignores_lock_limit,
        locked_bytes,
        memory_lock_limits,
        survey_ports,
    )

    found = Check(
        library.description,
        survey_ports(library, config.verbs),
        *memory_lock_limits(),
        ignores_lock_limit(),
        locked_bytes(config.device.staging + config.device.write_buffer),
        (),
    )
    return replace(found, fixes=tuple(_fixes(found)))


def _fixes(found: Check) -> Sequence[str]:
    survey = found.survey
    fixes = list(survey.broken)
    if not survey.usable and lacks_device_files():
        fixes.append(
            f"the kernel has RDMA devices, but {_DEVICE_FILES} is missing here: give it to the "
            f"container (`--device {_DEVICE_FILES}`), or load ib_uverbs"
        )
    elif not survey.ports and not survey.broken:
        fixes.append(
            "no RDMA device; for soft-RoCE: "
            "modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0"
        )
    elif not survey.usable:
        fixes += (f"{report.name}: {report.problem}" for report in survey.ports)
    if found.is_locked_out:
        fixes.append(
            f"this process may lock {_limit(found.lock_soft_bytes)} of memory, a node with this "
            f"configuration registers {_limit(found.needed_bytes)}: ulimit -l unlimited, or "
            "LimitMEMLOCK=infinity"
        )
    for report in survey.usable[:1]:
        mtu = report.port.mtu_active.size_bytes
        if mtu < min(_FULL_MTU_BYTES, report.port.mtu_max.size_bytes):
            fixes.append(
                f"{report.name} has packets of {mtu} bytes; with an interface MTU of 4200 or more, "
                "on all hosts and switches, they would have 4096"
            )
    return fixes


def lacks_device_files() -> bool:
    """Whether programs cannot get at the devices that the kernel has, as in a container."""
    from hymcache.transport.verbs import has_devices

    return has_devices() and not _DEVICE_FILES.is_dir()


def _why_gid(report: PortReport, config: VerbsConfig) -> str:
    from hymcache.transport.verbs import GidType

    if config.gid_index >= 0:
        return "as verbs.gid_index says"
    if len(report.gids) == 1:
        return "the only one"
    if report.gids[0].kind is GidType.INFINIBAND:
        return "the first of the port"
    return f"the first of {len(report.gids)}: RoCE v2 before v1, IPv4 before IPv6"


def _why(report: PortReport, others: int) -> str:
    if others == 0:
        return "the only port that can be used"
    speed = report.port.bits_per_second
    return f"the fastest of {others + 1}" if speed else f"the first of {others + 1} by name"


def _as_dict(found: Check, config: VerbsConfig) -> dict[str, Any]:
    chosen = found.chosen
    return {
        "library": found.library,
        "ports": [_port_dict(report) for report in found.survey.ports],
        "chosen": None if chosen is None else chosen.name,
        "gid_index": None if chosen is None else _gid_index(chosen, config),
        "gid_reason": None if chosen is None else _why_gid(chosen, config),
        "memlock_bytes": {"soft": found.lock_soft_bytes, "hard": found.lock_hard_bytes},
        "ignores_memlock": found.ignores_lock_limit,
        "registered_bytes_of_a_node": found.needed_bytes,
        "fixes": list(found.fixes),
    }


def _port_dict(report: PortReport) -> dict[str, Any]:
    from hymcache.transport.verbs import gid_text

    return {
        "name": report.name,
        "state": report.port.state,
        "link_layer": report.port.link_layer.name.lower(),
        "mtu_bytes": report.port.mtu_active.size_bytes,
        "bits_per_second": report.port.bits_per_second,
        "memory_windows": report.limits.windows,
        "firmware": report.limits.firmware,
        "problem": report.problem,
        "gids": [
            {
                "index": entry.index,
                "address": gid_text(entry),
                "type": entry.kind.name.lower(),
                "interface": entry.interface,
            }
            for entry in report.gids
        ],
    }


def _gid_index(report: PortReport, config: VerbsConfig) -> int | None:
    from hymcache.transport.verbs import choose_gid

    entry = choose_gid(report.gids, config)
    return None if entry is None else entry.index


def _print(found: Check, config: VerbsConfig) -> None:
    console = output_console()
    console.print(found.library)
    if found.survey.ports:
        console.print(_port_table(found, config))
    chosen = found.chosen
    if chosen is not None:
        keys = "one block" if config.windows == "auto" and chosen.limits.windows else "the memory"
        others = len(found.survey.usable) - 1
        console.print(f"would use: {chosen.name}, {_why(chosen, others)}; keys for {keys}")
        index = _gid_index(chosen, config)
        console.print(f"GID {index}: {_why_gid(chosen, config)}")
    console.print(f"locked memory: {_limit(found.lock_soft_bytes)}", end="")
    capable = "; CAP_IPC_LOCK, so it does not hold" if found.ignores_lock_limit else ""
    console.print(f" (hard limit {_limit(found.lock_hard_bytes)}{capable})")
    for fix in found.fixes:
        console.print(f"[yellow]to fix:[/yellow] {fix}")
    if not found.fixes:
        console.print("[green]nothing to fix[/green]")


def _port_table(found: Check, config: VerbsConfig) -> Table:
    from hymcache.transport.verbs import gid_text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "port", "state", "speed", "MTU", "GID", "address", "type"):
        table.add_column(column)
    for report in found.survey.ports:
        port = report.port
        speed = f"{port.bits_per_second / 1e9:g} Gb/s" if port.bits_per_second else "unknown"
        cells = [report.name, port.state, speed, str(port.mtu_active.size_bytes)]
        used = _gid_index(report, config) if report is found.chosen else None
        for entry in report.gids:
            mark = "*" if entry.index == used else ""
            table.add_row(mark, *cells, str(entry.index), gid_text(entry), entry.kind.name.lower())
            cells = [""] * len(cells)
        if not report.gids:
            table.add_row("", *cells, "-", "-", "-")
    return table


def _limit(size_bytes: int | None) -> str:
    return "unlimited" if size_bytes is None else f"{size_bytes / MIB:.0f} MiB"
