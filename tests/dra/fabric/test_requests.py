"""What becomes of a request to a fabric manager that fails, is slow, or is somebody else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from hymcache.dra.fabric import (
    ApplianceId,
    BladeId,
    BladeKey,
    ComposeRequest,
    FabricConflict,
    FabricDialect,
    FabricManager,
    FabricRejected,
    FabricSettings,
    FabricTimeouts,
    HostAgentSettings,
    HostId,
    RetryPolicy,
    connect_fabric,
)
from hymcache.dra.retry import Backoff
from hymcache.errors import ConfigError, HymcacheError, Unavailable

_Result = TypeVar("_Result")

BLADE = BladeKey(ApplianceId("appliance 1"), BladeId("blade/2"))
REQUEST = ComposeRequest(
    blade=BLADE, size_mib=1024, qos=4, hosts=(HostId("node-1"),), owner="claim-1"
)
# Each answer of the server in turn, the last one again and again: status, body.
Answers = list[tuple[int, str]]


class ScriptedServer:
    """A real HTTP server that says what it was told to; requests are kept."""

    def __init__(self, answers: Answers, *, pause_s: float = 0.0) -> None:
        self._answers = answers
        self._pause_s = pause_s
        self.requests: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := (await reader.readuntil(b"\r\n\r\n")).decode():
            lines = head.split("\r\n")
            lengths = [line for line in lines if line.lower().startswith("content-length:")]
            if lengths:
                await reader.readexactly(int(lengths[0].partition(":")[2]))
            self.requests.append(lines[0].rpartition(" ")[0])
            index = min(len(self.requests), len(self._answers)) - 1
            status, body = self._answers[index]
            answer = f"HTTP/1.1 {status} X\r\ncontent-length: {len(body.encode())}\r\n\r\n{body}"
            for byte in answer.encode():
                writer.write(bytes([byte]))
                if self._pause_s:
                    await writer.drain()
                    await asyncio.sleep(self._pause_s)
            await writer.drain()


def ask(
    server: ScriptedServer,
    scenario: Callable[[FabricManager], Awaitable[_Result]],
    dialect: FabricDialect = FabricDialect.PAPER,
    timeouts: FabricTimeouts | None = None,
) -> tuple[_Result, list[float]]:
    """What a scenario returns, and the waits between attempts, which were not waited for."""
    waits: list[float] = []

    async def sleep(delay_s: float) -> None:
        waits.append(delay_s)

    async def connected() -> _Result:
        async def quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await server.serve(reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        listener = await asyncio.start_server(quietly, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        manager = connect_fabric(
            FabricSettings(
                url=f"http://127.0.0.1:{port}",
                dialect=dialect,
                agents=HostAgentSettings(user_name="u", password="p", scheme="http"),
                timeouts=timeouts or FabricTimeouts(),
                retry=RetryPolicy(backoff=Backoff(jitter=0, attempts_max=4), sleep=sleep),
            )
        )
        try:
            return await scenario(manager)
        finally:
            await manager.aclose()
            listener.close()

    return asyncio.run(connected()), waits


NO_MEMORY = '{"memberCount": 0, "members": []}'
ERROR = '{"uri": "/x", "details": "no such\\nthing", "status": {"code": 17, "message": "told"}}'


def test_a_read_is_tried_again_while_the_service_fails() -> None:
    server = ScriptedServer([(500, ERROR), (503, ""), (200, NO_MEMORY)])
    names, waits = ask(server, lambda manager: manager.list_memory_ids(BLADE))
    assert names == frozenset()
    assert len(server.requests) == 3
    assert waits == [0.1, 0.2]


def test_names_of_others_are_quoted_in_paths() -> None:
    server = ScriptedServer([(200, NO_MEMORY)])
    ask(server, lambda manager: manager.list_memory_ids(BLADE))
    expected = "GET /cfm/v1/appliances/appliance%201/blades/blade%2F2/memory"
    assert server.requests == [expected]


def test_after_the_last_attempt_the_user_hears_what_the_service_said() -> None:
    server = ScriptedServer([(500, ERROR)])
    with pytest.raises(Unavailable) as raised:
        ask(server, lambda manager: manager.list_memory_ids(BLADE))
    assert len(server.requests) == 4
    text = str(raised.value)
    assert "GET /cfm/v1/appliances/appliance%201" in text
    assert text.endswith("HTTP status 500 (no such thing, told)")
    assert "\n" not in text


@pytest.mark.parametrize("dialect", list(FabricDialect))
def test_composing_is_not_tried_again_by_itself(dialect: FabricDialect) -> None:
    server = ScriptedServer([(500, ERROR)])
    with pytest.raises(Unavailable):
        ask(server, lambda manager: manager.compose(REQUEST), dialect)
    assert [request.partition(" ")[0] for request in server.requests] == ["POST"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, FabricRejected),
        (401, FabricRejected),
        (404, FabricRejected),
        (408, Unavailable),
        (409, FabricConflict),
        (429, Unavailable),
        (502, Unavailable),
    ],
)
def test_each_status_is_one_kind_of_error(status: int, kind: type[HymcacheError]) -> None:
    server = ScriptedServer([(status, ERROR)])
    with pytest.raises(kind, match=f"HTTP status {status}"):
        ask(server, lambda manager: manager.compose(REQUEST))


@pytest.mark.parametrize(
    "body", ["<html>a proxy's page</html>", "[]", '{"id": 3}', '{"memberCount": "many"}', ""]
)
def test_what_is_no_fabric_manager_is_told_from_one(body: str) -> None:
    server = ScriptedServer([(200, body)])
    with pytest.raises(FabricRejected, match="not an answer of cfm-service"):
        ask(server, lambda manager: manager.list_memory_ids(BLADE))


def test_the_public_service_is_told_from_the_papers() -> None:
    region = '{"id": "memory-0", "type": "MemoryTypeRegion", "sizeMiB": 1024}'
    with pytest.raises(FabricRejected, match="set the dialect to public"):
        ask(ScriptedServer([(201, region)]), lambda manager: manager.compose(REQUEST))


def test_a_service_that_trickles_its_answer_meets_the_deadline() -> None:
    server = ScriptedServer([(200, NO_MEMORY)], pause_s=0.05)
    begun = time.monotonic()
    with pytest.raises(Unavailable, match=r"no answer within 0\.2 s"):
        ask(
            server,
            lambda manager: manager.list_memory_ids(BLADE),
            timeouts=FabricTimeouts(connect_s=0.1, answer_s=0.2),
        )
    # Four attempts; the whole answer would take four times 4 s.
    assert time.monotonic() - begun < 8


def test_a_service_that_is_not_there_is_unavailable() -> None:
    async def scenario() -> None:
        manager = connect_fabric(
            FabricSettings(
                # Nobody listens on the discard port of the loopback.
                url="http://127.0.0.1:9",
                retry=RetryPolicy(backoff=Backoff(first_s=0.001, attempts_max=2)),
            )
        )
        try:
            await manager.list_blades()
        finally:
            await manager.aclose()

    with pytest.raises(Unavailable, match=r"fabric manager http://127\.0\.0\.1:9: GET"):
        asyncio.run(scenario())


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (FabricSettings(url="cfm:8080"), "write e.g. https://cfm:8080"),
        (FabricSettings(url="http://cfm", dialect=FabricDialect.PUBLIC), "needs the host agents"),
    ],
)
def test_wrong_settings_are_told_with_the_fix(settings: FabricSettings, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        connect_fabric(settings)


def test_the_url_of_agents_names_the_place_of_the_host() -> None:
    with pytest.raises(ConfigError, match=r"write \{host\}"):
        HostAgentSettings(user_name="u", password="p", url="https://agents:8443")


@pytest.mark.parametrize(
    ("changes", "told"), [({"size_mib": 0}, "size_mib"), ({"qos": 3}, "qos"), ({"hosts": ()}, "h")]
)
def test_a_request_that_cannot_be_is_refused_at_once(changes: dict[str, int], told: str) -> None:
    arguments = {"size_mib": 1024, "qos": 4, "hosts": (HostId("node-1"),), **changes}
    with pytest.raises(ValueError, match=told):
        ComposeRequest(blade=BLADE, owner="claim-1", **arguments)  # type: ignore[arg-type]
