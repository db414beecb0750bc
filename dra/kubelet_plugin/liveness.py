"""Whether the plugin works, for the kubelet's liveness probe: the gRPC health service.

It asks the plugin's own sockets, as the kubelet does: a process that hangs, or whose sockets are
gone, is restarted.
"""

from __future__ import annotations

from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hymcache.dra.kubelet_plugin import (
    plugin_pb2,
    plugin_pb2_grpc,
    registration_pb2,
    registration_pb2_grpc,
)
from hymcache.dra.kubelet_plugin.sockets import PluginSockets

# A probe of the kubelet gives up after 1 s unless told otherwise; the chart says 5 s.
_TIMEOUT_S: Final = 2.0
# The empty name is the process as a whole.
_SERVICES: Final = ("", "liveness")


class LivenessServicer(health_pb2_grpc.HealthServicer):
    """Answers SERVING while both sockets answer."""

    def __init__(self, sockets: PluginSockets) -> None:
        self._sockets = sockets

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        """See health.proto of gRPC."""
        if request.service not in _SERVICES:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}")
        states = health_pb2.HealthCheckResponse
        alive = await self._is_alive()
        return states(status=states.SERVING if alive else states.NOT_SERVING)

    async def _is_alive(self) -> bool:
        try:
            async with grpc.aio.insecure_channel(f"unix:{self._sockets.registration}") as channel:
                await registration_pb2_grpc.RegistrationStub(channel).GetInfo(
                    registration_pb2.InfoRequest(), timeout=_TIMEOUT_S
                )
            async with grpc.aio.insecure_channel(f"unix:{self._sockets.plugin}") as channel:
                await plugin_pb2_grpc.DRAPluginStub(channel).NodePrepareResources(
                    plugin_pb2.NodePrepareResourcesRequest(), timeout=_TIMEOUT_S
                )
        except grpc.RpcError:
            return False
        return True
