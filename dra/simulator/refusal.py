"""Why the simulated fabric manager does not do what was asked."""

from __future__ import annotations

from hymcache.errors import HymcacheError


class Refusal(HymcacheError):
    """An answer other than success: the HTTP status, and what cfm-service would say."""

    def __init__(self, status: int, message: str, details: str) -> None:
        super().__init__(details)
        self.status = status
        self.message = message
        self.details = details


def bad_request(details: str) -> Refusal:
    """400: the request is wrong."""
    return Refusal(400, "Bad request", details)


def not_found(kind: str, name: str) -> Refusal:
    """404: there is no such thing."""
    return Refusal(404, "Not found", f"{kind} [{name}] does not exist")


def conflict(details: str) -> Refusal:
    """409: not in this state."""
    return Refusal(409, "Conflict", details)


def failure(details: str) -> Refusal:
    """500: something behind the service failed."""
    return Refusal(500, "Internal error", details)
