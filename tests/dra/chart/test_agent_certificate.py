"""The certificate that the chart makes is one that agents serve with and clients trust."""

from __future__ import annotations

import asyncio
import base64
import ssl
from pathlib import Path

import pytest

from hymcache.address import Address
from hymcache.dra.host_agent import HostAgentClient
from hymcache.dra.host_agent.file_backend import FileBackend
from hymcache.dra.host_agent.service import HostAgentOptions, HostAgentService
from hymcache.dra.host_agent.sessions import Credentials
from hymcache.errors import Unavailable
from hymcache.http_endpoint import TlsFiles
from tests.dra.chart.rendering import LEAST, named, render, with_values, workloads, write_secret
from tests.dra.simulator_process import APPLIANCE, SimulatorProcess


def make_agent(folder: Path) -> HostAgentService:
    """An agent of localhost with the Secrets of an installation, which lie beside it."""
    values = with_values(LEAST, hostAgent={"tls": {"nodeNames": ["localhost", "10.0.0.1"]}})
    manifests = render(values)
    tls, credentials = folder / "tls", folder / "credentials"
    write_secret(named(manifests, "Secret", "-tls"), tls)
    write_secret(named(manifests, "Secret", "-credentials"), credentials)
    options = HostAgentOptions(
        listen=Address("127.0.0.1", 0),
        credentials=Credentials.read(credentials),
        state_folder=folder / "state",
        cdi_root=folder / "cdi",
        tls=TlsFiles(tls / "tls.crt", tls / "tls.key"),
    )
    return HostAgentService(options, FileBackend(folder / "memory", "localhost"))


def port_of(agent: HostAgentService) -> int:
    return Address.parse(agent.endpoints["host agent"]).port


def test_an_agent_serves_with_what_the_chart_made(tmp_path: Path) -> None:
    credentials, ca_file = tmp_path / "credentials", str(tmp_path / "tls" / "ca.crt")

    async def allocations(host: str, ca_file: str | None) -> int:
        async with HostAgentClient(
            f"https://{host}:{port}",
            user_name=(credentials / "username").read_text(),
            password=(credentials / "password").read_text(),
            ca_file=ca_file,
        ) as client:
            return len(await client.list_allocations())

    with make_agent(tmp_path) as agent:
        port = port_of(agent)
        assert asyncio.run(allocations("localhost", ca_file)) == 0
        with pytest.raises(Unavailable, match="certificate verify failed"):
            asyncio.run(allocations("localhost", None))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_simulated_fabric_manager_uses_the_agents_of_the_chart(tmp_path: Path) -> None:
    with (
        make_agent(tmp_path) as agent,
        SimulatorProcess(
            tmp_path / "simulator",
            *("--host", "localhost", "--agent-url", f"https://{{host}}:{port_of(agent)}"),
            *("--credentials", str(tmp_path / "credentials")),
            *("--ca-file", str(tmp_path / "tls" / "ca.crt")),
        ) as simulator,
    ):
        memory = f"/cfm/v1/appliances/{APPLIANCE}/blades/blade-0/memory"
        answer = simulator.http.post(
            memory,
            json={
                "memorySizeMiB": 256,
                "QoS": 1,
                "shareCount": 1,
                "candidateHosts": ["localhost"],
                "claimUid": "claim-1",
            },
        )
        assert answer.status_code == 201, answer.text
        allocation_id = answer.json()["allocationId"]
        assert (tmp_path / "cdi" / f"{allocation_id}.json").exists()
        assert simulator.http.delete(f"{memory}/{answer.json()['id']}").status_code == 200
        assert not (tmp_path / "cdi" / f"{allocation_id}.json").exists()


def test_the_ca_is_kept_to_sign_for_nodes_that_come(tmp_path: Path) -> None:
    manifests = render(LEAST)
    tls, authority = named(manifests, "Secret", "-tls"), named(manifests, "Secret", "-ca")
    assert authority["data"]["ca.crt"] == tls["data"]["ca.crt"]
    write_secret(authority, tmp_path / "ca")
    # As Helm builds a certificate of what it finds.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "ca" / "ca.crt", tmp_path / "ca" / "ca.key")
    mounted = str([workload["spec"] for workload in workloads(manifests)])
    assert authority["metadata"]["name"] not in mounted


def test_pods_start_anew_when_nodes_come() -> None:
    more = with_values(LEAST, hostAgent={"tls": {"nodeNames": ["node-1", "node-2", "node-3"]}})
    checksums = [
        {
            workload["metadata"]["name"]: workload["spec"]["template"]["metadata"].get(
                "annotations", {}
            )
            for workload in workloads(render(values))
        }
        for values in (LEAST, LEAST, more)
    ]
    assert checksums[0] == checksums[1]
    changed = {name for name, found in checksums[2].items() if found != checksums[0][name]}
    assert changed == {"cxl-hymcache-dra-hostagent", "cxl-hymcache-dra-controller"}


def test_each_installation_has_a_password_of_its_own() -> None:
    first, second = (named(render(LEAST), "Secret", "-credentials")["data"] for _ in range(2))
    assert first["username"] == second["username"]
    assert first["password"] != second["password"]
    assert len(base64.b64decode(first["password"])) == 32
