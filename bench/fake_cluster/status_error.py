"""What the API server answers when it refuses."""

from __future__ import annotations

from typing import Any


class StatusError(Exception):
    """A refusal: HTTP status, Kubernetes' reason, a message."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason

    def body(self) -> dict[str, Any]:
        """The object of kind Status."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "code": self.code,
        }
