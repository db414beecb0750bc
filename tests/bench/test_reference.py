from __future__ import annotations

from pathlib import Path

import pytest

from hymcache import _core
from hymcache.bench.reference import (
    REFERENCE_MEMORY_BYTES,
    ReferenceKind,
    running_echo,
    running_reference,
)
from hymcache.errors import ConfigError

BLOCK_BYTES = 64 << 10


@pytest.mark.parametrize("kind", ["shm", "shm_streaming", "tcp"])
def test_a_reference_copy_moves_the_bytes_both_ways(kind: ReferenceKind, tmp_path: Path) -> None:
    written = [bytes([i]) * BLOCK_BYTES for i in range(1, 9)]
    offsets = [REFERENCE_MEMORY_BYTES - (8 - i) * BLOCK_BYTES for i in range(8)]
    with running_reference(kind, tmp_path) as reference:
        reference.copy.put(offsets, written)
        into = [bytearray(BLOCK_BYTES) for _ in range(8)]
        reference.copy.get(offsets[::-1], into)
        assert [bytes(block) for block in into] == written[::-1]


def test_a_block_outside_of_the_memory_is_refused(tmp_path: Path) -> None:
    with (
        running_reference("shm", tmp_path) as reference,
        pytest.raises(ConfigError, match="outside"),
    ):
        reference.copy.get([REFERENCE_MEMORY_BYTES - BLOCK_BYTES + 1], [bytearray(BLOCK_BYTES)])


def test_a_batch_has_blocks_of_one_size(tmp_path: Path) -> None:
    with (
        running_reference("shm", tmp_path) as reference,
        pytest.raises(ConfigError, match="one size"),
    ):
        reference.copy.get([0, 64], [bytearray(64), bytearray(32)])


def test_a_read_only_buffer_is_no_destination(tmp_path: Path) -> None:
    with running_reference("shm", tmp_path) as reference, pytest.raises(BufferError):
        reference.copy.get([0], [bytes(64)])


def test_the_echo_answers(tmp_path: Path) -> None:
    with running_echo(*_core.lookup_frame_bytes(32), tmp_path) as echo:
        for _ in range(3):
            echo.client.round_trip()


def test_a_lookup_frame_has_a_key_and_an_entry_for_each_block() -> None:
    request, response = _core.lookup_frame_bytes(32)
    smaller_request, smaller_response = _core.lookup_frame_bytes(31)
    assert (request - smaller_request, response - smaller_response) == (16, 64)
