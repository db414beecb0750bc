"""The 32 bytes that the ends of a queue pair tell each other, beside the golden frame of LINK."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hymcache.errors import ProtocolError
from hymcache.transport.verbs.connection_data import BYTES, ConnectionData
from hymcache.transport.verbs.library import GidType, LinkLayer, Mtu
from tests.transport.wire_encoder import counting, golden_frames

GOLDEN = ConnectionData(
    gid=counting(0x20, 16),
    queue_pair=0x123456,
    first_packet=0xABCDEF,
    lid=0x0708,
    link_layer=LinkLayer.ETHERNET,
    gid_type=GidType.ROCE_V2,
    mtu=Mtu.MTU_4096,
    reads_out=16,
    reads_in=128,
)


def test_it_is_packed_as_the_document_has_it() -> None:
    payload = golden_frames()["link"][32:]
    assert GOLDEN.pack() == payload
    assert ConnectionData.unpack(payload) == GOLDEN


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [
        (16, bytes(4), "0"),  # no queue pair
        (19, b"\x01", "24 bits"),
        (23, b"\x01", "24 bits"),
        (26, b"\x03", "cannot be"),  # link layer
        (27, b"\x03", "cannot be"),  # GID type
        (28, b"\x00", "cannot be"),  # MTU
        (28, b"\x06", "cannot be"),
    ],
)
def test_what_means_nothing_is_refused(offset: int, value: bytes, reason: str) -> None:
    raw = bytearray(GOLDEN.pack())
    raw[offset : offset + len(value)] = value
    with pytest.raises(ProtocolError, match=reason):
        ConnectionData.unpack(bytes(raw))


@given(st.binary(max_size=2 * BYTES))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    try:
        data = ConnectionData.unpack(raw)
    except ProtocolError:
        return
    packed = data.pack()
    assert packed[:-1] == raw[:-1]  # the last byte is reserved
    assert ConnectionData.unpack(packed) == data


def test_it_says_how_many_bytes_it_has() -> None:
    for length in (0, BYTES - 1, BYTES + 1):
        with pytest.raises(ProtocolError, match=f"{BYTES} bytes, not {length}"):
            ConnectionData.unpack(bytes(length))
    assert dataclasses.asdict(GOLDEN)["queue_pair"] == 0x123456
