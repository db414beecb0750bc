"""A storage node as a service of this process."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from hymcache._core import FileDeviceOptions, StorageNode
from hymcache.config import Config
from hymcache.descriptor_limit import ensure_descriptors
from hymcache.errors import ConfigError, Unavailable
from hymcache.http_endpoint import HttpEndpoint, make_http_app
from hymcache.kv_manager.metrics import METRICS
from hymcache.metric_table import TableCollector, make_registry
from hymcache.transport.verbs import make_acceptor

# For HTTP, the device, and whatever else the process has open.
_DESCRIPTORS_BESIDE: Final = 256
_FIRST_CONTACT_S: Final = 1.0

logger = logging.getLogger("hymcache.node")


def node_id(name: str) -> int:
    """The number that masters and locations use for the node of this name; never 0.

    From the name alone, so that any number of masters agree on it without speaking to each other.
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") or 1


class NodeService:
    """A device, and the node that serves what lies on it."""

    def __init__(self, config: Config) -> None:
        """Nothing is opened before `start`."""
        self._config = config
        self._secret = config.secret_bytes()
        self._node: StorageNode | None = None
        self._http: HttpEndpoint | None = None

    @property
    def endpoints(self) -> Mapping[str, str]:
        """What listens where, by key of the configuration."""
        tcp, *unix = self._running().endpoints()
        endpoints = {"node.listen": tcp}
        if unix:
            endpoints["node.unix"] = unix[0].removeprefix("unix:")
        if self._http is not None:
            endpoints["node.http"] = str(self._http.address)
        return endpoints

    def start(self) -> None:
        """Serves when it returns, also to clients that ask a master that is there.

        Raises ConfigError or DeviceError where it cannot.
        """
        ensure_descriptors(self._config.node.connections_max + _DESCRIPTORS_BESIDE)
        self._node = self._make_node()
        self._await_masters()
        if self._config.node.http is None:
            return
        registry = make_registry(TableCollector(METRICS, self.stats))
        http = HttpEndpoint(
            make_http_app(registry, self._check_health), self._config.node.http, "node.http"
        )
        try:
            http.start()
        except BaseException:
            self.stop()
            raise
        self._http = http

    def _await_masters(self) -> None:
        # Until each was reached or has failed once: whoever is told that the node is ready may
        # use it at once, and a master that is down holds nobody up.
        limit = time.monotonic() + _FIRST_CONTACT_S
        while time.monotonic() < limit:
            links = self._running().stats()["masters"]
            if all(link["state"] == "live" or link["last_error"] for link in links):
                return
            time.sleep(0.002)

    def _make_node(self) -> StorageNode:
        node, device = self._config.node, self._config.device
        _make_parent("node.unix", node.unix)
        _make_parent("device.path", device.path)
        return StorageNode(
            node=node_id(node.name),
            name=node.name,
            listen=str(node.listen),
            advertise_host=node.advertise,
            unix_path=str(node.unix),
            masters=[str(master) for master in node.masters],
            connections_max=node.connections_max,
            secret=self._secret,
            log=logger.info,
            warn=logger.warning,
            device=FileDeviceOptions(
                path=str(device.path),
                capacity_bytes=device.capacity,
                staging_bytes=device.staging,
                write_buffer_bytes=device.write_buffer,
                io=device.io,
                io_depth=device.io_depth,
                preallocate=device.preallocate,
            ),
            verbs=make_acceptor(node.verbs, self._config.verbs),
        )

    def stop(self) -> None:
        """Ends within a second; what is not flushed is gone. May be called again."""
        if self._http is not None:
            self._http.stop()
            self._http = None
        if self._node is not None:
            self._node.stop()
            self._node = None

    def stats(self) -> dict[str, Any]:
        """Counters and gauges by name. Raises Unavailable when it is not running."""
        return self._running().stats()

    def set_draining(self, draining: bool) -> None:
        """A draining node refuses writes and goes on serving reads."""
        self._running().set_draining(draining)

    def _check_health(self) -> None:
        self._running().stats()

    def _running(self) -> StorageNode:
        if self._node is None:
            raise Unavailable("the node is not running")
        return self._node

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


def _make_parent(key: str, path: Path) -> None:
    # Two folders deep, as the defaults are: of a longer path that is not there, most is a typing
    # error.
    try:
        path.parent.parent.mkdir(mode=0o750, exist_ok=True)
        path.parent.mkdir(mode=0o750, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{key} = {path}: cannot make its folder ({error.strerror}); choose another"
        ) from error
