"""Where the commands print."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from rich.console import Console

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

# The longest line where there is no terminal to measure: no table of ours is wider.
_COLUMNS_WITHOUT_TERMINAL: Final = 160


def output_console() -> Console:
    """A console that does not break lines at 80 columns when its output goes to a file."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _COLUMNS_WITHOUT_TERMINAL
    return console
