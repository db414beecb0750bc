"""Where models and peers are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/hymcache`, or `~/.cache/hymcache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hymcache"
