"""What the API server says when it does not do as asked."""

from __future__ import annotations

from hymcache.errors import HymcacheError, Unavailable


class ClusterError(HymcacheError):
    """The API server refused a request. `status` is that of HTTP, `reason` the server's word."""

    def __init__(self, message: str, status: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class ObjectMissing(ClusterError):
    """There is no such object (404)."""


class ObjectConflict(ClusterError):
    """Another version of the object is there (409): somebody wrote or created it meanwhile."""


class VersionGone(ClusterError):
    """The version to watch from is too old (410): list again."""


class Rejected(ClusterError):
    """The object is not valid, or this client may not do that (another 4xx)."""


class ClusterUnavailable(Unavailable):
    """The API server does not answer, or cannot now (429, 5xx): the same request may work later.

    Whether a request that changes something was carried out is not known.
    """
