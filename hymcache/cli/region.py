"""`hymcache region`: format, inspect, verify, wipe and watch a shared region."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table

from hymcache.cli.output import JsonOption, output_console
from hymcache.errors import ConfigError
from hymcache.quantity import format_size, parse_duration_s, parse_size

if TYPE_CHECKING:
    from hymcache._core import RegionParticipant, RegionUsage
    from hymcache.chm_device.region import Region
    from hymcache.lookup.region_directory import RegionDirectory

app = typer.Typer(help="Shared regions of composed CXL memory.", no_args_is_help=True)

_WATCH_S: Final = 1.0
_SLOTS_AT_ONCE: Final = 1024
_EXIT_CORRUPT: Final = 1
# Longer than a claim may stand still before others take it over.
_FORMATTING_S: Final = 3.0

PathArgument = Annotated[
    Path,
    typer.Argument(
        envvar="CXL_DAX_DEVICE",
        metavar="PATH",
        help="A device-dax, a file, or a memfd as /proc/PID/fd/N.",
    ),
]
OffsetOption = Annotated[
    str, typer.Option("--offset", metavar="SIZE", help="Where the region starts in it.")
]


@app.command("format")
def format_region(
    path: PathArgument,
    *,
    slot: Annotated[
        str, typer.Option("--slot", metavar="SIZE", help="The length of the largest object.")
    ],
    size: Annotated[
        str, typer.Option("--size", metavar="SIZE", help="Of the region; 0 takes all there is.")
    ] = "0",
    offset: OffsetOption = "0",
    fact: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="What users have to agree on; may be repeated."),
    ] = None,
    participants: Annotated[
        int, typer.Option(min=1, max=256, help="Processes that may be attached at a time.")
    ] = 256,
    pins: Annotated[int, typer.Option(min=1, max=65528, help="Objects each may pin.")] = 1016,
    lease: Annotated[
        str, typer.Option(metavar="TIME", help="How long a process may be silent.")
    ] = "10s",
    force: Annotated[
        bool, typer.Option("--force", help="Give up whatever it holds now. Stop engines first.")
    ] = False,
) -> None:
    """Format a region by hand. Engines do it themselves where they find it blank."""
    from hymcache.chm_device.region import Region, RegionFormat

    form = RegionFormat(
        _size("--slot", slot),
        dict(_fact(text) for text in fact or ()),
        participants,
        pins,
        _duration("--lease", lease),
    )
    if force:
        require_idle(path, _size("--offset", offset))
    region = Region.open(
        path,
        form,
        offset=_size("--offset", offset),
        size_bytes=_size("--size", size),
        map_data=False,
        force=force,
    )
    if not region.formatted_here:
        raise ConfigError(f"{path}: is formatted already; --force gives up what it holds")
    output_console().print(_geometry_table(region))


@app.command("inspect")
def inspect(
    path: PathArgument,
    *,
    offset: OffsetOption = "0",
    entries: Annotated[int, typer.Option(min=0, help="Also list objects, at most so many.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Show what a region is formatted for, and what it holds."""
    with _reading(path, offset) as directory:
        listed = _entries(directory, entries)
        if as_json:
            region = directory.region
            shown = {
                "path": str(path),
                "kind": region.core.kind,
                "facts": region.facts,
                "geometry": region.geometry,
                "usage": directory.core.usage(),
                "participants": directory.core.participants(),
                "entries": listed,
            }
            typer.echo(json.dumps(shown, indent=2))
            return
        parts = [_geometry_table(directory.region), *_use_tables(directory, {})]
        if entries:
            parts += ["", _entry_table(listed)]
        output_console().print(Group(*parts))


@app.command("verify")
def verify(
    path: PathArgument,
    *,
    offset: OffsetOption = "0",
    drop: Annotated[bool, typer.Option("--drop", help="Remove the objects that are corrupt.")] = (
        False
    ),
    as_json: JsonOption = False,
) -> None:
    """Check the checksum of every object. Exits with 1 if one is corrupt."""
    with _opened(path, offset, writable=drop, map_data=True) as directory:
        sums = [0, 0, 0]
        for first in range(0, directory.region.geometry["slots"], _SLOTS_AT_ONCE):
            found = directory.core.verify(first, _SLOTS_AT_ONCE)
            sums = [total + more for total, more in zip(sums, found, strict=True)]
    good, unchecked, corrupt = sums
    if as_json:
        typer.echo(json.dumps({"good": good, "unchecked": unchecked, "corrupt": corrupt}))
    else:
        fate = "removed" if drop else "left there (--drop removes them)"
        told = f"{good:,} good, {unchecked:,} without a checksum, {corrupt:,} corrupt"
        typer.echo(f"{told}, {fate}" if corrupt else told)
    if corrupt:
        raise typer.Exit(_EXIT_CORRUPT)


@app.command("wipe")
def wipe(path: PathArgument, *, offset: OffsetOption = "0") -> None:
    """Remove all objects. Engines may stay attached; what they have pinned stays."""
    with _opened(path, offset, writable=True, map_data=False) as directory:
        removed = directory.core.clear()
        left = directory.core.usage()
    typer.echo(f"{removed:,} removed, {left['valid']:,} pinned, {left['writing']:,} being written")


@app.command("top")
def top(
    path: PathArgument,
    *,
    offset: OffsetOption = "0",
    once: Annotated[bool, typer.Option("--once", help="Show it once.")] = False,
) -> None:
    """Watch a region: what it holds, by namespace, and who is attached. Ctrl-C ends it."""
    with _reading(path, offset) as directory:
        console = output_console()
        if once:
            console.print(Group(*_use_tables(directory, {})))
            return
        beats = _beats(directory)
        with Live(Group(*_use_tables(directory, beats)), console=console, screen=True) as live:
            while True:
                time.sleep(_WATCH_S)
                live.update(Group(*_use_tables(directory, beats)))
                beats = _beats(directory)


def require_idle(path: Path, offset: int) -> None:
    """Nobody beats or joins for the lease: who is attached would go on in the old layout."""
    from hymcache.chm_device.region import Region
    from hymcache.errors import Corrupt, Unavailable
    from hymcache.lookup.region_directory import RegionDirectory

    try:
        region = Region.attach(
            path, offset=offset, map_data=False, writable=False, wait_s=_FORMATTING_S
        )
    except (ConfigError, Corrupt, Unavailable):
        # Not a region, one of another version, or one whose formatting was broken off: nobody whom
        # we know can be attached.
        return
    with RegionDirectory(region) as directory:
        before = _lives(directory)
        if not before:
            return
        time.sleep(region.geometry["lease_ms"] / 1000)
        after = _lives(directory)
    names = [life[0] for index, life in after.items() if before.get(index) != life]
    if names:
        raise ConfigError(f"{path}: is in use by {', '.join(names)}; stop them first")


def _lives(directory: RegionDirectory) -> dict[int, tuple[str, int, int]]:
    """Of each that is active its name, and what changes when another joins or while it lives."""
    return {
        p["index"]: (p["name"], p["epoch"], p["beats"])
        for p in directory.core.participants()
        if p["state"] == "active"
    }


def _beats(directory: RegionDirectory) -> dict[int, int]:
    return {p["index"]: p["beats"] for p in directory.core.participants()}


def _reading(path: Path, offset: str) -> RegionDirectory:
    return _opened(path, offset, writable=False, map_data=False)


def _opened(path: Path, offset: str, *, writable: bool, map_data: bool) -> RegionDirectory:
    from hymcache.chm_device.region import Region
    from hymcache.lookup.region_directory import RegionDirectory

    region = Region.attach(
        path, offset=_size("--offset", offset), map_data=map_data, writable=writable
    )
    return RegionDirectory(region, name="hymcache region", maintain=False)


def _size(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from error


def _duration(option: str, text: str) -> float:
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from error


def _fact(text: str) -> tuple[str, str | int]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--fact {text}: write NAME=VALUE, e.g. --fact model=Llama-3.1-8B")
    return name, int(value) if value.isdecimal() else value


def _geometry_table(region: Region) -> Table:
    geometry = region.geometry
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    facts = " ".join(f"{name}={value}" for name, value in region.facts.items())
    rows = {
        "region": f"{region.path} ({region.core.kind}), format {geometry['version']}",
        "formatted for": facts or "-",
        "size": format_size(geometry["region_bytes"]),
        "slots": f"{geometry['slots']:,} of {format_size(geometry['slot_bytes'])}, "
        f"from {format_size(geometry['data_offset'])} on",
        "participants": f"at most {geometry['participants']}, {geometry['pins']:,} pins each",
        "lease": f"{geometry['lease_ms'] / 1000:g} s",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _use_tables(directory: RegionDirectory, beats_before: dict[int, int]) -> list[Table | str]:
    usage = directory.core.usage()
    return [
        _usage_table(usage, directory.region.geometry["slots"]),
        "",
        _namespace_table(usage),
        "",
        _participant_table(directory.core.participants(), beats_before),
    ]


def _usage_table(usage: RegionUsage, slots: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("used", "objects", "pinned", "writing", "dying", "free", "stored"):
        table.add_column(column, justify="right")
    table.add_row(
        f"{1 - usage['free'] / slots:.1%}",
        *(f"{count:,}" for count in (usage["valid"], usage["pinned"], usage["writing"])),
        *(f"{count:,}" for count in (usage["dying"], usage["free"])),
        format_size(usage["stored_bytes"]),
    )
    return table


def _namespace_table(usage: RegionUsage) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("namespace")
    table.add_column("objects", justify="right")
    table.add_column("bytes", justify="right")
    for fingerprint, objects, stored_bytes in usage["namespaces"]:
        table.add_row(f"{fingerprint:016x}", f"{objects:,}", format_size(stored_bytes))
    return table


def _participant_table(
    participants: list[RegionParticipant], beats_before: dict[int, int]
) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("participant", "name", "state"):
        table.add_column(column)
    for column in ("epoch", "beats", "pins"):
        table.add_column(column, justify="right")
    for participant in participants:
        silent = beats_before.get(participant["index"]) == participant["beats"]
        state = participant["state"]
        table.add_row(
            str(participant["index"]),
            participant["name"],
            "[yellow]silent[/yellow]" if silent and state == "active" else state,
            str(participant["epoch"]),
            f"{participant['beats']:,}",
            f"{participant['pins']:,}",
        )
    return table


def _entries(directory: RegionDirectory, count: int) -> list[dict[str, object]]:
    listed: list[dict[str, object]] = []
    for first in range(0, directory.region.geometry["slots"], _SLOTS_AT_ONCE):
        if len(listed) >= count:
            break
        rows = directory.core.entries(first, _SLOTS_AT_ONCE)
        listed += [{**row, "key": row["key"].hex()} for row in rows]
    return listed[:count]


def _entry_table(listed: list[dict[str, object]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("slot", "state", "key", "namespace", "bytes", "generation", "writer"):
        table.add_column(column, justify="left" if column in {"state", "key"} else "right")
    for entry in listed:
        numbers = (entry["length"], entry["generation"], entry["writer"])
        table.add_row(
            str(entry["slot"]),
            str(entry["state"]),
            str(entry["key"]),
            f"{entry['name_space']:016x}",
            *(str(number) for number in numbers),
        )
    return table
