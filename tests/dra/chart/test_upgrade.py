"""What `helm upgrade` keeps of what `helm install` made up: a password, a CA, a certificate."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helm_python.config import Config

from tests.dra.chart.helm_server import HelmServer
from tests.dra.chart.rendering import (
    CHART,
    LEAST,
    NAMESPACE,
    RELEASE,
    Values,
    named,
    render,
    with_values,
    workloads,
    write_secret,
)

MORE_NODES = with_values(LEAST, hostAgent={"tls": {"nodeNames": ["node-1", "node-2", "node-3"]}})
SECRETS = ("-hostagent-credentials", "-hostagent-tls", "-hostagent-ca")


class Installation:
    """The chart in a cluster."""

    def __init__(self, server: HelmServer) -> None:
        self._server = server
        self._helm = Config(
            kubeconfig_path=server.kubeconfig, namespace=NAMESPACE, storage_driver="memory"
        )
        self._helm.install(CHART, RELEASE, LEAST, namespace=NAMESPACE, timeout=30)

    def upgrade(self, values: Values) -> None:
        self._helm.upgrade(CHART, RELEASE, values, namespace=NAMESPACE, timeout=30)

    def secret(self, ending: str) -> dict[str, str]:
        data: dict[str, str] = named(self._server.manifests, "Secret", ending)["data"]
        return data

    def templates(self) -> dict[str, Any]:
        """Pods start anew when theirs changes."""
        found = workloads(self._server.manifests)
        return {item["metadata"]["name"]: item["spec"]["template"] for item in found}


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    with HelmServer(render(LEAST), tmp_path / "kubeconfig") as server:
        yield Installation(server)


def connect(serving: Path, knowing: Path, host: str) -> None:
    """A connection to an agent with one Secret by a client with another. Raises SSLError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(serving / "tls.crt", serving / "tls.key")
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(up, down, server_side=True)
    trusting = ssl.create_default_context(cafile=str(knowing / "ca.crt"))
    client = trusting.wrap_bio(down, up, server_hostname=host)
    for end in (client, server, client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    assert client.version() is not None
    client.do_handshake()


def test_an_upgrade_keeps_password_and_certificates(installation: Installation) -> None:
    before = {ending: installation.secret(ending) for ending in SECRETS}
    templates = installation.templates()
    installation.upgrade(LEAST)
    assert {ending: installation.secret(ending) for ending in SECRETS} == before
    assert installation.templates() == templates


def test_the_same_ca_signs_for_nodes_that_come(installation: Installation, tmp_path: Path) -> None:
    before = {ending: installation.secret(ending) for ending in SECRETS}
    templates = installation.templates()
    write_secret({"data": before["-hostagent-tls"]}, tmp_path / "old")
    installation.upgrade(MORE_NODES)
    after = {ending: installation.secret(ending) for ending in SECRETS}
    write_secret({"data": after["-hostagent-tls"]}, tmp_path / "new")
    assert after["-hostagent-ca"] == before["-hostagent-ca"]
    assert after["-hostagent-credentials"] == before["-hostagent-credentials"]
    assert after["-hostagent-tls"]["ca.crt"] == before["-hostagent-tls"]["ca.crt"]
    # Those that have not started anew yet trust it by the CA that they have.
    connect(tmp_path / "new", tmp_path / "old", "node-3")
    with pytest.raises(ssl.SSLCertVerificationError, match="node-3"):
        connect(tmp_path / "old", tmp_path / "new", "node-3")
    changed = {name for name, was in templates.items() if installation.templates()[name] != was}
    assert changed == {"cxl-hymcache-dra-hostagent", "cxl-hymcache-dra-controller"}
