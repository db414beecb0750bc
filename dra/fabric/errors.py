"""What a fabric manager or a host agent answers when it does not do what was asked.

`hymcache.errors.Unavailable` (not there, too slow, 5xx) may pass; these do not by themselves.
"""

from __future__ import annotations

from hymcache.errors import HymcacheError


class FabricConflict(HymcacheError):
    """409: the state does not allow it now: no memory left, a port taken, a device still held."""


class FabricRejected(HymcacheError):
    """4xx: the request is wrong, or names what is not there. `status` is the HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[type[FabricRejected], tuple[str, int]]:
        return type(self), (str(self), self.status)
