"""The controller as a process: connections, /metrics and /healthz, and an end by signal."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from hymcache.address import Address
from hymcache.dra import cluster
from hymcache.dra.cluster import ClusterClient, ClusterUnavailable
from hymcache.dra.controller.controller import Controller
from hymcache.dra.controller.metrics import METRICS, ControllerSnapshot
from hymcache.dra.controller.settings import ControllerSettings
from hymcache.dra.controller.steps import StepHook, hook_from_environment
from hymcache.dra.fabric import FabricManager
from hymcache.dra.fabric.connection import FabricSettings, connect_fabric
from hymcache.dra.retry import Backoff, retried
from hymcache.dra.service_process import say_ready
from hymcache.errors import Unavailable
from hymcache.http_endpoint import HttpEndpoint, make_http_app
from hymcache.metric_table import TableCollector, make_registry

_log = logging.getLogger(__name__)

_HTTP_KEY: Final = "controller.http"
_LOOP_TIMEOUT_S: Final = 5.0
# For the first word with the API server: it may start after the controller.
_START_BACKOFF: Final = Backoff(first_s=0.5, longest_s=15.0, attempts_max=20)


@dataclass(frozen=True)
class ControllerOptions:
    """What the process is told: settings, where the fabric manager and the API server are."""

    settings: ControllerSettings
    fabric: FabricSettings
    kubeconfig: Path | None = None
    http: Address | None = None


class _Candidates:
    """One controller after the other: who has lost the lease starts anew, knowing nothing."""

    def __init__(
        self,
        client: ClusterClient,
        fabric: FabricManager,
        settings: ControllerSettings,
        hook: StepHook,
    ) -> None:
        self._client = client
        self._fabric = fabric
        self._settings = settings
        self._hook = hook
        self._controller = self._make()

    def snapshot(self) -> ControllerSnapshot:
        """That of the present one."""
        return self._controller.snapshot()

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`."""
        stopping = asyncio.create_task(stop.wait())
        while not stop.is_set():
            running = asyncio.create_task(self._controller.run())
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                return
            running.result()
            _log.error("the lease is lost: standing by")
            self._controller = self._make()

    def _make(self) -> Controller:
        return Controller(self._client, self._fabric, self._settings, hook=self._hook)


async def serve_controller(options: ControllerOptions, stop: asyncio.Event) -> None:
    """Stands by and leads, again and again, until `stop`."""
    hook = hook_from_environment()
    client = await cluster.connect(options.kubeconfig)
    fabric = connect_fabric(options.fabric)
    try:
        settings = await _named(client, options.settings)
        candidates = _Candidates(client, fabric, settings, hook)
        endpoint = _endpoint(candidates, options.http)
        if endpoint is not None:
            endpoint.start()
        try:
            say_ready({_HTTP_KEY: str(endpoint.address)} if endpoint else {})
            await candidates.run(stop)
        finally:
            if endpoint is not None:
                endpoint.stop()
    finally:
        await fabric.aclose()
        await client.close()


async def _named(client: ClusterClient, settings: ControllerSettings) -> ControllerSettings:
    """The settings with the cluster's name, by which its regions are told from others'."""
    if settings.cluster:
        return settings
    namespace = await retried(
        lambda: client.get(cluster.NAMESPACE, "kube-system"),
        retry_on=ClusterUnavailable,
        backoff=_START_BACKOFF,
    )
    return replace(settings, cluster=namespace["metadata"]["uid"])


def _endpoint(candidates: _Candidates, address: Address | None) -> HttpEndpoint | None:
    if address is None:
        return None
    registry = make_registry(TableCollector(METRICS, candidates.snapshot))
    loop = asyncio.get_running_loop()

    def check_loop() -> None:
        # A standby that waits for the lease is healthy too.
        alive = threading.Event()
        loop.call_soon_threadsafe(alive.set)
        if not alive.wait(_LOOP_TIMEOUT_S):
            raise Unavailable(f"the controller has not come to an end in {_LOOP_TIMEOUT_S:g} s")

    return HttpEndpoint(make_http_app(registry, check_loop), address, _HTTP_KEY)
