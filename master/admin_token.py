"""Who may administer a master: whoever knows the shared secret.

The secret itself never travels. A call carries a token that is made from it, which is of no use
for anything else; on networks that others can listen to, gRPC belongs behind TLS all the same.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import grpc

_SERVICE: Final = "hymcache.v1.Admin"
_METADATA_KEY: Final = "authorization"

if TYPE_CHECKING:
    _Handler = grpc.RpcMethodHandler[Any, Any]


def admin_token(secret: bytes) -> str:
    """The bearer token of a secret: HMAC-SHA256(secret, "hymcache.v1.Admin") in hexadecimal."""
    return hmac.digest(secret, _SERVICE.encode(), "sha256").hex()


def token_metadata(secret: bytes) -> tuple[tuple[str, str], ...]:
    """The metadata of a call; none for an empty secret."""
    return ((_METADATA_KEY, f"Bearer {admin_token(secret)}"),) if secret else ()


class TokenInterceptor(grpc.ServerInterceptor):
    """Lets calls of the Admin service through that carry the token.

    Health and reflection stay open: probes carry no metadata, and the schema is public.
    """

    def __init__(self, secret: bytes) -> None:
        self._expected = f"Bearer {admin_token(secret)}".encode()
        self._refusal: _Handler = grpc.unary_unary_rpc_method_handler(_refuse)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], _Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """The handler of the call, or one that ends it in UNAUTHENTICATED."""
        if not handler_call_details.method.startswith(f"/{_SERVICE}/"):
            return continuation(handler_call_details)
        for key, value in handler_call_details.invocation_metadata:
            given = value if isinstance(value, bytes) else value.encode()
            if key == _METADATA_KEY and hmac.compare_digest(given, self._expected):
                return continuation(handler_call_details)
        return self._refusal


def _refuse(_request: Any, context: grpc.ServicerContext) -> Any:
    context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "this master has a secret: set the same secret_file here "
        "(or send `authorization: Bearer TOKEN`, see docs/admin-api.md)",
    )
