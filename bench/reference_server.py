"""The server process of a reference copy: `python -m hymcache.bench.reference_server KIND FD N...`

Descriptors are inherited. It ends when its client closes the connection.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

from hymcache import _core

_SERVERS: Final[dict[str, Callable[..., None]]] = {
    "shm": _core.serve_shared_memory,  # socket, memfd, bytes
    "tcp": _core.serve_stream,  # listening socket, bytes
    "echo": _core.serve_echo,  # listening socket, request bytes, response bytes
}


def main() -> None:
    """Serves until the client is gone."""
    kind, *numbers = sys.argv[1:]
    _SERVERS[kind](*map(int, numbers))


if __name__ == "__main__":
    main()
