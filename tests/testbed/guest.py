"""One guest: a QEMU process whose root is this machine's, read-only."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hymcache.bench.cost import process_cpu_s
from tests.testbed.command_channel import (
    CommandChannel,
    CommandFailed,
    CommandResult,
    CommandTimeout,
    GuestCommand,
    GuestDown,
)
from tests.testbed.guest_image import GuestImage
from tests.testbed.host_packages import QEMU, program
from tests.testbed.profile import Profile

REPOSITORY = Path(__file__).resolve().parents[2]

# The interpreter of the tests, the same file in a guest.
PYTHON = sys.executable

BOOT_DEADLINE_S = 240.0
COMMAND_DEADLINE_S = 60.0
_ANSWER_DEADLINE_S = 10.0
_FOR_EVER_S = 1e6

_ADDRESS_PREFIX = 24
_CONSOLE_LINES = 40

_ENVIRONMENT = {"PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class Wiring:
    """What the guests of a testbed have in common, on the host."""

    folder: Path  # seen by host and guests under the same name
    sockets: Path  # a folder with a short name: the path of a socket has 107 bytes at most
    shared_memory: int  # a file's descriptor


class Guest:
    """`name` is its host name, `index` (0 or 1) its end of the link.

    As a context manager or by close(), its process ends; there is nothing to save.
    """

    def __init__(
        self, name: str, index: int, profile: Profile, image: GuestImage, wiring: Wiring
    ) -> None:
        self.name = name
        self.address = f"192.168.77.{index + 1}"
        self.profile = profile
        self._index = index
        self._image = image
        self._wiring = wiring
        self._folder = wiring.folder / name
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: CommandChannel | None = None
        self._started_commands: list[GuestCommand] = []
        self._python: GuestCommand | None = None
        self._starts = 0

    @property
    def folder(self) -> Path:
        """The testbed's folder: one path for one file, here and in all its guests."""
        return self._wiring.folder

    @property
    def console(self) -> str:
        """What the kernel and whoever writes to the console have printed since the start."""
        path = self._folder / "console.log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def terminal(self) -> Path:
        """The socket of the shell, where a size of the terminal was given."""
        return self._wiring.sockets / f"{self.name}.sock"

    def is_running(self) -> bool:
        """Whether its QEMU process lives, be it paused or hung."""
        return self._process is not None and self._process.poll() is None

    @property
    def cpu_s(self) -> float:
        """CPU seconds that its emulation has taken from the host."""
        return process_cpu_s(self._live_process().pid)

    def start(self, terminal_size: tuple[int, int] | None = None) -> None:
        """Starts to boot. `terminal_size` (columns, lines) gives it a shell on `terminal`."""
        if self.is_running():
            raise RuntimeError(f"guest {self.name} runs already")
        self._starts += 1
        if self._folder.exists():  # a guest that was killed leaves its logs
            self._folder.rename(self._folder.with_name(f"{self.name}.{self._starts - 1}"))
        self._folder.mkdir(parents=True)
        self._started_commands.clear()
        self._python = None
        self._channel = CommandChannel(self._folder / "commands", _ENVIRONMENT, self._check_running)
        settings = {
            "NAME": self.name,
            "ADDRESS": self.address,
            "PREFIX": str(_ADDRESS_PREFIX),
            "FOLDER": str(self._wiring.folder),
        }
        if terminal_size is not None:
            settings["TERMINAL_SIZE"] = "{} {}".format(*terminal_size)
        (self._folder / "settings").write_text(
            "".join(f"{name}={shlex.quote(value)}\n" for name, value in settings.items())
        )
        with (self._folder / "qemu.log").open("wb") as log:
            # It ends with us, however we end.
            self._process = subprocess.Popen(
                [program("setpriv"), "--pdeathsig=KILL", *self._arguments(terminal_size)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(self._wiring.shared_memory,),
                # Ctrl-C is for whoever runs the tests.
                process_group=0,
            )

    def wait_booted(self) -> None:
        """Waits until it takes commands; GuestDown with its console if it does not."""
        self._commands().wait_ready(BOOT_DEADLINE_S)

    def run(
        self,
        script: str,
        *,
        deadline_s: float = COMMAND_DEADLINE_S,
        check: bool = True,
    ) -> CommandResult:
        """Runs `script` in the guest's bash and waits for its end.

        CommandFailed if it ends with a status other than 0 and `check` is set, CommandTimeout if
        it takes longer than `deadline_s`, GuestDown if the guest ends meanwhile.
        """
        return self.start_command(script, deadline_s=deadline_s).wait(check=check)

    def start_command(self, script: str, *, deadline_s: float = COMMAND_DEADLINE_S) -> GuestCommand:
        """Like run, without waiting."""
        command = self._commands().start(script, deadline_s=deadline_s)
        self._started_commands.append(command)
        return command

    def begin_python(self) -> None:
        """Starts what runs Python, in the background, if it does not run."""
        if self._python is None:
            modules = " ".join(self.profile.preloaded[self._index])
            self._python = self._commands().start(
                f"cd {REPOSITORY} && exec {PYTHON} -m tests.testbed.python_server {modules} "
                "<>/run/python",
                deadline_s=_FOR_EVER_S,
            )

    def run_python(
        self, *argv: str, deadline_s: float = COMMAND_DEADLINE_S, check: bool = True
    ) -> CommandResult:
        """Like run, for `python -m argv` in the repository. It starts in no time: see
        python_server.py."""
        return self.start_python(*argv, deadline_s=deadline_s).wait(check=check)

    def start_python(
        self, *argv: str, deadline_s: float = COMMAND_DEADLINE_S, outlives_test: bool = False
    ) -> GuestCommand:
        """Like run_python, without waiting. `outlives_test`: end_commands() does not end it."""
        self.begin_python()
        assert self._python is not None
        self._python.wait_for_output("ready", deadline_s=BOOT_DEADLINE_S)
        command = self._commands().start_python(argv, deadline_s=deadline_s)
        if not outlives_test:
            self._started_commands.append(command)
        return command

    def end_command(self, command: GuestCommand, with_signal: str = "KILL") -> None:
        """Sends a signal to all of the process group of a command."""
        group = command.wait_started()
        self.run(f"kill -s {with_signal} -- -{group}", check=False)

    def end_commands(self) -> None:
        """Kills the commands that still run."""
        running = [command for command in self._started_commands if command.status() is None]
        self._started_commands.clear()
        if running:
            groups = " ".join(f"-{command.wait_started()}" for command in running)
            self.run(f"kill -s KILL -- {groups}", check=False)
        for command in running:
            command.wait(check=False)

    def answers(self) -> bool:
        """Whether it runs commands; False for a guest that is down, paused or hung."""
        if not self.is_running():
            return False
        try:
            self._commands().start("true", deadline_s=_ANSWER_DEADLINE_S).wait(grace_s=0)
        except (CommandFailed, CommandTimeout, GuestDown):
            return False
        return True

    def pause(self) -> None:
        """Stops the machine: to the other it looks like a host that hangs."""
        self._live_process().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undoes pause()."""
        self._live_process().send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Takes its power away."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=30)

    def close(self) -> None:
        """Ends it; what it wrote into the folder stays."""
        self.kill()

    def account(self) -> str:
        """For a report of a failure: how it ended, and the end of its console."""
        process = self._process
        state = "runs" if self.is_running() else "is down"
        if process is not None and process.returncode is not None:
            state += f" (QEMU ended with {process.returncode})"
        lines = [f"guest {self.name} ({self.profile.name}) {state}; logs in {self._folder}"]
        lines += self.console.splitlines()[-_CONSOLE_LINES:]
        log = self._folder / "qemu.log"
        lines += log.read_text(errors="replace").splitlines() if log.exists() else []
        return "\n".join(lines)

    def _arguments(self, terminal_size: tuple[int, int] | None) -> list[str]:
        wiring = self._wiring
        network = f"stream,id=net,addr.type=unix,addr.path={wiring.sockets}/link"
        # The second connects, and again whenever the first is started anew.
        network += ",server=on" if self._index == 0 else ",server=off,reconnect-ms=200"
        mac = f"52:54:00:77:00:{self._index + 1:02x}"
        serials = ["-serial", f"file:{self._folder / 'console.log'}"]
        if terminal_size is not None:
            serials += ["-serial", f"unix:{self.terminal},server=on,wait=off"]
        kernel_arguments = (
            *("console=ttyS0", "quiet", "panic=-1", "mitigations=off", "nokaslr"),
            # On a busy host what the kernel measures of its clocks at boot is wrong by far.
            *("tsc=unstable", "no_timer_check"),
            f"testbed.guest={self.name}",
            *self.profile.kernel_arguments,
        )
        return [
            QEMU,
            *("-name", self.name, "-M", self.profile.machine, "-cpu", self.profile.cpu),
            *("-accel", "tcg,thread=multi", "-smp", "1"),
            *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            *("-kernel", str(self._image.kernel), "-initrd", str(self._image.initramfs)),
            *("-append", " ".join(kernel_arguments)),
            *serials,
            *_folder_device("host", Path("/"), "readonly=on,multidevs=remap"),
            *_folder_device("modules", self._image.modules, "readonly=on"),
            *_folder_device("share", wiring.folder, "readonly=off"),
            *("-netdev", network),
            "-device",
            f"virtio-net-pci,bus=pcie.0,netdev=net,host_mtu=9000,mac={mac},romfile=",
            *self.profile.memory(Path(f"/proc/self/fd/{wiring.shared_memory}")),
        ]

    def _commands(self) -> CommandChannel:
        if self._channel is None:
            raise RuntimeError(f"guest {self.name} was not started")
        return self._channel

    def _live_process(self) -> subprocess.Popen[bytes]:
        self._check_running()
        assert self._process is not None
        return self._process

    def _check_running(self) -> None:
        if not self.is_running():
            raise GuestDown(self.account())


def _folder_device(tag: str, path: Path, options: str) -> tuple[str, ...]:
    return (
        *("-fsdev", f"local,id={tag},path={os.fspath(path)},security_model=none,{options}"),
        *("-device", f"virtio-9p-pci,bus=pcie.0,fsdev={tag},mount_tag={tag}"),
    )
