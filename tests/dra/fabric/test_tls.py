"""A fabric manager behind HTTPS: whom the client trusts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from hymcache.address import Address
from hymcache.dra.fabric import FabricSettings, RetryPolicy, connect_fabric
from hymcache.dra.retry import Backoff
from hymcache.dra.simulator.app import make_simulator_app
from hymcache.dra.simulator.service import FabricService
from hymcache.errors import ConfigError, Unavailable
from hymcache.http_endpoint import HttpEndpoint, TlsFiles


@dataclass(frozen=True)
class Secured:
    """Where it listens, and who vouches for it."""

    url: str
    ca_file: Path


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    endpoint = HttpEndpoint(
        make_simulator_app(FabricService()),
        Address("127.0.0.1", 0),
        "listen",
        TlsFiles(folder / "cert.pem", folder / "key.pem"),
    )
    endpoint.start()
    yield Secured(f"https://{endpoint.address}", folder / "ca.pem")
    endpoint.stop()


def list_blades(url: str, ca_file: Path | None) -> int:
    async def scenario() -> int:
        retry = RetryPolicy(backoff=Backoff(attempts_max=1))
        manager = connect_fabric(FabricSettings(url, ca_file=ca_file, retry=retry))
        try:
            return len(await manager.list_blades())
        finally:
            await manager.aclose()

    return asyncio.run(scenario())


def test_a_service_that_the_ca_vouches_for_is_asked(secured: Secured) -> None:
    assert list_blades(secured.url, secured.ca_file) == 0


def test_a_service_that_nobody_vouches_for_is_not_asked(secured: Secured) -> None:
    with pytest.raises(Unavailable, match="certificate verify failed"):
        list_blades(secured.url, None)


@pytest.mark.parametrize("content", [None, "not a certificate"])
def test_a_ca_file_that_is_none_is_told(tmp_path: Path, content: str | None) -> None:
    ca_file = tmp_path / "ca.pem"
    if content is not None:
        ca_file.write_text(content)
    with pytest.raises(ConfigError, match=r"ca\.pem: no CA certificates in it"):
        list_blades("https://127.0.0.1:1", ca_file)
