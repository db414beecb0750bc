"""A host agent's process, asked over TLS: sessions, idempotence, crashes, shared memory."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import httpx
import pytest

from hymcache.dra.cdi import read_cdi_spec
from hymcache.dra.host_agent import AllocationPhase, DaxConflict, HostAgentClient, resources
from hymcache.dra.host_agent.file_backend import DEFAULT_RANGE
from hymcache.errors import ConfigError, Unavailable
from tests.dra.host_agent.agent_process import PASSWORD, USER, AgentProcess
from tests.dra.host_agent.conftest import Hold

pytestmark = pytest.mark.slow

_MIB = 1 << 20
_START = DEFAULT_RANGE.start
_Result = TypeVar("_Result")


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    process = AgentProcess(tmp_path_factory.mktemp("agent"))
    process.start()
    yield process
    process.kill()


def ask(
    agent: AgentProcess, call: Callable[[HostAgentClient], Awaitable[_Result]], **client: str
) -> _Result:
    async def run() -> _Result:
        async with agent.client(**client) as asked:
            return await call(asked)

    return asyncio.run(run())


def test_a_region_comes_and_goes(agent: AgentProcess) -> None:
    device = ask(agent, lambda client: client.materialize("region-1", _START, 4 * _MIB))
    assert device.path == "/dev/cxl-region-1"
    assert device.cdi_name == "cxl.seagate.com/dax=region-1"
    assert agent.device("region-1").stat().st_size == 4 * _MIB
    spec = read_cdi_spec(agent.cdi_root, "region-1")
    assert spec is not None
    assert spec.size_bytes == 4 * _MIB
    assert device in ask(agent, lambda client: client.list_allocations())
    assert ask(agent, lambda client: client.unmaterialize("region-1")).done
    assert ask(agent, lambda client: client.unmaterialize("region-1")).done
    assert not agent.device("region-1").exists()
    assert read_cdi_spec(agent.cdi_root, "region-1") is None


def test_who_holds_a_device_is_told_and_fenced_on_request(agent: AgentProcess, hold: Hold) -> None:
    ask(agent, lambda client: client.materialize("held", _START + 8 * _MIB, 2 * _MIB))
    holder = hold(agent.device("held"), "map")
    result = ask(agent, lambda client: client.unmaterialize("held", wait_s=0.2))
    assert [found.pid for found in result.holders] == [holder.pid]
    assert not result.done
    assert ask(agent, lambda client: client.unmaterialize("held", fence=True)).done
    assert holder.process.wait(10) == -9


def test_conflicts_and_nonsense_are_told_apart(agent: AgentProcess) -> None:
    ask(agent, lambda client: client.materialize("taken", _START + 16 * _MIB, 2 * _MIB))
    with pytest.raises(DaxConflict, match="has bytes of the allocation taken"):
        ask(agent, lambda client: client.materialize("other", _START + 16 * _MIB, 4 * _MIB))
    with pytest.raises(ConfigError, match="multiples of 2 MiB"):
        ask(agent, lambda client: client.materialize("other", _START + 1, 2 * _MIB))
    with pytest.raises(ConfigError, match="is not in this host's memory"):
        ask(agent, lambda client: client.materialize("other", 0, 2 * _MIB))
    assert ask(agent, lambda client: client.unmaterialize("taken")).done


def test_the_window_is_told(agent: AgentProcess) -> None:
    window = ask(agent, lambda client: client.window())
    assert (window.physical_start, window.size_bytes) == (_START, DEFAULT_RANGE.size_bytes)


# --- who may ask -------------------------------------------------------------------------------


def _https(agent: AgentProcess) -> httpx.Client:
    context = ssl.create_default_context(cafile=str(agent.ca_file))
    return httpx.Client(base_url=agent.url, verify=context, timeout=30)


def _login(http: httpx.Client, password: str = PASSWORD) -> httpx.Response:
    return http.post(resources.SESSIONS, json={"UserName": USER, "Password": password})


def test_without_a_session_nothing_is_told_or_done(agent: AgentProcess) -> None:
    with _https(agent) as http:
        assert http.get(resources.ROOT).status_code == 200
        for method, path, body in (
            ("GET", resources.SESSIONS, None),
            ("GET", resources.MEMORY_DOMAIN, None),
            ("GET", resources.MEMORY_CHUNKS, None),
            ("GET", resources.MEMORY_CHUNKS + "/x", None),
            ("DELETE", resources.SESSIONS + "/x", None),
            ("POST", resources.MATERIALIZE, {"AllocationId": "x"}),
            ("POST", resources.UNMATERIALIZE, {"AllocationId": "x"}),
        ):
            for headers in ({}, {resources.TOKEN_HEADER: "guess"}):
                answer = http.request(method, path, json=body, headers=headers)
                assert answer.status_code == 401, path
                assert answer.json()["error"]["code"] == "Base.1.15.NoValidSession"


def test_the_memory_domain_is_found_from_the_root_by_links(agent: AgentProcess) -> None:
    with _https(agent) as http:
        root = http.get(resources.ROOT).json()
        headers = {resources.TOKEN_HEADER: _login(http).headers[resources.TOKEN_HEADER]}
        systems = http.get(root["Systems"]["@odata.id"], headers=headers).json()
        system = http.get(systems["Members"][0]["@odata.id"], headers=headers).json()
        domains = http.get(system["MemoryDomains"]["@odata.id"], headers=headers).json()
        domain = http.get(domains["Members"][0]["@odata.id"], headers=headers).json()
        target = domain["Actions"]["Oem"]["#CxlHost.MaterializeDAX"]["target"]
        assert target == resources.MATERIALIZE
        service = http.get(root["SessionService"]["@odata.id"], headers=headers).json()
        assert service["Sessions"]["@odata.id"] == resources.SESSIONS


def test_a_wrong_password_is_refused_and_the_right_one_is_a_session(agent: AgentProcess) -> None:
    with pytest.raises(ConfigError, match="wrong user name or password; check user name"):
        ask(agent, lambda client: client.list_allocations(), password="guess")
    with _https(agent) as http:
        answer = _login(http)
        assert answer.status_code == 201
        headers = {resources.TOKEN_HEADER: answer.headers[resources.TOKEN_HEADER]}
        session = answer.headers["Location"]
        assert {"@odata.id": session} in http.get(resources.SESSIONS, headers=headers).json()[
            "Members"
        ]
        assert http.get(resources.MEMORY_CHUNKS, headers=headers).status_code == 200
        assert http.delete(session, headers=headers).status_code == 204
        assert http.get(resources.MEMORY_CHUNKS, headers=headers).status_code == 401


def test_plain_http_is_not_answered(agent: AgentProcess) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(agent.url.replace("https", "http") + resources.ROOT, timeout=10)


def test_an_agent_with_another_certificate_is_not_asked(
    agent: AgentProcess, tmp_path: Path
) -> None:
    other = AgentProcess(tmp_path)
    other.url = agent.url
    with pytest.raises(Unavailable, match="certificate verify failed"):
        ask(other, lambda client: client.list_allocations())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"AllocationId": "../../etc/passwd", "PhysicalStart": 0, "SizeBytes": 1}',
        b'{"AllocationId": "a", "PhysicalStart": -1, "SizeBytes": 1}',
        b'{"AllocationId": "a", "PhysicalStart": 0, "SizeBytes": 0}',
        b'{"AllocationId": "a", "PhysicalStart": 0, "SizeBytes": 1, "More": 1}',
        b'{"AllocationId": "' + b"a" * 64 + b'", "PhysicalStart": 0, "SizeBytes": 1}',
    ],
)
def test_what_is_not_a_request_is_told_as_redfish_does(agent: AgentProcess, body: bytes) -> None:
    with _https(agent) as http:
        token = _login(http).headers[resources.TOKEN_HEADER]
        headers = {resources.TOKEN_HEADER: token, "Content-Type": "application/json"}
        answer = http.post(resources.MATERIALIZE, content=body, headers=headers)
        assert answer.status_code == 400
        information = answer.json()["error"]["@Message.ExtendedInfo"][0]
        assert information["MessageId"] == "Base.1.15.PropertyValueError"
        large = http.post(resources.MATERIALIZE, content=b" " * (1 << 20), headers=headers)
        assert large.status_code == 413


# --- crashes and restarts ----------------------------------------------------------------------


def test_an_agent_that_was_killed_knows_its_allocations(tmp_path: Path) -> None:
    agent = AgentProcess(tmp_path)
    agent.start()
    try:
        before = ask(agent, lambda client: client.materialize("a", _START, 2 * _MIB))
        agent.device("a").write_bytes(b"kept" + bytes(2 * _MIB - 4))
        agent.kill()
        (agent.cdi_root / "a.json").unlink()
        agent.start()
        assert ask(agent, lambda client: client.list_allocations()) == (before,)
        assert before.phase is AllocationPhase.READY
        assert read_cdi_spec(agent.cdi_root, "a") is not None
        assert agent.device("a").read_bytes()[:4] == b"kept"
        metrics = httpx.get(f"{agent.metrics_url}/metrics", timeout=10).text
        assert "hymcache_dra_host_recovered_total 1.0" in metrics
        assert httpx.get(f"{agent.metrics_url}/healthz", timeout=10).text == "ok\n"
        assert agent.stop() == 0
        assert agent.device("a").exists()
    finally:
        agent.kill()


def test_a_client_outlives_the_agents_sessions(tmp_path: Path) -> None:
    agent = AgentProcess(tmp_path)
    agent.start()

    async def run() -> None:
        async with agent.client() as client:
            await client.materialize("a", _START, 2 * _MIB)
            client._token = "of before"
            assert len(await client.list_allocations()) == 1
            agent.kill()
            with pytest.raises(Unavailable, match="the host agent does not answer"):
                await client.list_allocations()

    try:
        asyncio.run(run())
    finally:
        agent.kill()


def test_hosts_on_the_same_memory_share_the_bytes_of_a_region(tmp_path: Path, hold: Hold) -> None:
    folders = [tmp_path / name for name in ("1", "2")]
    for folder in folders:
        folder.mkdir()
    first, second = (
        AgentProcess(folder, f"host-{folder.name}", tmp_path / "memory") for folder in folders
    )
    first.start()
    second.start()
    try:
        for agent in (first, second):
            ask(agent, lambda client: client.materialize("a", _START, 2 * _MIB))
        with first.device("a").open("r+b") as file:
            file.write(b"hello")
        assert second.device("a").read_bytes()[:5] == b"hello"
        # Who holds it on one host does not keep the other from letting go.
        hold(second.device("a"))
        assert ask(first, lambda client: client.unmaterialize("a")).done
        assert not ask(second, lambda client: client.unmaterialize("a")).done
        assert ask(second, lambda client: client.unmaterialize("a", fence=True)).done
        ask(first, lambda client: client.materialize("b", _START, 2 * _MIB))
        assert first.device("b").read_bytes()[:5] == bytes(5)
    finally:
        first.kill()
        second.kill()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--listen", "0.0.0.0:0"], "name --tls-cert and --tls-key, or listen on 127.0.0.1"),
        (["--tls-cert", "cert.pem"], "--tls-cert and --tls-key go together; name both"),
        (["--tls-cert", "no", "--tls-key", "no"], "not a certificate and its key"),
        (["--backend", "sysfs"], "--memory: is for --backend file, not for sysfs"),
        (["--credentials", "/nowhere"], "a folder with the files username and password"),
    ],
)
def test_what_is_wrong_at_the_start_is_one_line(
    tmp_path: Path, options: list[str], told: str
) -> None:
    AgentProcess(tmp_path)
    arguments = ["--credentials", str(tmp_path / "credentials"), "--listen", "127.0.0.1:0"]
    arguments += ["--backend", "file", "--memory", str(tmp_path), "--state", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "hymcache", "dra", "host-agent", *arguments, *options],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert told in done.stderr
