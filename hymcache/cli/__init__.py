"""The command `hymcache`."""

from hymcache.cli.main import main

__all__ = ["main"]
