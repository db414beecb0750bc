"""What the connector needs of the C++ core, so that its logic can be tested apart from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Match(Protocol):
    """The answer to a lookup."""

    @property
    def hits(self) -> int:
        """How many of the keys were found, from the first up to the first that was not."""

    @property
    def plan(self) -> bytes:
        """How to load them: opaque, for the workers."""

    @property
    def reason(self) -> str:
        """Why the lookup failed, "" when it did not."""


class Matcher(Protocol):
    """Looks up runs of keys in the background and has the nodes prefetch what it finds."""

    def start(self, keys: bytes) -> int:
        """A ticket for a lookup. Never blocks."""

    def poll(self, ticket: int) -> Match | None:
        """The answer, None while there is none."""

    def take(self, ticket: int) -> None:
        """Forgets a ticket. Its prefetch goes on, for whoever loads by the plan."""

    def cancel(self, ticket: int) -> None:
        """Forgets a ticket, and ends its lookup or its prefetch."""


class TransferResult(Protocol):
    """A finished job, and what it took."""

    @property
    def job(self) -> int:
        """The number it was submitted under."""

    @property
    def is_load(self) -> bool:
        """Whether it was a load."""

    @property
    def statuses(self) -> bytes:
        """A BlockStatus for each of its blocks."""

    @property
    def bytes_moved(self) -> int:
        """Bytes that were copied."""

    @property
    def seconds(self) -> float:
        """Time from its submission to its end."""

    @property
    def transport(self) -> str:
        """How the bytes moved: "shm", "verbs" or "tcp"; "" if none did."""


class Transfers(Protocol):
    """Moves blocks between the store and the memory of its layouts, on threads of its own.

    Every submitted job comes out of `poll` once, at the latest its deadline after the
    submission. A save that was cancelled before its bytes were copied is never stored.
    """

    def submit_load(
        self,
        job: int,
        layout: int,
        plan: bytes,
        first: int,
        block_ids: NDArray[np.int64],
        *,
        deadline_s: float,
    ) -> None:
        """Loads rows `first...` of a plan into these blocks."""

    def submit_save(
        self,
        job: int,
        layout: int,
        keys: bytes,
        name_space: int,
        block_ids: NDArray[np.int64],
        *,
        deadline_s: float,
    ) -> None:
        """Saves these blocks under these keys, in order, up to the first that is not taken."""

    def poll(self) -> Sequence[TransferResult]:
        """Jobs that have finished since the last call."""

    def wait(self, jobs: Sequence[int], timeout_s: float) -> bool:
        """Whether these jobs have finished within the time."""

    def cancel(self, jobs: Sequence[int]) -> None:
        """Has these jobs end at their next block; each still comes out of `poll`."""

    def close(self) -> None:
        """Ends all jobs and threads."""
