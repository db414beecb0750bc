"""A second encoder of the wire protocol, written from docs/wire-protocol.md and from nothing else.

It makes one frame of each message, which tests/cpp/test_wire.cc and the tests here compare with
what the C++ core makes. Run as a program, it writes the file with those frames:

    python tests/transport/wire_encoder.py > tests/cpp/golden_frames.inc
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from typing import Final

MAGIC: Final = 0x434D5948
RESPONSE: Final = 1 << 0

# "Types" of sections 3, 4, 6, 7, 8 and 10.
TYPES: Final = {
    "hello": 1,
    "auth": 2,
    "error": 3,
    "lookup": 16,
    "members": 17,
    "register": 18,
    "publish": 19,
    "withdraw": 20,
    "synced": 21,
    "heartbeat": 22,
    "attach": 32,
    "prefetch": 33,
    "wait": 34,
    "release": 35,
    "end": 36,
    "report": 37,
    "offer": 38,
    "write": 39,
    "commit": 40,
    "link": 41,
    "unlink": 42,
}

_POLYNOMIAL: Final = 0x82F63B78


def crc32c(data: bytes, crc: int = 0) -> int:
    """The checksum of section 1, bit by bit."""
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (_POLYNOMIAL if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def u8(value: int) -> bytes:
    return struct.pack("<B", value)


def u16(value: int) -> bytes:
    return struct.pack("<H", value)


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str, size: int) -> bytes:
    raw = value.encode()
    if len(raw) > size - 1:
        raise ValueError(f"{value!r} does not fit {size} bytes with its NUL")
    return raw.ljust(size, b"\0")


def counting(first: int, size: int) -> bytes:
    """`size` bytes first, first + 1, ...: every misplaced byte shows."""
    return bytes((first + i) % 256 for i in range(size))


def reserved(size: int) -> bytes:
    return bytes(size)


def frame(
    name: str, request_id: int, payload: bytes, bulk: bytes = b"", *, response: bool = False
) -> bytes:
    """Section 2."""
    checked = (
        u32(MAGIC)
        + u16(TYPES[name])
        + u16(RESPONSE if response else 0)
        + u32(request_id)
        + u32(len(payload))
        + u64(len(bulk))
        + u32(crc32c(payload))
    )
    return checked + u32(crc32c(checked)) + payload + bulk


def entry(seed: int) -> bytes:
    """Section 1, "Entry"."""
    return b"".join(
        (
            counting(seed, 16),  # key
            u64(0x1122334455667700 + seed),  # address
            u64(0x2233445566778800 + seed),  # generation
            u64(0x33445566778899AA),  # name_space
            u32(0x00200000 + seed),  # length
            u32(0x44556677),  # node
            u32(0x55667788),  # crc32c
            u32(0b11),  # flags: VALID, HAS_CRC
            u32(0x66778899),  # epoch
            reserved(4),
        )
    )


def member() -> bytes:
    return b"".join(
        (
            u32(0x44556677),  # node
            u32(2),  # state: draining
            u64(0x0102030405060708),  # incarnation
            u64(0x1112131415161718),  # capacity_bytes
            u64(0x2122232425262728),  # used_bytes
            counting(0x30, 16),  # host
            text("node-ä", 64),  # name
            text("[2001:db8::1]:7400", 64),  # tcp
            text("/run/hymcache/node.sock", 112),  # unix_path
        )
    )


SESSION: Final = counting(0xA0, 16)


def _handshake() -> Iterator[tuple[str, bytes]]:
    hello = (
        u16(1)  # version_min
        + u16(3)  # version_max
        + u8(2)  # role: storage node
        + reserved(3)
        + u64(0x0807060504030201)  # features
        + counting(0x10, 16)  # nonce
        + text("engine-1", 64)  # name
    )
    yield "hello", frame("hello", 1, hello)
    hello_reply = (
        u16(1)  # version
        + u8(3)  # role: master
        + u8(1)  # auth_required
        + u32(0x44556677)  # node
        + u64(0x0807060504030201)  # features
        + u64(0x1817161514131211)  # incarnation
        + counting(0x20, 16)  # nonce
        + text("master-1", 64)  # name
    )
    yield "hello_reply", frame("hello", 1, hello_reply, response=True)
    yield "auth", frame("auth", 2, counting(0x40, 32))
    yield "auth_reply", frame("auth", 2, counting(0x60, 32), response=True)
    error = u16(5) + reserved(6) + text("no such session", 248)
    yield "error", frame("error", 0xFFFFFFFF, error, response=True)


def _master() -> Iterator[tuple[str, bytes]]:
    keys = counting(0x01, 16) + counting(0x81, 16)
    yield "lookup", frame("lookup", 3, u32(2) + reserved(4) + keys)
    found = u32(2) + reserved(4) + u64(0x0102030405060708) + entry(0x01) + bytes(64)
    yield "lookup_reply", frame("lookup", 3, found, response=True)
    yield "members", frame("members", 4, b"")
    members = u64(0x0102030405060708) + u32(1) + reserved(4) + member()
    yield "members_reply", frame("members", 4, members, response=True)
    yield "register", frame("register", 5, member())
    registered = u64(0x0102030405060708) + u32(3000) + u32(0x66778899)
    yield "register_reply", frame("register", 5, registered, response=True)
    rows = entry(0x01) + entry(0x41)
    yield "publish", frame("publish", 6, u32(2) + u32(1) + rows)
    yield "publish_reply", frame("publish", 6, u32(1) + u32(0x01020304), response=True)
    withdrawn = counting(0x01, 16) + u64(0x2233445566778801)
    yield "withdraw", frame("withdraw", 7, u32(1) + reserved(4) + withdrawn)
    yield "withdraw_reply", frame("withdraw", 7, u32(0x01020304) + reserved(4), response=True)
    yield "synced", frame("synced", 8, b"")
    yield "synced_reply", frame("synced", 8, b"", response=True)
    beat = u64(0x0102030405060708) + u64(0x1112131415161718) + u64(0x21222324) + u64(0x31323334)
    yield "heartbeat", frame("heartbeat", 9, beat)
    answer = u64(0x0102030405060708) + u32(3000) + u32(1) + u64(0x4142434445464748)
    yield "heartbeat_reply", frame("heartbeat", 9, answer, response=True)


def _reads() -> Iterator[tuple[str, bytes]]:
    yield "attach", frame("attach", 10, b"")
    attached = u64(0x0000000140000000) + u64(0x0000000100000000) + u64(0x1817161514131211)
    yield "attach_reply", frame("attach", 10, attached, response=True)
    row = (
        counting(0x01, 16)  # key
        + u64(0x1122334455667701)  # address
        + u64(0x2233445566778801)  # generation
        + u32(0x00200001)  # length
        + reserved(4)
    )
    yield "prefetch", frame("prefetch", 11, SESSION + u32(15_000) + u32(1) + row)
    wait = SESSION + u32(0x01020304) + u32(256) + u32(9_500) + u32(1)
    yield "wait", frame("wait", 12, wait)
    ready = (
        u8(0)  # state: ready
        + reserved(3)
        + u32(5)  # length
        + u32(0x55667788)  # crc32c
        + u32(0b10)  # flags: HAS_CRC
        + u64(0x0000000012345000)  # region_offset
        + u64(0x0000000000000018)  # generation_word
        + u64(0x0102030405060708)  # generation_value
    )
    failed = u8(2) + reserved(3) + u32(0x00200001) + reserved(32)
    waited = u32(0x01020304) + u32(2) + ready + failed
    yield "wait_reply", frame("wait", 12, waited, counting(0xC0, 5), response=True)
    keys = u32(0x0A0B0C0D) + u32(0)  # of a linked connection: one for each row
    yield "wait_keyed_reply", frame("wait", 12, waited + keys, response=True)
    yield "release", frame("release", 13, SESSION + u32(0x01020304) + u32(0x11121314))
    yield "end", frame("end", 14, SESSION)
    yield "report", frame("report", 15, SESSION + u32(0x01020304) + reserved(4))


def _writes() -> Iterator[tuple[str, bytes]]:
    offered = counting(0x01, 16) + u32(0x00200001) + reserved(4)
    yield "offer", frame("offer", 16, u64(0x33445566778899AA) + u32(1) + u32(1) + offered)
    granted = u8(0) + reserved(7) + u64(0x0000000700000001) + u64(0x0000000112345000)
    refused = u8(6) + reserved(7) + u64(0) + u64(0)
    states = u32(2) + reserved(4) + granted + refused
    yield "offer_reply", frame("offer", 16, states, response=True)
    keys = u32(0x0A0B0C0D) + u32(0)
    yield "offer_keyed_reply", frame("offer", 16, states + keys, response=True)
    row = u64(0x0000000700000001) + u32(5) + reserved(4)
    yield "write", frame("write", 17, u32(1) + reserved(4) + row, counting(0xC0, 5))
    stored = u64(0x0000000700000001) + u32(0x55667788) + u32(0b10)  # HAS_CRC
    aborted = u64(0x0000000700000002) + u32(0) + u32(0b01)  # ABORT
    yield "commit", frame("commit", 18, u32(2) + reserved(4) + stored + aborted)
    done = u32(2) + reserved(4) + u8(0) + u8(2)
    yield "commit_reply", frame("commit", 18, done, response=True)


def _links() -> Iterator[tuple[str, bytes]]:
    mine = (
        counting(0x20, 16)  # gid
        + u32(0x00123456)  # queue_pair
        + u32(0x00ABCDEF)  # first_packet
        + u16(0x0708)  # lid
        + u8(2)  # link_layer: Ethernet
        + u8(2)  # gid_type: RoCE v2
        + u8(5)  # mtu: 4096
        + u8(16)  # reads_out
        + u8(128)  # reads_in
        + reserved(1)
    )
    yield "link", frame("link", 19, mine)
    theirs = counting(0x30, 16) + u32(0x00654321) + u32(0x00FEDCBA) + u16(0)
    theirs += u8(2) + u8(2) + u8(3) + u8(1) + u8(255) + reserved(1)
    region = u64(0x112200000) + u64(0x0AB00000) + u32(0x01020304) + u32(0b11)  # READ, WRITE
    linked = theirs + u64(0x7F0011223000) + u64(0x140000000) + u32(1) + u32(1)  # BLOCK_KEYS
    yield "link_reply", frame("link", 19, linked + region, response=True)
    yield "unlink", frame("unlink", 20, b"")
    yield "unlink_reply", frame("unlink", 20, b"", response=True)


def golden_frames() -> dict[str, bytes]:
    """One frame of each message, by name; a response is called `<request>_reply`."""
    return dict((*_handshake(), *_master(), *_reads(), *_writes(), *_links()))


def golden_file() -> str:
    """The text of tests/cpp/golden_frames.inc."""
    lines = [
        "// Written by tests/transport/wire_encoder.py from docs/wire-protocol.md: one frame of",
        "// each message, in hex. Not to be edited, and not to be made by the code that it tests.",
    ]
    for name, raw in golden_frames().items():
        pieces = [f'"{raw[at : at + 32].hex()}"' for at in range(0, len(raw), 32)]
        lines.append(f'{{"{name}",')
        lines.extend(f" {piece}" for piece in pieces[:-1])
        lines.append(f" {pieces[-1]}}},")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(golden_file())
