"""The entry point: the commands, and how what goes wrong reaches the user.

Whatever a command raises becomes one line on stderr and an exit code:

    0  done            2  wrong usage or configuration    70  a fault of HyMCache itself
    1  failed          3  a peer is not there            130  interrupted
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated, Final, NoReturn

import typer

from hymcache.cli import configuration, lookup, nodes, rdma, region, services, stats
from hymcache.errors import ConfigError, HymcacheError, Unavailable
from hymcache.version import __version__

EXIT_FAILED: Final = 1
EXIT_CONFIG: Final = 2
EXIT_UNAVAILABLE: Final = 3
EXIT_INTERNAL: Final = 70
EXIT_INTERRUPTED: Final = 130

# Set to anything, it shows the trace-back of a fault: for reports of bugs.
TRACEBACK_VARIABLE: Final = "HYMCACHE_TRACEBACK"

# Commands that live in rooms of their own; the room is imported when its command is run.
_DEFERRED: Final = {
    "bench": ("hymcache.bench.cli", "Measure this machine; each sub-command has its own --help."),
    "dra": ("hymcache.dra.cli", "Composable CXL memory in Kubernetes: driver, agent, simulator."),
    "demo": ("hymcache.bench.demo", "Two vLLM engines on this machine share a prompt's KV."),
}

app = typer.Typer(
    name="hymcache",
    help="A remote KV-cache tier for LLM serving on CXL-hybrid memory.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("up")(services.up)
app.command("master")(services.master)
app.command("node")(services.node)
app.command("lookup")(lookup.lookup)
app.command("stats")(stats.stats)
app.command("drain")(nodes.drain)
app.command("undrain")(nodes.undrain)
app.command("forget")(nodes.forget)
app.add_typer(configuration.app, name="config")
app.add_typer(rdma.app, name="rdma")
app.add_typer(region.app, name="region")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hymcache {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    # The docstring would replace the help text of the application.
    pass


def _defer(name: str, module_name: str, help_text: str) -> None:
    @app.command(
        name,
        help=help_text,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def run(context: typer.Context) -> None:
        sub_app: typer.Typer = importlib.import_module(module_name).app
        sub_app(context.args, prog_name=f"hymcache {name}")


for _name, (_module_name, _help_text) in _DEFERRED.items():
    _defer(_name, _module_name, _help_text)


def main() -> NoReturn:
    """Runs the command line of this process and exits."""
    try:
        app(prog_name="hymcache")
    except (HymcacheError, OSError) as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        _tell(error)
        sys.exit(_exit_code(error))
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        _tell(
            f"internal error: {type(error).__name__}: {error} "
            f"(please report it; {TRACEBACK_VARIABLE}=1 shows where)"
        )
        sys.exit(EXIT_INTERNAL)
    sys.exit(0)


def _exit_code(error: HymcacheError | OSError) -> int:
    if isinstance(error, ConfigError):
        return EXIT_CONFIG
    return EXIT_UNAVAILABLE if isinstance(error, Unavailable) else EXIT_FAILED


def _tell(error: object) -> None:
    for line in str(error).splitlines():
        typer.echo(f"hymcache: {line}", err=True)
