from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from hymcache.connector.shared_region.settings import Role, read_settings
from hymcache.errors import ConfigError

pytestmark = pytest.mark.vllm

POD = {"CXL_DAX_DEVICE": "/dev/dax0.1", "CXL_DAX_SIZE": str(512 << 30)}


def test_a_pod_with_a_region_needs_no_settings() -> None:
    settings = read_settings({}, environ=POD)
    assert settings.device == Path("/dev/dax0.1")
    assert settings.size == 512 << 30
    assert settings.role is Role.BOTH


def test_what_is_written_wins_over_the_environment() -> None:
    settings = read_settings({"device": "/dev/shm/kv", "size": "1GiB"}, environ=POD)
    assert settings.device == Path("/dev/shm/kv")
    assert settings.size == 1 << 30


def test_the_size_of_one_device_is_not_taken_for_another() -> None:
    assert read_settings({"device": "/dev/shm/kv"}, environ=POD).size == 0
    assert read_settings({"size": "1GiB"}, environ=POD).size == 1 << 30


def test_keys_of_vllm_are_left_to_vllm() -> None:
    extra = {"spec_name": "SharedRegionOffloadingSpec", "blocks_per_chunk": 4, "block_size": 128}
    assert read_settings(extra, environ=POD).device == Path("/dev/dax0.1")


@pytest.mark.parametrize(
    ("role", "loads", "stores"),
    [("kv_both", True, True), ("kv_producer", False, True), ("kv_consumer", True, False)],
)
def test_roles(role: str, loads: bool, stores: bool) -> None:
    found = read_settings({"role": role}, environ=POD).role
    assert (found.loads, found.stores) == (loads, stores)


@pytest.mark.parametrize(
    ("extra", "environ", "line"),
    [
        ({}, {}, "no region is named; write the path of a device or file, or set CXL_DAX_DEVICE"),
        ({"devic": "/a"}, POD, "devic: unknown key; did you mean device?"),
        ({"role": "prefill"}, POD, 'role = "prefill": not a role; write kv_both, kv_producer'),
        ({"size": "many"}, POD, 'size = "many": not a size'),
        ({"deadline_s": 0}, POD, "deadline_s = 0"),
        ({"load_threads": 65}, POD, "load_threads = 65"),
        ({"canonical_layout": True}, POD, "canonical_layout: a shared region keeps blocks as"),
        ({}, {"CXL_DAX_DEVICE": "/dev/dax0.1", "CXL_DAX_SIZE": "all"}, 'size = "all"'),
    ],
)
def test_what_cannot_be_is_told_in_a_line(
    extra: dict[str, object], environ: dict[str, str], line: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        read_settings(extra, environ=environ)
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)
