"""Two guests with a network between them, and with one memory where the profile says so."""

from __future__ import annotations

import contextlib
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.testbed.guest import Guest, Wiring
from tests.testbed.guest_image import GuestImage
from tests.testbed.profile import Profile

GUEST_NAMES = ("alpha", "beta")


class Testbed:
    """Both guests boot at the same time, and are ready when start() returns.

    `folder` has to be new; it is one path for one file on the host and in both guests. What
    belongs to the outside of a guest, its link and its memory, lies elsewhere and goes with
    close().
    """

    __test__ = False  # it is no test, whatever pytest makes of its name

    def __init__(self, profile: Profile, folder: Path, image: GuestImage) -> None:
        self.profile = profile
        self.folder = folder
        folder.mkdir(parents=True)
        self._outside = contextlib.ExitStack()
        sockets = Path(self._outside.enter_context(tempfile.TemporaryDirectory()))
        wiring = Wiring(folder, sockets, self._make_shared_memory())
        self.guests = tuple(
            Guest(name, index, profile, image, wiring) for index, name in enumerate(GUEST_NAMES)
        )

    @property
    def first(self) -> Guest:
        """The guest that most tests make the server."""
        return self.guests[0]

    @property
    def second(self) -> Guest:
        """The other one."""
        return self.guests[1]

    def start(self, terminal_size: tuple[int, int] | None = None) -> None:
        """Boots what does not run and gets its devices ready."""
        down = [guest for guest in self.guests if not guest.is_running()]
        for guest in down:
            guest.start(terminal_size)
        for guest in down:
            guest.wait_booted()
        preparing = [
            guest.start_command(self.profile.prepare, deadline_s=self.profile.prepare_deadline_s)
            for guest in down
        ]
        for command in preparing:
            command.wait()

    def ensure_ready(self) -> None:
        """Starts what is down or does not answer."""
        for guest in set(self.guests) - self._answering():
            guest.kill()
        self.start()
        for guest in self.guests:
            guest.begin_python()

    def end_commands(self) -> None:
        """Kills the commands that still run, in guests that still answer."""
        with ThreadPoolExecutor(len(self.guests)) as threads:
            list(threads.map(Guest.end_commands, self._answering()))

    def account(self) -> str:
        """For a report of a failure: what both guests have to say."""
        return "\n\n".join(guest.account() for guest in self.guests)

    def close(self) -> None:
        """Ends both guests; their logs and what they wrote into the folder stay."""
        for guest in self.guests:
            guest.close()
        self._outside.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _answering(self) -> set[Guest]:
        with ThreadPoolExecutor(len(self.guests)) as threads:
            answers = list(threads.map(Guest.answers, self.guests))
        return {guest for guest, answer in zip(self.guests, answers, strict=True) if answer}

    def _make_shared_memory(self) -> int:
        # Without a name, it goes with its last user, however that ends.
        descriptor = os.memfd_create("testbed")
        self._outside.callback(os.close, descriptor)
        os.truncate(descriptor, self.profile.shared_bytes)
        return descriptor
