"""HyMCache: a remote KV-cache tier for LLM serving on CXL-hybrid memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hymcache.errors import (
    ConfigError,
    Corrupt,
    DeviceError,
    HymcacheError,
    ProtocolError,
    Unavailable,
)
from hymcache.version import __version__

if TYPE_CHECKING:
    from hymcache.lookup import Client

__all__ = [
    "Client",
    "ConfigError",
    "Corrupt",
    "DeviceError",
    "HymcacheError",
    "ProtocolError",
    "Unavailable",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # The client loads the extension and NumPy; `import hymcache` alone stays quick.
    if name == "Client":
        from hymcache.lookup import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
