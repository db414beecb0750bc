"""HyMCache itself as child processes, on free ports, with a device of its own that goes with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from hymcache.bench.child_process import ChildProcess, free_ports
from hymcache.limits import GIB, MIB

_START_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True)
class ServiceOptions:
    """Sizes of the node's device, in bytes."""

    capacity_bytes: int = 4 * GIB
    staging_bytes: int = 512 * MIB
    write_buffer_bytes: int = 512 * MIB


@dataclass(frozen=True)
class RunningService:
    """Addresses and processes of a service. Embedded, both pids are of one process."""

    master: str
    master_http: str
    node_http: str
    master_pid: int
    node_pid: int

    @property
    def pids(self) -> tuple[int, ...]:
        """Every process once."""
        return tuple(dict.fromkeys((self.master_pid, self.node_pid)))


@contextmanager
def running_service(
    folder: Path, log_dir: Path, *, embedded: bool, options: ServiceOptions | None = None
) -> Iterator[RunningService]:
    """Starts `hymcache up` (embedded), or `hymcache master` and `hymcache node`.

    The device file lies in `folder` and is removed at the end.

    Raises:
        ChildFailed: a process did not start.
    """
    ports = free_ports(5)
    with ExitStack() as stack:
        config = stack.enter_context(_config(folder, ports, options or ServiceOptions()))
        if embedded:
            master = node = stack.enter_context(_start("up", config, log_dir, ports[0]))
        else:
            master = stack.enter_context(_start("master", config, log_dir, ports[0]))
            node = stack.enter_context(_start("node", config, log_dir, ports[3]))
        node.wait_until_connectable("127.0.0.1", ports[3], _START_TIMEOUT_S)
        yield _running(ports, master, node)


@contextmanager
def running_master(folder: Path, log_dir: Path) -> Iterator[RunningService]:
    """A master alone, to be filled by whoever wants to."""
    ports = free_ports(5)
    with (
        _config(folder, ports, ServiceOptions()) as config,
        _start("master", config, log_dir, ports[0]) as master,
    ):
        yield _running(ports, master, master)


def _running(ports: list[int], master: ChildProcess, node: ChildProcess) -> RunningService:
    return RunningService(
        master=f"127.0.0.1:{ports[0]}",
        master_http=f"127.0.0.1:{ports[2]}",
        node_http=f"127.0.0.1:{ports[4]}",
        master_pid=master.pid,
        node_pid=node.pid,
    )


@contextmanager
def _start(name: str, config: Path, log_dir: Path, port: int) -> Iterator[ChildProcess]:
    child = ChildProcess(
        f"hymcache {name}",
        [sys.executable, "-P", "-m", "hymcache", name, "--config", str(config)],
        log_dir / f"hymcache-{name}.log",
    )
    with child:
        child.wait_until_connectable("127.0.0.1", port, _START_TIMEOUT_S)
        yield child


@contextmanager
def _config(folder: Path, ports: list[int], options: ServiceOptions) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    device = folder / "device.dat"
    master, grpc, master_http, node, node_http = (f"127.0.0.1:{port}" for port in ports)
    # A socket's path must be short, which `folder` need not be.
    with TemporaryDirectory(prefix="hymcache-") as short:
        config = Path(short) / "hymcache.toml"
        config.write_text(
            f"""\
[master]
listen = "{master}"
grpc = "{grpc}"
http = "{master_http}"

[node]
name = "bench"
listen = "{node}"
http = "{node_http}"
unix = "{short}/node.sock"
masters = ["{master}"]

[device]
path = {json.dumps(str(device))}
capacity = {options.capacity_bytes}
staging = {options.staging_bytes}
write_buffer = {options.write_buffer_bytes}
""",
            encoding="utf-8",
        )
        try:
            yield config
        finally:
            device.unlink(missing_ok=True)
