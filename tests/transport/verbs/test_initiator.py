"""The client's side alone: it never holds a call up, and finds another way to the same memory."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hymcache.config import VerbsConfig
from hymcache.errors import ConfigError, HymcacheError, Unavailable
from hymcache.limits import GIB, MIB
from hymcache.transport.verbs import (
    Initiator,
    Link,
    choice,
    make_acceptor,
    make_initiator,
    pyverbs_library,
)
from hymcache.transport.verbs.library import Access, VerbsLibrary
from tests.lookup.small_service import eventually
from tests.transport.verbs.fake_verbs import Fabric, FakeDomain, FakeLibrary, FakeRegion, ipv4_gid

ANYWHERE = 0x7F00_0000_0000
PATIENCE_S = 60.0


@pytest.fixture
def initiator(fabric: Fabric, client_library: FakeLibrary) -> Iterator[Initiator]:
    made = Initiator(lambda: client_library, VerbsConfig())
    yield made
    made.close()
    assert fabric.leaks == {}


def open_soon(initiator: Initiator) -> Link:
    links: list[Link] = []

    def opened() -> bool:
        try:
            links.append(initiator.open())
        except HymcacheError:
            return False
        return True

    eventually(opened)
    return links[0]


def test_a_device_that_is_slow_to_open_holds_nobody_up(
    fabric: Fabric, client_library: FakeLibrary
) -> None:
    go = threading.Event()

    def slow() -> VerbsLibrary:
        assert go.wait(PATIENCE_S)
        return client_library

    initiator = Initiator(slow, VerbsConfig())
    with pytest.raises(Unavailable, match="still being opened"):
        initiator.open()
    go.set()
    open_soon(initiator).close()
    initiator.close()
    assert fabric.leaks == {}


class SlowDomain:
    """Registers nothing until it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.begun = threading.Event(), threading.Event()
        at_once = FakeDomain.register

        def register(domain: FakeDomain, address: int, length: int, access: Access) -> FakeRegion:
            self.begun.set()
            assert self.go.wait(PATIENCE_S)
            return at_once(domain, address, length, access)

        monkeypatch.setattr(FakeDomain, "register", register)


def test_links_are_opened_while_memory_is_registered(
    initiator: Initiator, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain = SlowDomain(monkeypatch)
    thread = threading.Thread(target=initiator.register, args=(ANYWHERE, MIB))
    thread.start()
    assert domain.begun.wait(PATIENCE_S)
    link = initiator.open()
    assert link.regions() == []
    domain.go.set()
    thread.join()
    assert [size for _, size, _ in link.regions()] == [MIB]
    link.close()


def test_memory_is_registered_again_behind_the_callers_back(
    initiator: Initiator, fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    initiator.register(ANYWHERE, MIB)
    fabric.unplug("client0")
    fabric.plug("client0", "10.0.0.2")
    domain = SlowDomain(monkeypatch)
    with pytest.raises(Unavailable, match="still being opened"):
        initiator.open()
    domain.go.set()
    link = open_soon(initiator)
    assert [size for _, size, _ in link.regions()] == [MIB]
    link.close()


def test_whoever_closes_it_waits_for_one_chunk_only(
    fabric: Fabric, client_library: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    initiator = Initiator(lambda: client_library, VerbsConfig())
    initiator.register(ANYWHERE, 4 * GIB)
    fabric.unplug("client0")
    card = fabric.plug("client0", "10.0.0.2")
    domain = SlowDomain(monkeypatch)
    with pytest.raises(Unavailable):
        initiator.open()
    closing = threading.Thread(target=initiator.close)
    closing.start()
    eventually(lambda: initiator._closed)
    domain.go.set()
    closing.join()
    assert card.locked_bytes == 0
    assert fabric.leaks == {}


def test_another_port_is_taken_when_the_port_is_down(fabric: Fabric) -> None:
    fabric.plug("client1", "10.0.1.2")
    library = FakeLibrary(fabric, ["client0", "client1"])
    initiator = Initiator(lambda: library, VerbsConfig())
    initiator.register(ANYWHERE, MIB)
    initiator.open().close()
    fabric.set_link("client0", up=False)
    link = open_soon(initiator)
    assert link.endpoint[:16] == ipv4_gid("10.0.1.2")
    assert len(link.regions()) == 1
    fabric.set_link("client1", up=False)
    with pytest.raises(Unavailable, match="client1/1: the port is down, and no other can be used"):
        initiator.open()
    link.close()
    initiator.close()
    assert fabric.leaks == {}


def test_an_address_that_changes_is_seen_by_the_next_link(
    initiator: Initiator, fabric: Fabric
) -> None:
    initiator.open().close()
    card = fabric.cards["client0"]
    card.gids[1] = dataclasses.replace(card.gids[1], gid=ipv4_gid("10.7.7.7"))
    link = initiator.open()
    assert link.endpoint[:16] == ipv4_gid("10.7.7.7")
    link.close()


def test_memory_is_left_alone_where_rdma_is_not_required(
    fabric: Fabric, caplog: pytest.LogCaptureFixture
) -> None:
    bare = FakeLibrary(fabric, [])
    with pytest.raises(ConfigError, match="no RDMA device"):
        Initiator(lambda: bare, VerbsConfig()).register(ANYWHERE, MIB)
    initiator = Initiator(lambda: bare, VerbsConfig(), required=False)
    with caplog.at_level(logging.WARNING):
        initiator.register(ANYWHERE, MIB)
    assert "memory is not registered for RDMA: this machine has no RDMA device" in caplog.text
    bare.names.append("client0")
    link = open_soon(initiator)
    assert len(link.regions()) == 1  # it is now
    link.close()
    initiator.close()


def test_without_pyverbs_one_line_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr("importlib.import_module", missing)
    monkeypatch.setattr(choice, "has_devices", lambda: True)
    line = r"RDMA needs pyverbs, which cannot be imported \(No module named 'pyverbs'\): install"
    with pytest.raises(ConfigError, match=line) as raised:
        pyverbs_library.load_library()
    assert "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match=line):
        make_initiator("verbs", VerbsConfig())
    assert make_initiator("tcp", VerbsConfig()) is None
    initiator = make_initiator("auto", VerbsConfig())
    assert initiator is not None
    with caplog.at_level(logging.WARNING):
        initiator.register(ANYWHERE, MIB)
        with pytest.raises(Unavailable, match=line):
            initiator.open()
        acceptor = make_acceptor("auto", VerbsConfig())
        assert acceptor is not None
        assert not acceptor.prepare(ANYWHERE, MIB, 0)
    assert caplog.text.count("RDMA needs pyverbs") == 2
    insisting = make_acceptor("on", VerbsConfig())
    assert insisting is not None
    with pytest.raises(ConfigError, match='node.verbs = "on": ' + line):
        insisting.prepare(ANYWHERE, MIB, 0)
    monkeypatch.undo()
    assert not choice.has_devices(tmp_path)


def test_what_went_over_tcp_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Initiator(lambda: FakeLibrary(Fabric(), []), VerbsConfig()).tell_fallbacks(3, "no key")
    assert caplog.messages == ["3 calls went over TCP instead of RDMA, the last because: no key"]
