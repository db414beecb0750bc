"""A master as a service of this process."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from hymcache._core import MasterServer
from hymcache.config import Config
from hymcache.descriptor_limit import ensure_descriptors
from hymcache.errors import Unavailable
from hymcache.http_endpoint import HttpEndpoint, make_http_app
from hymcache.master.admin_endpoint import AdminEndpoint
from hymcache.master.admin_servicer import AdminServicer
from hymcache.master.member_log import MemberLog
from hymcache.master.metrics import METRICS, MasterSnapshot
from hymcache.master.status_page import render_status_page
from hymcache.metric_table import TableCollector, make_registry

if TYPE_CHECKING:
    from hymcache._core import MasterStats

# For gRPC, HTTP, and whatever else the process has open.
_DESCRIPTORS_BESIDE: Final = 256

logger = logging.getLogger("hymcache.master")


class MasterService:
    """The index of which node holds which object; its configuration is `[master]`."""

    def __init__(self, config: Config) -> None:
        """Nothing is opened before `start`."""
        self._config = config
        self._secret = config.secret_bytes()
        self._running: ExitStack | None = None
        self._master = MasterServer(
            [str(config.master.listen)],
            name=f"master@{socket.gethostname()}",
            lease_ms=config.master.lease_ms,
            connections_max=config.master.connections_max,
            secret=self._secret,
        )
        self._endpoints: dict[str, str] = {}

    @property
    def endpoints(self) -> Mapping[str, str]:
        """What listens where, once started: key of the configuration -> address in use."""
        return self._endpoints

    def start(self) -> None:
        """Serves when it returns. Raises ConfigError where it cannot listen."""
        ensure_descriptors(self._config.master.connections_max + _DESCRIPTORS_BESIDE)
        with ExitStack() as stack:
            self._master.start()
            members = MemberLog(self._master)
            stack.callback(members.join)
            # Stopped in reverse order: what asks the master first.
            stack.callback(self._master.stop)
            members.start()
            endpoints = {"master.listen": self._master.endpoints()[0]}
            admin = self._start_admin(stack, endpoints)
            self._start_http(stack, endpoints)
            if admin is not None:
                admin.set_serving()
            self._endpoints = endpoints
            self._running = stack.pop_all()
        logger.info("the master listens on %s", ", ".join(endpoints.values()))

    def stop(self) -> None:
        """Ends within about a second; may be called again."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def stats(self) -> MasterStats:
        """Counters and gauges by name. Raises Unavailable when it is not running."""
        return self._master.stats()

    def _start_admin(self, stack: ExitStack, endpoints: dict[str, str]) -> AdminEndpoint | None:
        master = self._config.master
        if master.grpc is None:
            return None
        servicer = AdminServicer(self._master, master.lease_ms, datetime.now(UTC))
        admin = AdminEndpoint(servicer, master.grpc, self._secret)
        admin.start()
        stack.callback(admin.stop)
        endpoints["master.grpc"] = str(admin.address)
        return admin

    def _start_http(self, stack: ExitStack, endpoints: dict[str, str]) -> None:
        if self._config.master.http is None:
            return
        start_s = time.monotonic()

        def render_page() -> str:
            uptime_s = time.monotonic() - start_s
            return render_status_page(self._snapshot(), endpoints.values(), uptime_s)

        app = make_http_app(
            make_registry(TableCollector(METRICS, self._snapshot)), self._check_health, render_page
        )
        http = HttpEndpoint(app, self._config.master.http, "master.http")
        http.start()
        stack.callback(http.stop)
        endpoints["master.http"] = str(http.address)

    def _snapshot(self) -> MasterSnapshot:
        return MasterSnapshot(self._master.stats(), self._master.members())

    def _check_health(self) -> None:
        if self._running is None:
            raise Unavailable("the master is starting")
        self._master.stats()

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
