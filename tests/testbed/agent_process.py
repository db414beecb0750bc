"""guest/agent.sh on this machine, for tests of the command channel without a guest."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.testbed.command_channel import CommandChannel, GuestDown

AGENT = Path(__file__).parent / "guest" / "agent.sh"


class Agent:
    """The agent as a process here."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.pipe = folder.with_name("python")
        os.mkfifo(self.pipe)
        self.channel = CommandChannel(folder, {"GREETING": "it's here"}, self.check)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(["bash", AGENT, self._folder, self.pipe], process_group=0)

    def check(self) -> None:
        if self.process is not None and self.process.poll() is not None:
            raise GuestDown("the agent is gone")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=10)
