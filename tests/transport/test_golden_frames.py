"""The document, the encoder written from it, the golden frames and wire.h agree with each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transport import wire_encoder
from tests.transport.wire_encoder import TYPES, crc32c, golden_frames

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "wire-protocol.md").read_text()
HEADER_BYTES = 32

SIZES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "key": 16, "session": 16, "nonce": 16, "host": 16}


def type_bytes(name: str) -> int:
    array = re.fullmatch(r"(\w+)\[(\d+)\]", name)
    if array is None:
        return SIZES[name]
    return (1 if array[1] == "text" else SIZES[array[1]]) * int(array[2])


def layouts() -> list[list[tuple[int, str]]]:
    """The (offset, type) rows of each layout table, in order of appearance."""
    tables: list[list[tuple[int, str]]] = []
    inside = False
    for line in DOCUMENT.splitlines():
        row = re.match(r"\| (\d+) \| ([\w\[\]]+) \| [\w]+ \|", line)
        if line.startswith("| offset | type | field |"):
            tables.append([])
            inside = True
        elif inside and row:
            tables[-1].append((int(row[1]), row[2]))
        elif not line.startswith("|"):
            inside = False
    return tables


def named_sizes() -> list[tuple[str, int]]:
    """The structures that the text names with their size, in order of appearance."""
    return [(name, int(size)) for name, size in re.findall(r"(\w+) \((\d+) bytes[;),]", DOCUMENT)]


def test_golden_file_is_what_the_encoder_makes() -> None:
    committed = (ROOT / "tests" / "cpp" / "golden_frames.inc").read_text()
    assert committed == wire_encoder.golden_file(), (
        "run: python tests/transport/wire_encoder.py > tests/cpp/golden_frames.inc"
    )


def test_layouts_of_the_document_have_neither_gaps_nor_overlaps() -> None:
    for rows in layouts():
        expected = 0
        for offset, name in rows:
            assert offset == expected, rows
            expected += type_bytes(name)


def test_layouts_of_the_document_have_the_sizes_that_it_names() -> None:
    sizes = [sum(type_bytes(name) for _, name in rows) for rows in layouts()]
    names = named_sizes()
    # The frame header is the second table; the text calls it "a header of 32 bytes".
    assert sizes.pop(1) == HEADER_BYTES
    assert sizes == [size for _, size in names]


def test_sizes_of_the_document_are_those_of_the_structs() -> None:
    declared = (ROOT / "transport" / "csrc" / "wire.h").read_text()
    declared += (ROOT / "hymcache" / "csrc" / "entry.h").read_text()
    structs = {name: int(size) for name, size in re.findall(r"sizeof\((\w+)\) == (\d+)", declared)}
    assert structs.pop("Header") == HEADER_BYTES
    # What stands in no table of its own: a row of two fields is asserted beside its request.
    assert dict(named_sizes()) == structs


def test_message_types_of_the_document_are_those_of_the_encoder() -> None:
    named = re.findall(r"^\| (\d+) ([A-Z]+) \|", DOCUMENT, re.MULTILINE)
    types = {name.lower(): int(number) for number, name in named if name.lower() in TYPES}
    assert types == TYPES


def test_every_message_has_its_golden_frame() -> None:
    without_response = {"prefetch", "release", "end", "report", "write"}
    expected = set(TYPES) | {f"{name}_reply" for name in set(TYPES) - without_response - {"error"}}
    linked = {"wait_keyed_reply", "offer_keyed_reply"}
    assert set(golden_frames()) == expected | linked


@pytest.mark.parametrize("name", sorted(golden_frames()))
def test_golden_frame_checks_itself(name: str) -> None:
    raw = golden_frames()[name]
    assert raw.startswith(b"HYMC")
    payload_bytes = int.from_bytes(raw[12:16], "little")
    bulk_bytes = int.from_bytes(raw[16:24], "little")
    assert len(raw) == HEADER_BYTES + payload_bytes + bulk_bytes
    payload = raw[HEADER_BYTES : HEADER_BYTES + payload_bytes]
    assert int.from_bytes(raw[24:28], "little") == crc32c(payload)
    assert int.from_bytes(raw[28:32], "little") == crc32c(raw[:28])


def test_crc32c_of_the_document() -> None:
    assert crc32c(b"") == 0
    assert crc32c(b"123456789") == 0xE3069283


@given(st.binary(max_size=300), st.binary(max_size=50))
def test_crc32c_continues_where_it_stopped(a: bytes, b: bytes) -> None:
    assert crc32c(b, crc32c(a)) == crc32c(a + b)
