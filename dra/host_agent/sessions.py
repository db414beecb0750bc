"""Sessions of a host agent: user name and password once, then a token that ends when it idles."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from hymcache.errors import ConfigError

_SESSIONS_MAX: Final = 64
_IDLE_S: Final = 1_800.0
_SECRET_BYTES_MAX: Final = 1_024


@dataclass(frozen=True, slots=True, repr=False)
class Credentials:
    """Who may use the agent."""

    user_name: str
    password: str

    @classmethod
    def read(cls, folder: Path) -> Self:
        """From the files `username` and `password`, as a Secret of Kubernetes is mounted."""
        values = []
        for name in ("username", "password"):
            path = folder / name
            try:
                text = path.read_text().rstrip("\n")
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "not text"
                raise ConfigError(
                    f"{path}: cannot read it ({reason}); --credentials is a folder with the "
                    "files username and password"
                ) from error
            if not 0 < len(text) <= _SECRET_BYTES_MAX:
                raise ConfigError(f"{path}: should have 1 to {_SECRET_BYTES_MAX} characters")
            values.append(text)
        return cls(*values)

    def match(self, user_name: str, password: str) -> bool:
        """Whether they are these; in a time that does not tell how much of them is right."""
        pairs = ((self.user_name, user_name), (self.password, password))
        matches = [hmac.compare_digest(_digest(ours), _digest(theirs)) for ours, theirs in pairs]
        return all(matches)


@dataclass(slots=True)
class _Session:
    token_digest: bytes
    used_s: float


class Sessions:
    """The sessions of a process; none outlives it."""

    def __init__(
        self, credentials: Credentials, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._credentials = credentials
        self._now_s = now_s
        self._sessions: dict[str, _Session] = {}

    def __len__(self) -> int:
        self._end_idle()
        return len(self._sessions)

    def begin(self, user_name: str, password: str) -> tuple[str, str] | None:
        """Id and token of a new session; None for wrong credentials.

        Where there are too many, the one that was idle for longest ends.
        """
        if not self._credentials.match(user_name, password):
            return None
        self._end_idle()
        if len(self._sessions) >= _SESSIONS_MAX:
            del self._sessions[min(self._sessions, key=lambda key: self._sessions[key].used_s)]
        name, token = secrets.token_hex(8), secrets.token_urlsafe(32)
        self._sessions[name] = _Session(_digest(token), self._now_s())
        return name, token

    def find(self, token: str) -> str | None:
        """The id of the session of a token, which is in use now; None where there is none."""
        self._end_idle()
        digest = _digest(token)
        for name, session in self._sessions.items():
            if hmac.compare_digest(session.token_digest, digest):
                session.used_s = self._now_s()
                return name
        return None

    def end(self, name: str) -> bool:
        """Whether there was one of that id."""
        return self._sessions.pop(name, None) is not None

    def names(self) -> tuple[str, ...]:
        """The ids of all sessions."""
        self._end_idle()
        return tuple(self._sessions)

    def _end_idle(self) -> None:
        oldest_s = self._now_s() - _IDLE_S
        for name in [n for n, session in self._sessions.items() if session.used_s < oldest_s]:
            del self._sessions[name]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
