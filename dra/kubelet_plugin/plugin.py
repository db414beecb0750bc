"""The kubelet plugin as a whole: what listens where, in which order it comes and goes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
from grpc_health.v1 import health_pb2_grpc

from hymcache.address import Address
from hymcache.dra import names
from hymcache.dra.kubelet_plugin import health_pb2_grpc as device_health_pb2_grpc
from hymcache.dra.kubelet_plugin import plugin_pb2_grpc, registration_pb2_grpc
from hymcache.dra.kubelet_plugin.checkpoint import CHECKPOINT_FILE, Checkpoint
from hymcache.dra.kubelet_plugin.claim_source import ClaimSource
from hymcache.dra.kubelet_plugin.device_health import DeviceHealth
from hymcache.dra.kubelet_plugin.liveness import LivenessServicer
from hymcache.dra.kubelet_plugin.metrics import METRICS, PluginSnapshot
from hymcache.dra.kubelet_plugin.preparer import ClaimPreparer, PrepareOptions
from hymcache.dra.kubelet_plugin.servicers import (
    HealthServicer,
    PluginServicer,
    RegistrationServicer,
)
from hymcache.dra.kubelet_plugin.sockets import (
    OwnedSocket,
    PluginSockets,
    make_way,
    remove_left_overs,
)
from hymcache.dra.state_file import StateFile, locked
from hymcache.errors import ConfigError
from hymcache.http_endpoint import HttpEndpoint, make_http_app
from hymcache.metric_table import TableCollector, make_registry

PLUGINS_FOLDER: Final = "/var/lib/kubelet/plugins"
REGISTRAR_FOLDER: Final = "/var/lib/kubelet/plugins_registry"
# The kubelet prepares at most a few pods at a time.
_CALLS_MAX: Final = 64
# Calls under way may end; the kubelet repeats those that do not.
_STOP_GRACE_S: Final = 3.0

logger = logging.getLogger("hymcache.dra.kubelet_plugin")


@dataclass(frozen=True, slots=True)
class PluginOptions:
    """A plugin of a node. Addresses that are None are not served."""

    node: str
    driver: str = names.DRIVER_NAME
    pod_uid: str = ""
    cdi_root: Path = Path(names.CDI_ROOT)
    plugins_folder: Path = Path(PLUGINS_FOLDER)
    registrar_folder: Path = Path(REGISTRAR_FOLDER)
    liveness: Address | None = None
    http: Address | None = None


class KubeletPlugin:
    """Serves the kubelet of this node."""

    def __init__(self, options: PluginOptions, source: ClaimSource) -> None:
        """Nothing is opened before `start`. Raises ConfigError."""
        self._options = options
        self.sockets = PluginSockets.named(
            options.driver, options.pod_uid, options.plugins_folder, options.registrar_folder
        )
        folder = self.sockets.plugin.parent
        self._checkpoint = StateFile(folder / CHECKPOINT_FILE, Checkpoint)
        self._health = DeviceHealth(self._checkpoint, options.cdi_root)
        self._preparer = ClaimPreparer(
            PrepareOptions(options.driver, options.node, options.cdi_root),
            self._checkpoint,
            source,
            on_change=self._health.tell_change,
        )
        self._registration = RegistrationServicer(options.driver, self.sockets.plugin)
        self._running: AsyncExitStack | None = None
        self._endpoints: dict[str, str] = {}

    @property
    def endpoints(self) -> Mapping[str, str]:
        """What listens where, once started."""
        return self._endpoints

    async def start(self) -> None:
        """Serves when it returns; the kubelet registers it when it sees the socket."""
        self._make_folders()
        # What it says is needed; that it can be read is to be known now.
        self._checkpoint.load()
        async with AsyncExitStack() as stack:
            with locked(self.sockets.plugin.with_name("sockets.lock")):
                remove_left_overs(self.sockets, self._options.driver)
                # Stopped in reverse order: first no kubelet finds it, then calls end.
                await self._serve_plugin(stack)
                await self._serve_registration(stack)
            await self._serve_liveness(stack)
            self._serve_metrics(stack)
            self._running = stack.pop_all()

    async def stop(self) -> None:
        """Ends within a few seconds; what is prepared stays so. May be called again."""
        if self._running is not None:
            running, self._running = self._running, None
            await running.aclose()

    def _make_folders(self) -> None:
        for folder in (self.sockets.plugin.parent, self.sockets.registration.parent):
            try:
                folder.mkdir(mode=0o750, parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"{folder}: cannot make it ({error.strerror}); is the kubelet's folder mounted?"
                ) from error

    async def _serve_plugin(self, stack: AsyncExitStack) -> None:
        server = _make_server(stack)
        plugin_pb2_grpc.add_DRAPluginServicer_to_server(PluginServicer(self._preparer), server)
        device_health_pb2_grpc.add_DRAResourceHealthServicer_to_server(
            HealthServicer(self._health), server
        )
        await _listen(server, self.sockets.plugin, stack)
        self._endpoints["plugin"] = str(self.sockets.plugin)

    async def _serve_registration(self, stack: AsyncExitStack) -> None:
        server = _make_server(stack)
        registration_pb2_grpc.add_RegistrationServicer_to_server(self._registration, server)
        await _listen(server, self.sockets.registration, stack)
        self._endpoints["registration"] = str(self.sockets.registration)

    async def _serve_liveness(self, stack: AsyncExitStack) -> None:
        address = self._options.liveness
        if address is None:
            return
        server = _make_server(stack)
        health_pb2_grpc.add_HealthServicer_to_server(LivenessServicer(self.sockets), server)
        try:
            port = server.add_insecure_port(str(address))
        except RuntimeError as error:
            raise ConfigError(
                f"--healthcheck-port {address.port}: cannot listen there; choose another"
            ) from error
        await server.start()
        self._endpoints["liveness"] = str(Address(address.host, port))

    def _serve_metrics(self, stack: AsyncExitStack) -> None:
        if self._options.http is None:
            return
        registry = make_registry(TableCollector(METRICS, self._snapshot))
        app = make_http_app(registry, self._check_health)
        http = HttpEndpoint(app, self._options.http, "--metrics-port")
        http.start()
        stack.callback(http.stop)
        self._endpoints["metrics"] = str(http.address)

    def _snapshot(self) -> PluginSnapshot:
        return PluginSnapshot(
            self._preparer.counts,
            len(self._preparer.prepared()),
            self._registration.is_registered,
            self._health.followers,
        )

    def _check_health(self) -> None:
        self._preparer.prepared()


def _make_server(stack: AsyncExitStack) -> grpc.aio.Server:
    server = grpc.aio.server(
        maximum_concurrent_rpcs=_CALLS_MAX,
        options=[("grpc.so_reuseport", 0)],
    )
    stack.push_async_callback(server.stop, _STOP_GRACE_S)
    return server


async def _listen(server: grpc.aio.Server, path: Path, stack: AsyncExitStack) -> None:
    make_way(path)
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise ConfigError(f"{path}: cannot listen there; check the folder") from error
    await server.start()
    stack.callback(OwnedSocket(path).remove)
