"""A client of the gRPC service hymcache.v1.Admin."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar, cast

import grpc

from hymcache.errors import ConfigError, HymcacheError, ProtocolError, Unavailable
from hymcache.master import admin_pb2, admin_pb2_grpc
from hymcache.master.admin_token import token_metadata

_Response = TypeVar("_Response")

_UNAVAILABLE: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_CALLERS_FAULT: Final = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


class AdminClient:
    """Administers the master whose gRPC address is `address` ("host:port").

    Calls raise Unavailable when no answer comes within `timeout_s`, and ConfigError for what the
    master refuses: a wrong secret, a node that is not there, a live node that is to be forgotten.
    """

    def __init__(self, address: str, *, secret: bytes = b"", timeout_s: float = 5.0) -> None:
        self._address = address
        self._metadata = token_metadata(secret)
        self._timeout_s = timeout_s
        # A proxy for the web is not the way to a service inside.
        self._channel = grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
        self._stub = admin_pb2_grpc.AdminStub(self._channel)

    def status(self) -> admin_pb2.GetStatusResponse:
        """The master itself: what it holds and has counted."""
        return self._call(self._stub.GetStatus, admin_pb2.GetStatusRequest())

    def nodes(self) -> list[admin_pb2.Node]:
        """The nodes that are alive or were lost lately, by name."""
        return list(self._call(self._stub.ListNodes, admin_pb2.ListNodesRequest()).nodes)

    def node(self, name: str) -> admin_pb2.Node:
        """The node of this name."""
        return self._call(self._stub.GetNode, admin_pb2.GetNodeRequest(name=name)).node

    def watch(self) -> Generator[admin_pb2.WatchNodesResponse, None, None]:
        """The nodes, then each change, without end; close the generator to stop."""
        call = self._stub.WatchNodes(admin_pb2.WatchNodesRequest(), metadata=self._metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise self._translate(error) from error
        finally:
            call.cancel()

    def drain(self, name: str) -> admin_pb2.Node:
        """Tells a node to take no more writes."""
        return self._call(self._stub.DrainNode, admin_pb2.DrainNodeRequest(name=name)).node

    def undrain(self, name: str) -> admin_pb2.Node:
        """Tells a node to take writes again."""
        return self._call(self._stub.UndrainNode, admin_pb2.UndrainNodeRequest(name=name)).node

    def forget(self, name: str) -> None:
        """Takes a lost node off the list."""
        self._call(self._stub.ForgetNode, admin_pb2.ForgetNodeRequest(name=name))

    def lookup(self, keys: Sequence[bytes]) -> admin_pb2.LookupResponse:
        """All rows of at most 32 keys of 16 bytes, also those that clients are not shown."""
        return self._call(self._stub.Lookup, admin_pb2.LookupRequest(keys=keys))

    def close(self) -> None:
        """Closes the connection; idempotent."""
        self._channel.close()

    def _call(self, method: Callable[..., _Response], request: Any) -> _Response:
        try:
            return method(request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._translate(error) from error

    def _translate(self, error: grpc.RpcError) -> HymcacheError:
        call = cast("grpc.Call", error)  # what a stub raises is both
        code, details = call.code(), call.details()
        if code in _UNAVAILABLE:
            return Unavailable(f"the master's gRPC at {self._address} does not answer: {details}")
        if code in _CALLERS_FAULT:
            return ConfigError(f"{self._address}: {details}")
        return ProtocolError(f"{self._address}: {code.name}: {details}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()
