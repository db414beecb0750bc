"""The checksum that Python sees is the one of the document, over whatever buffer it is given."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hymcache import ConfigError
from hymcache.transport import copy_implementation, crc32c
from tests.transport import wire_encoder


@given(st.binary(max_size=400), st.integers(0, 0xFFFFFFFF))
def test_crc32c_is_that_of_the_document(data: bytes, before: int) -> None:
    assert crc32c(data, before) == wire_encoder.crc32c(data, before)


def test_crc32c_takes_any_contiguous_buffer() -> None:
    data = bytes(range(256)) * 8
    expected = wire_encoder.crc32c(data)
    assert crc32c(bytearray(data)) == expected
    assert crc32c(memoryview(data)) == expected
    assert crc32c(np.frombuffer(data, dtype=np.float32).reshape(16, 32).data) == expected
    assert crc32c(b"") == 0


def test_crc32c_of_a_large_buffer_continues() -> None:
    data = np.arange(1 << 17, dtype=np.uint32)
    whole = crc32c(data.data)
    assert crc32c(data[1000:].data, crc32c(data[:1000].data)) == whole


def test_crc32c_refuses_what_it_cannot_mean() -> None:
    with pytest.raises(ConfigError, match="contiguous"):
        crc32c(np.arange(100, dtype=np.uint8)[::2].data)
    with pytest.raises(TypeError):
        crc32c(b"", -1)
    with pytest.raises(TypeError):
        crc32c(b"", 1 << 32)


def test_copy_implementation_has_a_name() -> None:
    assert copy_implementation() in {"avx512", "avx2", "sse2", "crc32-instruction", "memcpy"}
