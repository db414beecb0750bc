"""`hymcache dra host-agent`."""

from __future__ import annotations

import socket
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from hymcache.address import Address
from hymcache.dra.host_agent.backend import DaxBackend
from hymcache.dra.host_agent.dcd_backend import DcdBackend
from hymcache.dra.host_agent.file_backend import FileBackend
from hymcache.dra.host_agent.service import HostAgentOptions, HostAgentService
from hymcache.dra.host_agent.sessions import Credentials
from hymcache.dra.host_agent.sysfs import KernelSysfs
from hymcache.dra.host_agent.sysfs_backend import SysfsBackend
from hymcache.dra.names import CDI_ROOT
from hymcache.dra.service_process import AddressOption, run_services
from hymcache.errors import ConfigError
from hymcache.http_endpoint import TlsFiles

_LISTEN: Final = Address("127.0.0.1", 8443)
_STATE_FOLDER: Final = "/var/lib/hymcache/host-agent"


class BackendName(StrEnum):
    """What devices are made of."""

    SYSFS = "sysfs"
    DCD = "dcd"
    FILE = "file"


def host_agent(
    *,
    credentials: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Folder with the files username and password: who may use the agent.",
        ),
    ],
    listen: Annotated[
        Address, AddressOption("Where it listens.", default="127.0.0.1:8443")
    ] = _LISTEN,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate chain, PEM.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key, PEM.")] = None,
    http: Annotated[Address | None, AddressOption("Where /metrics and /healthz are.")] = None,
    backend: Annotated[
        BackendName,
        typer.Option(
            help="sysfs splits the host's device-dax memory, file simulates it, dcd is "
            "dynamic capacity.",
        ),
    ] = BackendName.SYSFS,
    memory: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --backend file: the memory; simulated hosts with the same share it.",
        ),
    ] = None,
    node_name: Annotated[
        str, typer.Option(envvar="NODE_NAME", help="With --backend file: this host's name in it.")
    ] = "",
    state: Annotated[Path, typer.Option(metavar="DIR", help="What it remembers.")] = Path(
        _STATE_FOLDER
    ),
    cdi_root: Annotated[
        Path, typer.Option(metavar="DIR", envvar="CDI_ROOT", help="Where CDI specs go.")
    ] = Path(CDI_ROOT),
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log what happens, not only what is wrong.")
    ] = False,
) -> None:
    """Run the agent of a host: it makes DAX devices of composed regions."""
    options = HostAgentOptions(
        listen=listen,
        credentials=Credentials.read(credentials),
        state_folder=state,
        cdi_root=cdi_root,
        tls=_tls(tls_cert, tls_key),
        http=http,
    )
    chosen = _backend(backend, memory, node_name or socket.gethostname())
    run_services(HostAgentService(options, chosen), verbose=verbose)


def _tls(certificate: Path | None, key: Path | None) -> TlsFiles | None:
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("--tls-cert and --tls-key go together; name both")
    return TlsFiles(certificate, key)


def _backend(name: BackendName, memory: Path | None, host: str) -> DaxBackend:
    if name is BackendName.FILE:
        if memory is None:
            raise ConfigError("--backend file: needs --memory, the folder that hosts share")
        return FileBackend(memory, host)
    if memory is not None:
        raise ConfigError(f"--memory: is for --backend file, not for {name.value}")
    return DcdBackend(KernelSysfs()) if name is BackendName.DCD else SysfsBackend(KernelSysfs())
