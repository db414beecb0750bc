"""What benchmarks need beside HyMCache itself, asked for before they start."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final, Literal

from hymcache.errors import ConfigError

Package = Literal["matplotlib", "vllm"]

_MISSING: Final[dict[Package, str]] = {
    "matplotlib": "pictures need matplotlib; install it with: pip install matplotlib",
    "vllm": "vLLM is not installed here; `make demo` installs it for the CPU",
}


def require_packages(*names: Package) -> None:
    """Raises ConfigError for the first that is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(_MISSING[name])
