"""`hymcache up`, `master` and `node`: services that run until a signal stops them."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from types import FrameType
from typing import Annotated, Protocol, Self

import typer
from rich.table import Table

from hymcache.address import Address
from hymcache.cli.configuration import ConfigOption, SettingsOption
from hymcache.cli.output import output_console
from hymcache.config import Config
from hymcache.config_source import load_config
from hymcache.errors import ConfigError

VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Log what happens, not only what is wrong.")
]


class Service(Protocol):
    """What `hymcache.master.MasterService` and `hymcache.kv_manager.NodeService` have."""

    @property
    def endpoints(self) -> Mapping[str, str]:
        """What listens where, once started: key of the configuration -> address in use."""

    def start(self) -> None:
        """Listens, and serves from threads of its own."""

    def stop(self) -> None:
        """Ends within a second; may be called again."""


def up(
    config: ConfigOption = None, settings: SettingsOption = None, verbose: VerboseOption = False
) -> None:
    """Run a master and one storage node in this process, until Ctrl-C or SIGTERM."""
    loaded = load_config(config, settings=settings or ())
    with _Services(loaded, verbose) as services:
        master_service = _master_service(loaded)
        services.start(master_service)
        services.start(_node_service(_with_master(loaded, master_service.endpoints)))
        services.run()


def master(
    config: ConfigOption = None, settings: SettingsOption = None, verbose: VerboseOption = False
) -> None:
    """Run a master: the index of which node holds which object."""
    loaded = load_config(config, settings=settings or ())
    with _Services(loaded, verbose) as services:
        services.start(_master_service(loaded))
        services.run()


def node(
    config: ConfigOption = None, settings: SettingsOption = None, verbose: VerboseOption = False
) -> None:
    """Run a storage node: it holds objects on its device and publishes them to the masters."""
    loaded = load_config(config, settings=settings or ())
    with _Services(loaded, verbose) as services:
        services.start(_node_service(loaded))
        services.run()


def _master_service(config: Config) -> Service:
    from hymcache.master import MasterService

    return MasterService(config)


def _node_service(config: Config) -> Service:
    from hymcache.kv_manager import NodeService

    return NodeService(config)


def _with_master(config: Config, endpoints: Mapping[str, str]) -> Config:
    """The node of `up` publishes to the master beside it, whatever [node] says."""
    master_address = Address.parse(endpoints["master.listen"])
    if master_address.is_wildcard:
        master_address = Address("127.0.0.1", master_address.port)
    beside = config.node.model_copy(update={"masters": (master_address,)})
    return config.model_copy(update={"node": beside})


class _Services:
    """Starts services in order, waits for a signal, stops them in reverse order."""

    def __init__(self, config: Config, verbose: bool) -> None:
        self._config = config
        self._endpoints: dict[str, str] = {}
        self._stack = ExitStack()
        self._stopped = threading.Event()
        _log_to_stderr(verbose)

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_raised: object) -> None:
        self._stack.close()

    def start(self, service: Service) -> None:
        self._stack.callback(service.stop)
        try:
            service.start()
        except ConfigError as error:
            raise _with_key(error, self._config) from error
        self._endpoints.update(service.endpoints)

    def run(self) -> None:
        if self._stopped.is_set():
            return
        table = Table("listening", "address", box=None, pad_edge=False, header_style="bold")
        for key, address in self._endpoints.items():
            table.add_row(key, address)
        output_console().print(table)
        # Whoever started the process may wait for this line.
        typer.echo("hymcache: ready")
        self._stopped.wait()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        # A second signal ends the process at once.
        signal.signal(number, signal.SIG_DFL)
        self._stopped.set()


def _with_key(error: ConfigError, config: Config) -> ConfigError:
    """The core tells where it cannot listen, but not which key of the configuration said so."""
    places = {
        "master.listen": str(config.master.listen),
        "node.listen": str(config.node.listen),
        "node.unix": f"unix:{config.node.unix}",
    }
    for key, place in places.items():
        if f"cannot listen on {place} " in str(error):
            return ConfigError(f"{key}: {error}")
    return error


def _log_to_stderr(verbose: bool) -> None:
    # What gRPC's core would print beside it, its Python side raises.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
