"""Processes of `hymcache dra`: they start services, say so, and run until a signal stops them."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from types import FrameType
from typing import Any, Protocol

import typer
from rich.table import Table

from hymcache.address import Address
from hymcache.cli.output import output_console


class Service(Protocol):
    """Something that runs in threads of its own."""

    @property
    def endpoints(self) -> Mapping[str, str]:
        """What listens where, once started."""

    def start(self) -> None:
        """Serves when it returns."""

    def stop(self) -> None:
        """Ends within about a second; may be called again."""


def AddressOption(help_text: str, *, default: str | None = None) -> Any:  # noqa: N802 - as typer's
    """An option whose value is host:port; `default` is how its help shows that."""
    return typer.Option(
        parser=_parse_address, metavar="HOST:PORT", help=help_text, show_default=default or False
    )


def run_services(*services: Service, verbose: bool) -> None:
    """Starts them in order, waits for SIGINT or SIGTERM, stops them in reverse order."""
    stopped = threading.Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        # A second signal ends the process at once.
        signal.signal(number, signal.SIG_DFL)
        stopped.set()

    log_to_stderr(verbose)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    endpoints: dict[str, str] = {}
    with ExitStack() as stack:
        for service in services:
            stack.callback(service.stop)
            service.start()
            endpoints.update(service.endpoints)
        if not stopped.is_set():
            say_ready(endpoints)
            stopped.wait()


def say_ready(endpoints: Mapping[str, str]) -> None:
    """Prints what listens where, and the line that whoever started the process may wait for."""
    table = Table("listening", "address", box=None, pad_edge=False, header_style="bold")
    for name, address in endpoints.items():
        table.add_row(name, address)
    output_console().print(table)
    typer.echo("hymcache: ready")


def log_to_stderr(verbose: bool) -> None:
    """The process's log: warnings, or with `verbose` what happens as well."""
    # What gRPC's core would print beside it, its Python side raises.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    # It tells of every request; what fails is told where it is handled.
    logging.getLogger("httpx").setLevel(logging.WARNING)


def _parse_address(text: str | Address) -> Address:
    # A default comes as what it is.
    if isinstance(text, Address):
        return text
    try:
        return Address.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
