"""The gRPC side of a master: administration, health and reflection on one port."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from hymcache.address import Address
from hymcache.errors import ConfigError
from hymcache.master import admin_pb2, admin_pb2_grpc
from hymcache.master.admin_servicer import WATCHERS_MAX, AdminServicer
from hymcache.master.admin_token import TokenInterceptor

# Threads beside those of the watchers.
_THREADS: Final = 4
_CALLS_MAX: Final = 64
_MESSAGE_BYTES_MAX: Final = 64 << 10
_STOP_GRACE_S: Final = 0.2
_STOP_TIMEOUT_S: Final = 1.0

_SERVICE: Final = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name


class AdminEndpoint:
    """Serves an AdminServicer at an address; calls need the token of `secret`, if there is one."""

    def __init__(self, servicer: AdminServicer, address: Address, secret: bytes) -> None:
        self._address = address
        self._health = health.HealthServicer()
        self._executor = ThreadPoolExecutor(WATCHERS_MAX + _THREADS, "hymcache-grpc")
        self._server = grpc.server(
            self._executor,
            interceptors=[TokenInterceptor(secret)] if secret else [],
            options=[
                ("grpc.so_reuseport", 0),  # two masters on one port would each see half the calls
                ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
            ],
            maximum_concurrent_rpcs=_CALLS_MAX,
        )
        admin_pb2_grpc.add_AdminServicer_to_server(servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        self._set_health(serving=False)

    @property
    def address(self) -> Address:
        """Where it listens; once started, with the port that it got."""
        return self._address

    def start(self) -> None:
        """Answers when it returns, as NOT_SERVING. Raises ConfigError where it cannot listen."""
        try:
            port = self._server.add_insecure_port(str(self._address))
        except RuntimeError as error:
            raise ConfigError(
                f"master.grpc = {self._address}: cannot listen there; choose another address"
            ) from error
        self._address = Address(self._address.host, port)
        self._server.start()

    def set_serving(self) -> None:
        """The whole master is up: the health service says SERVING."""
        self._set_health(serving=True)

    def stop(self) -> None:
        """Ends within a second; may be called again."""
        self._health.enter_graceful_shutdown()
        self._server.stop(_STOP_GRACE_S).wait(_STOP_TIMEOUT_S)
        self._executor.shutdown(wait=False)

    def _set_health(self, *, serving: bool) -> None:
        states = health_pb2.HealthCheckResponse
        for service in ("", _SERVICE):
            self._health.set(service, states.SERVING if serving else states.NOT_SERVING)
