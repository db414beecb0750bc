"""Where a TCP service listens or is found: host and port."""

from __future__ import annotations

from typing import NamedTuple

_PORT_MAX = 65_535
_WILDCARDS = frozenset({"0.0.0.0", "::"})  # noqa: S104 - told apart here, not bound


class Address(NamedTuple):
    """A host name or IP address, and a port. Port 0 asks the system for a free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Reads `host:port`, or `[IPv6 address]:port`. Raises ValueError with what to write."""
        host, colon, port = text.strip().rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ValueError('an IPv6 address goes in brackets; write e.g. "[::1]:7400"')
        if not colon or not host or any(c.isspace() or c in "/[]" for c in host):
            raise ValueError('not an address; write host:port, e.g. "127.0.0.1:7400"')
        if not (port.isascii() and port.isdigit() and int(port) <= _PORT_MAX):
            raise ValueError(f'"{port}" is not a port; write a number from 0 to {_PORT_MAX}')
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_wildcard(self) -> bool:
        """Whether it listens on all interfaces, so that no client could connect to its host."""
        return self.host in _WILDCARDS
