"""A fabric of two machines, the node's with the device "node0", the client's with "client0"."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.transport.verbs.fake_verbs import Fabric, FakeLibrary


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    """Whatever a test does, no memory may be touched that is not registered any more."""
    made = Fabric()
    made.plug("node0", "10.0.0.1")
    made.plug("client0", "10.0.0.2")
    yield made
    assert made.violations == []


@pytest.fixture
def node_library(fabric: Fabric) -> FakeLibrary:
    """What the node's machine has."""
    return FakeLibrary(fabric, ["node0"])


@pytest.fixture
def client_library(fabric: Fabric) -> FakeLibrary:
    """What the client's machine has."""
    return FakeLibrary(fabric, ["client0"])
