"""`hymcache lookup`: where objects are."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.table import Table

from hymcache.cli.configuration import ConfigOption, SettingsOption
from hymcache.cli.output import JsonOption, output_console
from hymcache.config import Config
from hymcache.config_source import load_config
from hymcache.errors import ConfigError

if TYPE_CHECKING:
    from hymcache.lookup import Client, Location

_KEY_BYTES: Final = 16
_FILE_BYTES_MAX: Final = 64 << 20

MasterOption = Annotated[
    str | None,
    typer.Option(
        "--master", "-m", metavar="HOST:PORT", help="Ask this master instead of the configured."
    ),
]


def lookup(
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="KEY...", help="Keys of 32 hexadecimal digits.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", metavar="FILE", help='A file with a key a line; "-" is stdin.'
        ),
    ] = None,
    as_json: JsonOption = False,
    master: MasterOption = None,
    config: ConfigOption = None,
    settings: SettingsOption = None,
) -> None:
    """Say where the objects of keys are. Exits with 1 if none was found."""
    texts = [*(keys or ()), *(() if file is None else _read_lines(file))]
    if not texts:
        raise ConfigError("no keys; name some, or a file of them with --file")
    wanted = [_parse_key(text) for text in texts]
    with _client(_with_master(load_config(config, settings=settings or ()), master)) as client:
        found = client.lookup(wanted)
    if as_json:
        _print_json(texts, found)
    else:
        _print_table(texts, found)
    if not any(found):
        raise typer.Exit(1)


def _read_lines(file: Path) -> list[str]:
    if str(file) == "-":
        text = sys.stdin.read(_FILE_BYTES_MAX)
    else:
        try:
            with file.open() as lines:
                text = lines.read(_FILE_BYTES_MAX)
        except OSError as error:
            raise ConfigError(f"--file {file}: {error.strerror}; name a readable file") from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def _parse_key(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise ConfigError(f'"{text}" is not a key; write {2 * _KEY_BYTES} hexadecimal digits')
    return key


def _with_master(config: Config, master: str | None) -> Config:
    if master is None:
        return config
    from hymcache.config import ClientConfig
    from hymcache.config_source import parse_section

    given = config.client.model_dump() | {"masters": master}
    return config.model_copy(update={"client": parse_section(ClientConfig, given, "--master")})


def _client(config: Config) -> Client:
    from hymcache.lookup import Client

    client = config.client
    return Client(
        [str(address) for address in client.masters],
        transport=client.transport,
        deadline_s=client.deadline_s,
        connect_timeout_s=client.connect_timeout_s,
        verify_checksums=client.verify_checksums,
        secret=config.secret_bytes(),
        verbs=config.verbs,
    )


def _print_json(texts: Sequence[str], found: Sequence[Location | None]) -> None:
    from dataclasses import asdict

    for text, location in zip(texts, found, strict=True):
        place = None if location is None else asdict(location)
        typer.echo(json.dumps({"key": text, "location": place}))


def _print_table(texts: Sequence[str], found: Sequence[Location | None]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("key", "node", "address", "bytes", "generation", "namespace"):
        table.add_column(column, justify="left" if column == "key" else "right", no_wrap=True)
    for text, at in zip(texts, found, strict=True):
        if at is None:
            table.add_row(text, "-")
        else:
            numbers = (str(at.node), str(at.address), str(at.length), str(at.generation))
            table.add_row(text, *numbers, f"{at.name_space:016x}")
    console = output_console()
    console.print(table)
    console.print(f"{sum(at is not None for at in found)} of {len(found)} found")
