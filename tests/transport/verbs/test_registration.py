"""Registering memory: chunks, progress, and what is said when it is refused."""

from __future__ import annotations

import itertools
import logging
import resource
from pathlib import Path

import pytest

from hymcache.config import VerbsConfig
from hymcache.errors import DeviceError, Unavailable
from hymcache.limits import GIB, MIB
from hymcache.transport.verbs import registration
from hymcache.transport.verbs.adapter import Adapter
from hymcache.transport.verbs.connection import Connection
from hymcache.transport.verbs.library import Access
from hymcache.transport.verbs.registration import (
    CHUNK_BYTES,
    OVERLAP_BYTES,
    ProgressLog,
    chunk_ranges,
    ignores_lock_limit,
    locked_bytes,
)
from tests.transport.verbs.fake_verbs import Fabric, FakeLibrary

ANYWHERE = 0x7F00_0000_0000  # the fake does not look at memory that is only registered


@pytest.mark.parametrize("length", [1, GIB, CHUNK_BYTES + OVERLAP_BYTES, 13 * GIB + 4096])
@pytest.mark.parametrize("region_bytes_max", [1 << 60, GIB])
def test_whatever_is_no_longer_than_the_overlap_lies_within_one_chunk(
    length: int, region_bytes_max: int
) -> None:
    chunks = list(chunk_ranges(length, region_bytes_max))
    assert all(size <= region_bytes_max for _, size in chunks)
    assert chunks[0][0] == 0
    assert chunks[-1][0] + chunks[-1][1] == length
    for (before, size), (after, _) in itertools.pairwise(chunks):
        # A block may start anywhere up to where the next chunk starts.
        assert before < after
        assert before + size - after == OVERLAP_BYTES


def test_progress_is_told_after_each_chunk(fabric: Fabric, node_library: FakeLibrary) -> None:
    adapter = Adapter(node_library, VerbsConfig())
    told: list[tuple[int, int]] = []
    length = 2 * GIB
    adapter.register(ANYWHERE, length, Access.REMOTE_READ, lambda *one: told.append(one))
    assert told == [
        (CHUNK_BYTES + OVERLAP_BYTES, length),
        (2 * CHUNK_BYTES + OVERLAP_BYTES, length),
        (length, length),
    ]
    adapter.close()
    assert fabric.leaks == {}


def test_a_refusal_names_the_limit_and_leaves_nothing_registered(
    fabric: Fabric, node_library: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (64 * MIB, 128 * MIB))
    monkeypatch.setattr(registration, "ignores_lock_limit", lambda: False)
    fabric.cards["node0"].lock_bytes_max = 6 * GIB
    adapter = Adapter(node_library, VerbsConfig())
    with pytest.raises(DeviceError) as raised:
        adapter.register(ANYWHERE, 9 * GIB, Access.REMOTE_READ)
    text = str(raised.value)
    assert "after 6.0 of 10.2 GiB" in text
    assert "this process may lock 64 MiB" in text
    assert f"more than {locked_bytes(9 * GIB) // MIB} MiB" in text
    assert "ulimit -l unlimited" in text
    assert fabric.cards["node0"].locked_bytes == 0
    adapter.close()


def test_without_a_limit_the_machine_is_to_blame(
    fabric: Fabric, node_library: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    infinite = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _which: infinite)
    fabric.cards["node0"].lock_bytes_max = MIB
    adapter = Adapter(node_library, VerbsConfig())
    with pytest.raises(DeviceError, match="not the memory-lock limit"):
        adapter.register(ANYWHERE, GIB, Access.REMOTE_READ)
    adapter.close()


def test_a_connections_own_memory_names_the_limit_too(
    fabric: Fabric, node_library: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (64 * MIB, 128 * MIB))
    monkeypatch.setattr(registration, "ignores_lock_limit", lambda: False)
    fabric.cards["node0"].lock_bytes_max = MIB
    adapter = Adapter(node_library, VerbsConfig())
    connection = Connection(adapter, Access.NONE)
    with pytest.raises(DeviceError, match="may lock 64 MiB: raise the limit"):
        connection.register(ANYWHERE, 16 * MIB)
    connection.close()
    adapter.close()
    assert fabric.leaks == {}


def test_slow_registration_is_told_without_verbose(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = ProgressLog(lambda: now)
    with caplog.at_level(logging.WARNING):
        for done in range(1, 5):
            now += 2.0
            log(done * GIB, 5 * GIB)
        log(MIB, 2 * MIB)  # not worth a word
    assert [record.getMessage() for record in caplog.records] == [
        "registered 3 of 5 GiB for RDMA",
    ]


@pytest.mark.parametrize(
    ("capabilities", "users", "ignored"),
    [
        ("000001ffffffffff", "0 0 4294967295", True),
        ("000001ffffffffff", "0 100000 65536", False),  # a container with users of its own
        ("00000000a80425fb", "0 0 4294967295", False),
    ],
)
def test_who_may_lock_any_memory_is_known(
    tmp_path: Path, capabilities: str, users: str, ignored: bool
) -> None:
    (tmp_path / "status").write_text(f"Name:\tpython\nCapEff:\t{capabilities}\n")
    (tmp_path / "uid_map").write_text(f"         {users}\n")
    assert ignores_lock_limit(tmp_path) is ignored
    assert not ignores_lock_limit(tmp_path / "elsewhere")


class Ending:
    """A connection as the adapter knows it."""

    def close(self) -> None:
        raise AssertionError("its device is there")


def test_regions_outlive_the_connections_of_a_closed_adapter(
    fabric: Fabric, node_library: FakeLibrary
) -> None:
    adapter = Adapter(node_library, VerbsConfig())
    adapter.register(ANYWHERE, MIB, Access.REMOTE_READ)
    connection = Ending()
    adapter.adopt(connection)
    adapter.close()
    assert fabric.open_objects["region"] == 1
    with pytest.raises(Unavailable, match="closed"):
        adapter.adopt(connection)
    with pytest.raises(Unavailable, match="closed"):
        adapter.register(ANYWHERE, MIB, Access.REMOTE_READ)
    adapter.abandon(connection)
    assert fabric.leaks == {}
