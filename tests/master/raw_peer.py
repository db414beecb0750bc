"""A peer of a master that speaks the wire protocol by the second encoder, not by the C++ core."""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from hymcache._core import crc32c
from tests.transport.wire_encoder import MAGIC, TYPES, frame, text, u8, u16, u32, u64

CLIENT, NODE = 1, 2
VERSION, AUTHENTICATION, MALFORMED, UNEXPECTED = 1, 2, 3, 4
BUSY, UNREGISTERED, CONFLICT = 6, 7, 8

TIMEOUT_S = 10.0


class PeerError(Exception):
    """The ERROR frame that came."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class RawPeer:
    """A connection that has shaken hands, unless `shake_hands` is False."""

    def __init__(
        self,
        address: str,
        *,
        role: int = CLIENT,
        versions: tuple[int, int] = (1, 1),
        secret: bytes = b"",
        shake_hands: bool = True,
    ) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
        self._requests = 0
        if not shake_hands:
            return
        try:
            self._shake_hands(role, versions, secret)
        except BaseException:
            self.close()
            raise

    def _shake_hands(self, role: int, versions: tuple[int, int], secret: bytes) -> None:
        nonce = os.urandom(16)
        hello = u16(versions[0]) + u16(versions[1]) + u8(role) + bytes(3) + u64(0) + nonce
        reply = self.request("hello", hello + text("raw peer", 64))
        if secret and reply[3]:
            nonces = nonce + reply[24:40]
            answer = self.request("auth", hmac.digest(secret, b"client" + nonces, "sha256"))
            assert answer == hmac.digest(secret, b"server" + nonces, "sha256")

    def request(self, name: str, payload: bytes) -> bytes:
        """Sends a message and returns the payload of its response. Raises PeerError."""
        self._requests += 1
        self.socket.sendall(frame(name, self._requests, payload))
        return self.receive(name)

    def receive(self, name: str) -> bytes:
        """The payload of the response that comes next."""
        header = self._receive_bytes(32)
        magic, kind, flags, _, payload_bytes, bulk_bytes, payload_crc, header_crc = struct.unpack(
            "<IHHIIQII", header
        )
        assert (magic, flags, bulk_bytes, header_crc) == (MAGIC, 1, 0, crc32c(header[:28]))
        payload = self._receive_bytes(payload_bytes)
        assert crc32c(payload) == payload_crc
        if kind == TYPES["error"]:
            raise PeerError(
                int.from_bytes(payload[:2], "little"), payload[8:].rstrip(b"\0").decode()
            )
        assert kind == TYPES[name]
        return payload

    def is_closed(self) -> bool:
        """Whether the server ends the connection, whatever it says before."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False
        return True

    def _receive_bytes(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self.socket.recv(count - len(data))
            if not part:
                raise ConnectionError("the server has closed the connection")
            data += part
        return bytes(data)

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True)
class FoundEntry:
    """What LOOKUP said of a key that is held."""

    node: int
    generation: int
    epoch: int


class RawClient(RawPeer):
    """Asks a master."""

    def lookup(self, keys: Sequence[bytes]) -> list[FoundEntry | None]:
        reply = self.request("lookup", u32(len(keys)) + u32(0) + b"".join(keys))
        rows = [reply[at : at + 64] for at in range(16, len(reply), 64)]
        assert len(rows) == len(keys) == int.from_bytes(reply[:4], "little")
        return [_entry(row) for row in rows]

    def find(self, key: bytes) -> FoundEntry | None:
        return self.lookup([key])[0]

    def node_names(self) -> list[str]:
        reply = self.request("members", b"")
        rows = [reply[at : at + 288] for at in range(16, len(reply), 288)]
        return sorted(row[48:112].rstrip(b"\0").decode() for row in rows)


def _entry(row: bytes) -> FoundEntry | None:
    _, _, generation, _, _, node, _, flags, epoch, _ = struct.unpack("<16sQQQIIIIII", row)
    return FoundEntry(node, generation, epoch) if flags & 1 else None


class RawNode(RawPeer):
    """A storage node as far as a master can tell."""

    def __init__(
        self, address: str, name: str, node: int, *, incarnation: int = 1, secret: bytes = b""
    ) -> None:
        super().__init__(address, role=NODE, secret=secret)
        self.name = name
        self.node = node
        self.incarnation = incarnation

    def register(self) -> int:
        """Returns the epoch that begins."""
        ids = u32(self.node) + u32(1) + u64(self.incarnation) + u64(1 << 40) + u64(0) + bytes(16)
        texts = text(self.name, 64) + text("127.0.0.1:7410", 64) + text("", 112)
        return int.from_bytes(self.request("register", ids + texts)[12:16], "little")

    def publish(self, keys: Iterable[bytes], generation: int = 1) -> int:
        """Returns how many rows the master took."""
        rows = [self._row(key, generation) for key in keys]
        reply = self.request("publish", u32(len(rows)) + u32(0) + b"".join(rows))
        return int.from_bytes(reply[:4], "little")

    def withdraw(self, key: bytes, generation: int = 1) -> int:
        """Returns how many rows went."""
        reply = self.request("withdraw", u32(1) + u32(0) + key + u64(generation))
        return int.from_bytes(reply[:4], "little")

    def synced(self) -> None:
        self.request("synced", b"")

    def heartbeat(self, objects: int = 0, used_bytes: int = 0) -> bool:
        """Returns whether the node is to drain."""
        beat = u64(1 << 40) + u64(used_bytes) + u64(objects) + u64(0)
        return bool(self.request("heartbeat", beat)[12] & 1)

    def _row(self, key: bytes, generation: int) -> bytes:
        return struct.pack("<16sQQQIIIIII", key, 4096, generation, 7, 4096, self.node, 0, 1, 0, 0)


def make_key(number: int) -> bytes:
    """A key of 16 bytes."""
    return number.to_bytes(16, "little")


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Waits until the condition is true of what it returns."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {TIMEOUT_S:.0f} s: {what}"
        time.sleep(0.01)
