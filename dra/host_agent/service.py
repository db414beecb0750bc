"""A host agent as a service of a process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from hymcache.address import Address
from hymcache.dra.host_agent.allocations import HostAllocations, HostState
from hymcache.dra.host_agent.app import make_agent_app
from hymcache.dra.host_agent.backend import DaxBackend
from hymcache.dra.host_agent.metrics import METRICS, HostSnapshot
from hymcache.dra.host_agent.sessions import Credentials, Sessions
from hymcache.dra.names import CDI_ROOT
from hymcache.dra.state_file import StateFile
from hymcache.errors import ConfigError, Unavailable
from hymcache.http_endpoint import HttpEndpoint, TlsFiles, make_http_app
from hymcache.metric_table import TableCollector, make_registry

STATE_FILE: Final = "allocations.json"

logger = logging.getLogger("hymcache.dra.host_agent")


@dataclass(frozen=True, slots=True)
class HostAgentOptions:
    """Where an agent listens, whom it trusts, and where it keeps what.

    `http` is for /metrics and /healthz, without TLS.
    """

    listen: Address
    credentials: Credentials
    state_folder: Path
    cdi_root: Path = Path(CDI_ROOT)
    tls: TlsFiles | None = None
    http: Address | None = None


class HostAgentService:
    """The agent of this host over one back end."""

    def __init__(self, options: HostAgentOptions, backend: DaxBackend) -> None:
        """Nothing is opened or changed before `start`."""
        self._options = options
        self._listen = options.listen
        self._backend = backend
        self._running: ExitStack | None = None
        self._endpoints: dict[str, str] = {}
        self.allocations = HostAllocations(
            backend,
            StateFile(options.state_folder / STATE_FILE, HostState),
            options.cdi_root,
        )

    @property
    def endpoints(self) -> Mapping[str, str]:
        """What listens where, once started: option -> address in use."""
        return self._endpoints

    def start(self) -> None:
        """Has made what its records say, and serves, when it returns. Raises ConfigError.

        After a stop it listens where it did before. Does nothing while it runs.
        """
        if self._running is not None:
            return
        options = self._options
        if options.tls is None and not _is_loopback(options.listen):
            raise ConfigError(
                f"--listen {options.listen}: passwords and tokens would travel in the clear; "
                "name --tls-cert and --tls-key, or listen on 127.0.0.1"
            )
        self._backend.check()
        self.allocations.recover()
        with ExitStack() as stack:
            app = make_agent_app(self.allocations, Sessions(options.credentials))
            agent = HttpEndpoint(app, self._listen, "--listen", options.tls)
            agent.start()
            stack.callback(agent.stop)
            self._listen = agent.address
            self._endpoints = {"host agent": str(agent.address)}
            if options.http is not None:
                registry = make_registry(
                    TableCollector(METRICS, lambda: HostSnapshot.of(self.allocations))
                )
                http = HttpEndpoint(
                    make_http_app(registry, self._check_health), options.http, "--http"
                )
                http.start()
                stack.callback(http.stop)
                self._endpoints["metrics"] = str(http.address)
            self._running = stack.pop_all()
        logger.info("the host agent listens on %s", ", ".join(self._endpoints.values()))

    def stop(self) -> None:
        """Ends within about a second; devices and CDI specs stay. May be called again."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def _check_health(self) -> None:
        if self._running is None:
            raise Unavailable("the host agent is starting")
        self.allocations.list_all()
        self.allocations.regions()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.stop()


def _is_loopback(address: Address) -> bool:
    return address.host in {"127.0.0.1", "::1", "localhost"}
