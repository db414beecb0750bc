"""hymcache.Client as programs use it: what goes in, what comes out, and what is said when."""

from __future__ import annotations

import array
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hymcache
from hymcache._core import PrefixMatcher
from hymcache.errors import ConfigError, Unavailable
from hymcache.lookup import BlockStatus, Client
from tests.lookup.small_service import MIB, SmallService, eventually, wait_found

OK, MISS = BlockStatus.OK, BlockStatus.MISS


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def contents(number: int, length: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(number).integers(0, 256, length, dtype=np.uint8)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_objects_of_all_sizes_come_back(service: SmallService, transport: str) -> None:
    sizes = [1, 4097, 64 << 10, MIB, MIB + 1, 16 * MIB, 32 * MIB]
    keys = [key(i) for i in range(len(sizes))]
    sources = [contents(i, size) for i, size in enumerate(sizes)]
    with service.client(transport) as client:
        assert client.put(keys, sources, name_space=7) == [OK] * len(keys)
        wait_found(client, keys)
        into = [np.zeros(size, np.uint8) for size in sizes]
        assert client.get(keys, into) == [OK] * len(keys)
        for source, target in zip(sources, into, strict=True):
            assert np.array_equal(source, target)
        locations = client.lookup(keys)
        assert [location.length for location in locations if location] == sizes
        assert {location.name_space for location in locations if location} == {7}
        stats = client.stats()
        assert stats[f"{transport}_read_bytes"] == sum(sizes)
        assert stats["read"] == {"ok": len(sizes)}


@pytest.mark.parametrize(
    "make",
    [
        bytes,
        bytearray,
        memoryview,
        lambda raw: memoryview(raw).cast("I"),
        lambda raw: np.frombuffer(raw, np.float32),
        lambda raw: np.frombuffer(raw, np.int16).reshape(8, -1),
        lambda raw: array.array("d", raw),
    ],
    ids=["bytes", "bytearray", "memoryview", "ints", "floats", "matrix", "array"],
)
def test_anything_contiguous_can_be_put(
    service: SmallService, make: Callable[[bytes], Any]
) -> None:
    raw = contents(1, 4096).tobytes()
    with service.client() as client:
        assert client.put([key(1)], [make(raw)]) == [OK]
        wait_found(client, [key(1)])
        into = bytearray(len(raw))
        assert client.get([key(1)], [into]) == [OK]
        assert into == raw


@pytest.mark.parametrize(
    "make",
    [
        bytearray,
        lambda size: memoryview(bytearray(size)),
        lambda size: np.zeros((4, size // 16), np.float32),
        lambda size: np.zeros(size * 2, np.uint8)[size:],
        lambda size: array.array("q", bytes(size)),
    ],
    ids=["bytearray", "memoryview", "matrix", "slice", "array"],
)
def test_anything_writable_can_be_filled(service: SmallService, make: Callable[[int], Any]) -> None:
    raw = contents(2, 4096).tobytes()
    with service.client() as client:
        client.put([key(2)], [raw])
        wait_found(client, [key(2)])
        into = make(len(raw))
        assert client.get([key(2)], [into]) == [OK]
        assert memoryview(into).tobytes() == raw


def test_tensors_go_by_their_bytes(service: SmallService) -> None:
    torch = pytest.importorskip("torch")
    source = torch.arange(512, dtype=torch.bfloat16)
    target = torch.zeros(512, dtype=torch.bfloat16)
    with service.client() as client:
        with pytest.raises(ConfigError, match=r"buffer 0 is a Tensor, .*\.view\(torch\.uint8\)"):
            client.put([key(3)], [source])
        assert client.put([key(3)], [source.view(torch.uint8).numpy()]) == [OK]
        wait_found(client, [key(3)])
        assert client.get([key(3)], [target.view(torch.uint8).numpy()]) == [OK]
        assert torch.equal(source, target)


def test_a_buffer_of_another_size_is_a_miss(service: SmallService) -> None:
    with service.client() as client:
        client.put([key(1), key(2)], [b"four", b"four"])
        wait_found(client, [key(1), key(2)])
        into = [bytearray(3), bytearray(4)]
        assert client.get([key(1), key(2)], into) == [MISS, OK]
        assert into == [b"\0\0\0", b"four"]
        assert client.get([key(9)], [bytearray(4)]) == [MISS]


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (b"four", "buffer 1: Object is not writable"),
        (memoryview(b"four"), "buffer 1: "),
        (np.zeros((4, 4), np.uint8)[:, 1], "buffer 1: ndarray is not C-contiguous"),
        (memoryview(bytearray(8))[::2], "buffer 1: memoryview: underlying buffer is not C-contig"),
        ("four", "buffer 1 is a str, which has no buffer interface"),
        (None, "buffer 1 is a NoneType, which has no buffer interface"),
    ],
    ids=["bytes", "read-only", "column", "strided", "str", "none"],
)
def test_what_cannot_be_filled_is_named(service: SmallService, buffer: Any, message: str) -> None:
    with service.client() as client, pytest.raises(ConfigError) as raised:
        client.get([key(1), key(2)], [bytearray(4), buffer])
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_an_array_that_is_not_contiguous_cannot_be_put(service: SmallService) -> None:
    with service.client() as client:
        for bad in (np.zeros((4, 4))[:, 1], np.zeros((4, 4), order="F"), np.zeros(8)[::-1]):
            with pytest.raises(ConfigError, match="buffer 0: ndarray is not C-contiguous"):
                client.put([key(1)], [bad])
        assert client.put([key(1)], [np.zeros((4, 4), order="F").T]) == [OK]


def test_keys_and_buffers_must_match(service: SmallService) -> None:
    with service.client() as client:
        with pytest.raises(ConfigError, match="key 1 has 15 bytes, a key has 16"):
            client.lookup([key(1), b"x" * 15])
        with pytest.raises(ConfigError, match="1 keys and 2 buffers: each key needs one"):
            client.put([key(1)], [b"a", b"b"])
        with pytest.raises(ConfigError, match="2 keys and 0 buffers"):
            client.get([key(1), key(2)], [])
        assert client.put([], []) == []
        assert client.get([], []) == []
        assert client.lookup([]) == []


def test_buffers_are_let_go_of(service: SmallService) -> None:
    with service.client() as client:
        source, target = bytearray(b"four"), bytearray(4)
        client.put([key(1)], [source])
        client.get([key(1)], [target])
        with pytest.raises(ConfigError):
            client.get([key(1), key(2)], [target, b"no"])
        source.append(0)  # a buffer that is held cannot be resized
        target.append(0)


def test_what_is_put_twice_is_stored_once_and_skips_are_said(service: SmallService) -> None:
    with service.client() as client:
        assert client.put([key(1)], [b"four"]) == [OK]
        assert client.put([key(1), key(2)], [b"four", b"two"]) == [BlockStatus.STORED_ALREADY, OK]
        too_large = np.zeros(65 * MIB, np.uint8)
        statuses = client.put([key(3), key(4), key(5)], [b"a", too_large, b"c"], prefix_order=True)
        assert statuses == [OK, BlockStatus.SKIP_TOO_LARGE, BlockStatus.SKIP_PREFIX]
        service.node.set_draining(True)
        assert client.put([key(6)], [b"a"]) == [BlockStatus.SKIP_DRAINING]
        assert client.stats()["written"] == {
            "ok": 3,
            "stored_already": 1,
            "skip_too_large": 1,
            "skip_prefix": 1,
            "skip_draining": 1,
        }


def test_an_unreachable_master_is_one_line(tmp_path: Path) -> None:
    with SmallService(tmp_path) as service:
        address = service.address
    with Client(address) as client:
        started = time.monotonic()
        for call in (
            lambda: client.put([key(1)], [b"a"]),
            lambda: client.get([key(1)], [bytearray(1)]),
            lambda: client.lookup([key(1)]),
        ):
            with pytest.raises(Unavailable) as raised:
                call()
            assert address in str(raised.value)
            assert "refused" in str(raised.value)
            assert "\n" not in str(raised.value)
        assert time.monotonic() - started < 2
        assert client.stats()["lookup_failures"] == 2


def test_a_closed_client_says_so(service: SmallService) -> None:
    client = service.client()
    client.put([key(1)], [b"a"])
    client.close()
    client.close()
    for call in (
        lambda: client.put([key(1)], [b"a"]),
        lambda: client.get([key(1)], [bytearray(1)]),
        lambda: client.lookup([key(1)]),
    ):
        with pytest.raises(Unavailable, match=r"^the client is closed$"):
            call()
    eventually(lambda: service.node.stats()["connections"] == 0)
    assert client.stats()["written"] == {"ok": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"master": "nowhere"}, "nowhere"),
        ({"master": []}, "no master is named"),
        ({"transport": "pigeon"}, "transport 'pigeon' is not known: write auto, shm, verbs or tcp"),
    ],
    ids=["address", "none", "transport"],
)
def test_what_cannot_be_is_said_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Client(**arguments)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_secret_must_be_the_same(tmp_path: Path) -> None:
    with SmallService(tmp_path, secret=b"secret") as service:
        with service.client(secret=b"secret") as client:
            assert client.put([key(1)], [b"a"]) == [OK]
        for wrong in (b"another", b""):
            with service.client(secret=wrong) as client:
                with pytest.raises(ConfigError, match="secret_file"):
                    client.put([key(1)], [b"a"])
                with pytest.raises((ConfigError, Unavailable), match="secret_file"):
                    client.lookup([key(1)])


def test_masters_are_tried_in_turn(service: SmallService) -> None:
    with hymcache.Client(["127.0.0.1:1", service.address]) as client:
        assert client.put([key(1)], [b"a"]) == [OK]
        wait_found(client, [key(1)])
        assert client.stats()["connect_failures"] == 1


def test_what_has_threads_may_be_dropped_at_any_time(tmp_path: Path) -> None:
    # The threads ask Python for a MAC when they connect, while Python waits for them to end.
    service = SmallService(tmp_path, secret=b"secret")
    try:
        for _ in range(20):
            client = service.client(secret=b"secret")
            matcher = PrefixMatcher(client._core)
            matcher.start(key(1) * 3)
            del matcher, client
        del service.node
        gc.collect()
        eventually(lambda: service.master.stats()["connections"] == 0)
    finally:
        service.master.stop()


def test_many_threads_share_a_client(service: SmallService) -> None:
    keys = [key(i) for i in range(8)]
    sources = [contents(i, 100_000) for i in range(8)]
    outcomes: list[bool] = []
    with service.client() as client:
        assert client.put(keys, sources) == [OK] * 8
        wait_found(client, keys)

        def work() -> None:
            into = [np.zeros(100_000, np.uint8) for _ in keys]
            for _ in range(10):
                statuses = client.get(keys, into)
                same = all(np.array_equal(a, b) for a, b in zip(sources, into, strict=True))
                outcomes.append(same and statuses == [OK] * 8)

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert outcomes == [True] * 60
