"""Requests to a fabric manager: deadlines, retries of what is idempotent, errors by status."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from hymcache.dra.fabric.errors import FabricConflict, FabricRejected
from hymcache.dra.fabric.models import API_ROOT, Body, CollectionBody, ErrorBody
from hymcache.dra.retry import DEFAULT_BACKOFF, Backoff, Random, retried
from hymcache.errors import ConfigError, HymcacheError, Unavailable

_Model = TypeVar("_Model", bound=Body)
_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")

# Collections name their members only: each is asked for on its own, so many at a time.
_CONCURRENT_REQUESTS_MAX: Final = 8
_CONNECTIONS_MAX: Final = 32
_BODY_BYTES_MAX: Final = 4 << 20
_SHOWN_CHARS_MAX: Final = 300


@dataclass(frozen=True, slots=True)
class FabricTimeouts:
    """How long an answer may take. Composing and freeing include the agents of all hosts."""

    connect_s: float = 5.0
    answer_s: float = 15.0
    compose_s: float = 90.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How idempotent requests are tried again; clock and random numbers from outside."""

    backoff: Backoff = DEFAULT_BACKOFF
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    source: Random = random.Random()  # noqa: S311, RUF009 - it spreads retries; shared on purpose


class FabricTransport:
    """HTTP to one fabric manager. Paths are relative to `/cfm/v1`, parts of them quoted.

    Methods raise Unavailable, FabricConflict (409) or FabricRejected (other 4xx, or an answer
    that is not the protocol's); the text names the request and what the service says.
    """

    def __init__(
        self,
        url: str,
        *,
        ca_file: Path | None = None,
        timeouts: FabricTimeouts | None = None,
        retry: RetryPolicy | None = None,
        http_transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`url` has no path, e.g. `https://cfm:8080`; `ca_file` is PEM, else the system's."""
        self.url = url.rstrip("/")
        self.timeouts = timeouts or FabricTimeouts()
        self.retry = retry or RetryPolicy()
        self._http = httpx.AsyncClient(
            base_url=self.url + API_ROOT,
            verify=_ssl_context(ca_file) if url.startswith("https:") else False,
            transport=http_transport,
            limits=httpx.Limits(max_connections=_CONNECTIONS_MAX),
        )

    async def aclose(self) -> None:
        """Closes connections."""
        await self._http.aclose()

    async def get(self, path: str, model: type[_Model]) -> _Model:
        """A resource, tried again while the service is unavailable."""
        return await self.again(lambda: self.send("GET", path, model))

    async def find(self, path: str, model: type[_Model]) -> _Model | None:
        """A resource, None where there is none."""
        try:
            return await self.get(path, model)
        except FabricRejected as error:
            if error.status == httpx.codes.NOT_FOUND:
                return None
            raise

    async def list_names(self, path: str) -> tuple[str, ...]:
        """The names of a collection's members: the last parts of their URIs."""
        collection = await self.get(path, CollectionBody)
        return tuple(last_part(member.uri) for member in collection.members)

    async def gather(
        self, items: Iterable[_Item], ask: Callable[[_Item], Awaitable[_Answer]]
    ) -> Sequence[_Answer]:
        """Asks for all items, a few at a time; the answers in the items' order."""
        places = asyncio.Semaphore(_CONCURRENT_REQUESTS_MAX)

        async def in_turn(item: _Item) -> _Answer:
            async with places:
                return await ask(item)

        tasks = [asyncio.ensure_future(in_turn(item)) for item in items]
        try:
            return await asyncio.gather(*tasks)
        finally:
            # After the first error nobody waits for the others' answers.
            for task in tasks:
                task.cancel()

    async def again(self, attempt: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """An idempotent request, tried again while the service is unavailable."""
        return await retried(
            attempt,
            retry_on=Unavailable,
            backoff=self.retry.backoff,
            sleep=self.retry.sleep,
            source=self.retry.source,
        )

    async def send(
        self,
        method: str,
        path: str,
        model: type[_Model],
        body: Body | None = None,
        *,
        parameters: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> _Model:
        """One request, not tried again; the body of a successful answer."""
        answer = await self._request(method, path, body, parameters, timeout_s)
        if not answer.is_success:
            raise self._error(answer, method, path)
        return self._parse(answer, model, method, path)

    async def _request(
        self,
        method: str,
        path: str,
        body: Body | None,
        parameters: dict[str, str] | None,
        timeout_s: float | None,
    ) -> httpx.Response:
        timeout_s = self.timeouts.answer_s if timeout_s is None else timeout_s
        try:
            # httpx's own limits are for one read: a peer that trickles bytes would pass them.
            async with asyncio.timeout(self.timeouts.connect_s + timeout_s):
                return await self._http.request(
                    method,
                    path,
                    json=None if body is None else body.to_json(),
                    params=parameters,
                    timeout=httpx.Timeout(timeout_s, connect=self.timeouts.connect_s),
                )
        except (TimeoutError, httpx.TimeoutException) as error:
            reason = f"no answer within {timeout_s:g} s"
            raise self._unavailable(method, path, reason) from error
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise self._unavailable(method, path, reason) from error

    def _unavailable(self, method: str, path: str, reason: str) -> Unavailable:
        return Unavailable(f"fabric manager {self.url}: {method} {API_ROOT}{path}: {reason}")

    def _error(self, answer: httpx.Response, method: str, path: str) -> HymcacheError:
        status = answer.status_code
        message = (
            f"fabric manager {self.url}: {method} {API_ROOT}{path}: "
            f"HTTP status {status}{_details(answer)}"
        )
        if status == httpx.codes.CONFLICT:
            return FabricConflict(message)
        transient = {httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_MANY_REQUESTS}
        if status in transient or answer.is_server_error:
            return Unavailable(message)
        return FabricRejected(message, status)

    def _parse(self, answer: httpx.Response, model: type[_Model], method: str, path: str) -> _Model:
        where = f"fabric manager {self.url}: {method} {API_ROOT}{path}"
        if len(answer.content) > _BODY_BYTES_MAX:
            raise FabricRejected(f"{where}: an answer of {len(answer.content)} bytes")
        try:
            return model.model_validate_json(answer.content)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in fault["loc"]) or "body"
            raise FabricRejected(
                f"{where}: not an answer of cfm-service: {key}: {fault['msg']}"
            ) from error


def path_of(*parts: str) -> str:
    """A path below the API's root; each part is a name that came from elsewhere."""
    return "".join("/" + quote(part, safe="") for part in parts)


def last_part(uri: str) -> str:
    """The name of a resource by its URI."""
    return uri.rstrip("/").rpartition("/")[2]


def _details(answer: httpx.Response) -> str:
    try:
        body = ErrorBody.model_validate_json(answer.content)
    except ValidationError:
        return ""
    told = ", ".join(text for text in (body.details, body.status.message) if text)
    one_line = " ".join(told.split())
    return f" ({one_line[:_SHOWN_CHARS_MAX]})" if one_line else ""


def _ssl_context(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{ca_file}: no CA certificates in it ({reason})") from error
