"""Asks a host agent for DAX devices, by its Redfish API (resources.py)."""

from __future__ import annotations

import ssl
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import httpx
from pydantic import BaseModel, ValidationError

from hymcache.dra.host_agent import resources
from hymcache.dra.host_agent.resources import DaxConflict, DaxDevice, DaxRegion, Holder
from hymcache.errors import ConfigError, HymcacheError, ProtocolError, Unavailable

_CONNECT_TIMEOUT_S: Final = 5.0
# A split is a few writes to sysfs; the kernel initialises the struct pages of the device, which
# takes about a second for every 100 GiB.
_ANSWER_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class DaxWindow:
    """Where a host sees the memory of its blade, in its physical address space. In bytes."""

    physical_start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class UnmaterializeResult:
    """Whether the device is gone; if it is not, who holds it."""

    holders: tuple[Holder, ...] = ()

    @property
    def done(self) -> bool:
        """The device is gone, and its bytes are nobody's on this host."""
        return not self.holders


class HostAgentClient:
    """One host's agent. All calls are idempotent: safe to repeat after Unavailable.

    They raise Unavailable (no answer, or 5xx), ConfigError (refused: bad request, wrong
    credentials, a back end that cannot), DaxConflict (409) and ProtocolError (not our agent).
    """

    def __init__(
        self,
        url: str,
        *,
        user_name: str,
        password: str,
        ca_file: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`url` has no path, e.g. `https://host-1:8443`; `ca_file` is PEM, else the system's."""
        self._url = url.rstrip("/")
        self._credentials = {"UserName": user_name, "Password": password}
        self._token: str | None = None
        self._session: str | None = None
        self._http = httpx.AsyncClient(
            base_url=self._url,
            verify=_ssl_context(ca_file) if url.startswith("https:") else False,
            transport=transport,
            timeout=httpx.Timeout(_ANSWER_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S),
        )

    async def materialize(
        self, allocation_id: str, physical_start: int, size_bytes: int
    ) -> DaxDevice:
        """The device of these bytes, made if it is not there yet; the CDI spec is written."""
        request = resources.MaterializeRequest(
            allocation_id=allocation_id, physical_start=physical_start, size_bytes=size_bytes
        )
        answer = await self._post(resources.MATERIALIZE, request)
        return _device(answer.json())

    async def unmaterialize(
        self, allocation_id: str, *, fence: bool = False, wait_s: float = 0.0
    ) -> UnmaterializeResult:
        """Takes the device away; done as well where there is none.

        While processes hold it the agent waits for `wait_s`; `fence` kills them.
        """
        request = resources.UnmaterializeRequest(
            allocation_id=allocation_id, fence=fence, wait_s=wait_s
        )
        answer = await self._post(resources.UNMATERIALIZE, request, allow=(409,), more_s=wait_s)
        body = answer.json()
        if answer.status_code != 409:
            return UnmaterializeResult()
        return UnmaterializeResult(_holders(body))

    async def list_allocations(self) -> tuple[DaxDevice, ...]:
        """All allocations of the host, those that are not ready included."""
        answer = await self._request("GET", resources.MEMORY_CHUNKS + "?$expand=.")
        return tuple(_device(member) for member in answer.json().get("Members", ()))

    async def list_regions(self) -> tuple[DaxRegion, ...]:
        """The memory of the host that devices are made of."""
        answer = await self._request("GET", resources.MEMORY_DOMAIN)
        try:
            regions = answer.json()["Oem"]["CxlHost"]["Regions"]
            return tuple(DaxRegion.model_validate(region) for region in regions)
        except (KeyError, TypeError, ValidationError) as error:
            raise ProtocolError(f"{self._url}: not the memory domain of a host agent") from error

    async def window(self) -> DaxWindow:
        """Where a region's offset counts from. ConfigError on a host with several of them."""
        regions = await self.list_regions()
        if len(regions) == 1 and regions[0].physical_start is not None:
            return DaxWindow(regions[0].physical_start, regions[0].size_bytes)
        told = ", ".join(region.name for region in regions) or "none"
        raise ConfigError(
            f"{self._url}: should have one region of CXL memory with a known start, has {told}; "
            "have the fabric manager tell physical addresses"
        )

    async def aclose(self) -> None:
        """Ends the session and the connections; may be called again."""
        if self._session is not None and self._token is not None:
            session, self._session = self._session, None
            # A session that is not ended so ends when it has been idle for long enough.
            with suppress(httpx.HTTPError):
                await self._http.delete(session, headers={resources.TOKEN_HEADER: self._token})
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _post(
        self, path: str, body: BaseModel, *, allow: tuple[int, ...] = (), more_s: float = 0.0
    ) -> httpx.Response:
        json = body.model_dump(mode="json", by_alias=True)
        return await self._request("POST", path, json=json, allow=allow, more_s=more_s)

    async def _request(
        self,
        method: str,
        path: str,
        *,
        json: dict[str, Any] | None = None,
        allow: tuple[int, ...] = (),
        more_s: float = 0.0,
    ) -> httpx.Response:
        answer = await self._authorized(method, path, json, more_s)
        if answer.status_code == 401:
            # The session has ended: the agent was restarted, or we were idle for long.
            self._token = None
            answer = await self._authorized(method, path, json, more_s)
        if answer.is_success or answer.status_code in allow:
            return answer
        raise self._error(answer)

    async def _authorized(
        self, method: str, path: str, json: dict[str, Any] | None, more_s: float
    ) -> httpx.Response:
        token = self._token or await self._login()
        timeout = httpx.Timeout(_ANSWER_TIMEOUT_S + more_s, connect=_CONNECT_TIMEOUT_S)
        return await self._send(
            method, path, json=json, headers={resources.TOKEN_HEADER: token}, timeout=timeout
        )

    async def _login(self) -> str:
        answer = await self._send("POST", resources.SESSIONS, json=self._credentials)
        if answer.status_code != 201:
            raise self._error(answer)
        token, location = answer.headers.get(resources.TOKEN_HEADER), answer.headers.get("Location")
        if not token or not location:
            raise ProtocolError(f"{self._url}: a session without a token; not a host agent")
        self._token, self._session = str(token), str(location)
        return self._token

    async def _send(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            return await self._http.request(method, path, **arguments)
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise Unavailable(f"{self._url}: the host agent does not answer ({reason})") from error

    def _error(self, answer: httpx.Response) -> HymcacheError:
        message = f"{self._url}: {_message(answer)}"
        status = answer.status_code
        if status == 401:
            return ConfigError(f"{message}; check user name and password of the host agent")
        if status == 409:
            return DaxConflict(message)
        if status == 429 or status >= 500:
            return Unavailable(message)
        return ConfigError(message)


def _ssl_context(ca_file: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{ca_file}: no CA certificates in it ({reason})") from error


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP status {answer.status_code}"


def _device(chunk: dict[str, Any]) -> DaxDevice:
    try:
        return DaxDevice.model_validate(chunk["Oem"]["CxlHost"])
    except (KeyError, TypeError, ValidationError) as error:
        raise ProtocolError(f"not a memory chunk of a host agent: {chunk!r:.200}") from error


def _holders(body: dict[str, Any]) -> tuple[Holder, ...]:
    try:
        told = body["error"]["@Message.ExtendedInfo"][0]["Oem"]["CxlHost"]["Holders"]
        holders = tuple(Holder.model_validate(holder) for holder in told)
    except (KeyError, IndexError, TypeError, ValidationError) as error:
        raise ProtocolError(f"a conflict without holders: {body!r:.200}") from error
    if not holders:
        raise ProtocolError("a conflict without holders")
    return holders
