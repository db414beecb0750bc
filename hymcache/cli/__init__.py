"""The command `hymcache`."""

from hymcache.cli.application import main

__all__ = ["main"]
