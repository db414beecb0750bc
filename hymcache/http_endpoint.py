"""The HTTP side of a service, in a thread of its own: /metrics, /healthz and a page for people."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from hymcache.address import Address
from hymcache.errors import ConfigError, HymcacheError, Unavailable

_BACKLOG: Final = 128
_START_TIMEOUT_S: Final = 10.0
# Requests under way may end; uvicorn looks every 0.1 s whether it is to stop.
_STOP_TIMEOUT_S: Final = 0.5
# The page shows text that came from peers: no script runs in it, and nothing is fetched for it.
_PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "Cache-Control": "no-store",
}


def make_http_app(
    registry: CollectorRegistry,
    check_health: Callable[[], None],
    render_page: Callable[[], str] | None = None,
) -> FastAPI:
    """GET /metrics, /healthz and, where there is a page, /.

    `check_health` raises a HymcacheError when the service does not work: /healthz then has the
    status 503 and its text. `render_page` returns HTML.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    # Plain functions: FastAPI runs them in threads, so a slow one does not hold up the others.
    @app.get("/metrics")
    def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=content_type)

    @app.get("/healthz")
    def healthz() -> Response:
        check_health()
        return PlainTextResponse("ok\n")

    if render_page is not None:

        @app.get("/")
        def page() -> Response:
            return HTMLResponse(render_page(), headers=_PAGE_HEADERS)

    @app.exception_handler(HymcacheError)
    def tell(_request: Request, error: Exception) -> Response:
        return PlainTextResponse(f"{error}\n", status_code=503)

    return app


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Certificate chain and private key of a server, PEM."""

    certificate: Path
    key: Path

    def check(self) -> None:
        """Raises ConfigError unless they can be read and belong together."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                f"{self.certificate}, {self.key}: not a certificate and its key ({reason}); "
                "name PEM files that belong together"
            ) from error


class HttpEndpoint:
    """Serves an application at an address, by HTTPS with `tls`.

    `key` is what the configuration calls the address.
    """

    def __init__(
        self, app: FastAPI, address: Address, key: str, tls: TlsFiles | None = None
    ) -> None:
        self._app = app
        self._address = address
        self._key = key
        self._tls = tls
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> Address:
        """Where it listens; once started, with the port that it got."""
        return self._address

    def start(self) -> None:
        """Serves when it returns. Raises ConfigError where it cannot listen."""
        if self._tls is not None:
            self._tls.check()
        listener = self._listen()
        config = uvicorn.Config(
            self._app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
            ssl_certfile=self._tls.certificate if self._tls else None,
            ssl_keyfile=self._tls.key if self._tls else None,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(
            target=server.run, kwargs={"sockets": [listener]}, name=self._key, daemon=True
        )
        self._server, self._thread = server, thread
        thread.start()
        self._wait_started(server, thread)

    def stop(self) -> None:
        """Ends within a second; may be called again."""
        if self._server is None or self._thread is None:
            return
        self._server.should_exit = True
        self._thread.join(_STOP_TIMEOUT_S)
        self._server.force_exit = True
        self._thread.join(_STOP_TIMEOUT_S)
        self._server = self._thread = None

    def _listen(self) -> socket.socket:
        host, port = self._address
        try:
            family, _, _, _, where = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = socket.create_server(
                where[:2], family=family, backlog=_BACKLOG, dualstack_ipv6=False
            )
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                f"{self._key} = {self._address}: cannot listen ({reason}); choose another address"
            ) from error
        self._address = Address(host, listener.getsockname()[1])
        return listener

    def _wait_started(self, server: uvicorn.Server, thread: threading.Thread) -> None:
        waiting = threading.Event()
        for _ in range(int(_START_TIMEOUT_S / 0.01)):
            if server.started:
                return
            if not thread.is_alive():
                break
            waiting.wait(0.01)
        raise Unavailable(f"{self._key} = {self._address}: the HTTP server does not start")
