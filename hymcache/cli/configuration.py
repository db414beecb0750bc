"""`hymcache config`: checks a configuration, prints the reference of all keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.syntax import Syntax

from hymcache.config_reference import configuration_toml, reference_markdown
from hymcache.config_source import load_config

app = typer.Typer(help="Check a configuration; print the reference.", no_args_is_help=True)

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="The TOML file; without it, $HYMCACHE_CONFIG or the defaults.",
    ),
]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set one key, e.g. --set device.capacity=20GiB; may be repeated.",
    ),
]


@app.command("check")
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The TOML file.")],
    settings: SettingsOption = None,
) -> None:
    """Print the effective configuration, without secrets; exit with 2 if it is wrong."""
    config = load_config(file, settings=settings or ())
    config.secret_bytes()
    text = configuration_toml(config)
    console = Console()
    if console.is_terminal:
        console.print(Syntax(text, "toml", background_color="default"))
    else:
        typer.echo(text, nl=False)


@app.command("reference")
def reference() -> None:
    """Print all keys with their defaults and meaning, as Markdown (docs/configuration.md)."""
    typer.echo(reference_markdown(), nl=False)
