"""How bytes shall move, as an option of a command."""

from __future__ import annotations

from enum import StrEnum


class TransportChoice(StrEnum):
    """The transports of a client; `auto` leaves the choice to it."""

    AUTO = "auto"
    SHM = "shm"
    VERBS = "verbs"
    TCP = "tcp"
