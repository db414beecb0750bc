"""Mooncake Store as a peer: installed apart, run as its users run it on one host over tcp.

It gets a venv of its own under the cache folder, which sees the packages of this interpreter
(torch and vLLM are not installed twice) and adds Mooncake to them. Two processes serve it: the
master, and an owner that holds the memory segment (standalone store).
"""

from __future__ import annotations

import json
import shutil
import site
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hymcache.bench.child_process import ChildFailed, ChildProcess, free_ports
from hymcache.errors import HymcacheError

PACKAGE: Final = "mooncake-transfer-engine-non-cuda"
VERSION: Final = "0.3.13.post1"
SYSTEM_LIBRARIES: Final = "libibverbs1 librdmacm1 libnuma1"
_INSTALL_TIMEOUT_S: Final = 300.0
_START_TIMEOUT_S: Final = 30.0
_SEGMENT_BYTES: Final = 2 << 30
_OWNER: Final = """
import sys, time
from mooncake.store import MooncakeDistributedStore
host, segment_bytes, master = sys.argv[1], int(sys.argv[2]), sys.argv[3]
store = MooncakeDistributedStore()
code = store.setup(host, "P2PHANDSHAKE", segment_bytes, 16 << 20, "tcp", "", master)
print("setup", code, flush=True)
while code == 0 and sys.stdin.read(1):
    pass
"""


class PeerMissing(HymcacheError):
    """The peer cannot be installed or started on this machine; the text says why."""


@dataclass(frozen=True)
class MooncakePeer:
    """A running peer, as an engine needs to know it."""

    python: Path
    environment: dict[str, str]
    server_pids: tuple[int, ...]

    @property
    def kv_transfer_config(self) -> dict[str, Any]:
        """The `--kv-transfer-config` of an engine that uses it."""
        return {
            "kv_connector": "MooncakeStoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {},
        }


def install_mooncake(cache_dir: Path) -> Path:
    """Returns the Python interpreter of the peer's venv, making the venv where it is missing.

    Raises:
        PeerMissing: it cannot be installed, or its libraries are not on this machine.
    """
    folder = cache_dir / "peers" / f"mooncake-{VERSION}-{sys.implementation.cache_tag}"
    python, done = folder / "bin" / "python", folder / ".installed"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        engine_packages = folder / "lib" / version / "site-packages" / "engine.pth"
        engine_packages.write_text(
            "".join(f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages())
        )
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        _check([*pip, f"{PACKAGE}=={VERSION}"], "cannot be installed")
        done.touch()
    _check(
        [str(python), "-c", "import mooncake.store"],
        f"does not load (Debian packages: {SYSTEM_LIBRARIES})",
    )
    return python


def _check(command: list[str], what: str) -> None:
    try:
        outcome = subprocess.run(
            command, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise PeerMissing(f"Mooncake {what}: no end within {error.timeout:.0f} s") from error
    if outcome.returncode != 0:
        reason = (outcome.stderr.strip().splitlines() or ["no output"])[-1]
        raise PeerMissing(f"Mooncake {what}: {reason}")


@contextmanager
def running_mooncake(cache_dir: Path, log_dir: Path) -> Iterator[MooncakePeer]:
    """Starts master and owner, and ends them.

    Raises:
        PeerMissing: it cannot be installed or started.
    """
    python = install_mooncake(cache_dir)
    binary = _package_dir(python) / "mooncake_master"
    rpc_port, metrics_port, owner_port = free_ports(3)
    master_address = f"127.0.0.1:{rpc_port}"
    environment = {"VLLM_HOST_IP": "127.0.0.1", "MC_TCP_BIND_ADDRESS": "127.0.0.1"}
    master = ChildProcess(
        "mooncake_master",
        [
            str(binary),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={rpc_port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={metrics_port}",
            "--default_kv_lease_ttl=5000",
        ],
        log_dir / "mooncake-master.log",
        environment=environment,
    )
    with master:
        _wait(master, rpc_port)
        owner = ChildProcess(
            "mooncake owner",
            [
                *(str(python), "-c", _OWNER),
                *(f"127.0.0.1:{owner_port}", str(_SEGMENT_BYTES), master_address),
            ],
            log_dir / "mooncake-owner.log",
            environment=environment,
            piped=True,
        )
        with owner:
            _wait_for_setup(owner)
            config = log_dir / "mooncake.json"
            config.write_text(json.dumps(_client_config(master_address)))
            yield MooncakePeer(
                python=python,
                environment={**environment, "MOONCAKE_CONFIG_PATH": str(config)},
                server_pids=(master.pid, owner.pid),
            )


def _client_config(master_address: str) -> dict[str, object]:
    return {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master_address,
        "protocol": "tcp",
        "device_name": "",
        "mode": "standalone-store",
        "global_segment_size": 0,
        "local_buffer_size": "512MB",
    }


def _package_dir(python: Path) -> Path:
    outcome = subprocess.run(
        [str(python), "-c", "import mooncake; print(mooncake.__path__[0])"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return Path(outcome.stdout.strip())


def _wait(child: ChildProcess, port: int) -> None:
    try:
        child.wait_until_connectable("127.0.0.1", port, _START_TIMEOUT_S)
    except ChildFailed as error:
        raise PeerMissing(str(error)) from error


def _wait_for_setup(owner: ChildProcess) -> None:
    try:
        line = owner.wait_for_line("setup ", _START_TIMEOUT_S)
    except ChildFailed as error:
        raise PeerMissing(str(error)) from error
    if line.split()[-1] != "0":
        raise PeerMissing(f"Mooncake's store does not start: {line}; see {owner.log_path}")
