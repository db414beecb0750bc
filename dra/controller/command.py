"""`hymcache dra controller`."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from hymcache.address import Address
from hymcache.dra import names
from hymcache.dra.controller.service import ControllerOptions, serve_controller
from hymcache.dra.controller.settings import ControllerSettings, LeaseTimes
from hymcache.dra.fabric.connection import FabricDialect, FabricSettings
from hymcache.dra.fabric.host_devices import HostAgentSettings
from hymcache.dra.fabric.transport import FabricTimeouts
from hymcache.dra.host_agent.sessions import Credentials
from hymcache.dra.service_process import AddressOption, log_to_stderr
from hymcache.errors import ConfigError
from hymcache.quantity import parse_duration_s

_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


# How much longer than it is waited for a fabric manager may take to make a region.
_LATE_FACTOR: Final = 1.5


class AgentScheme(StrEnum):
    """Whether agents use TLS."""

    HTTPS = "https"
    HTTP = "http"


def controller(
    *,
    fabric: Annotated[
        str, typer.Option("--fabric", metavar="URL", help="The fabric manager (CFM service).")
    ],
    dialect: Annotated[
        FabricDialect, typer.Option(help="paper: one call composes and attaches; public: in steps.")
    ] = FabricDialect.PAPER,
    fabric_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its CA, PEM; else the system's.")
    ] = None,
    agents: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Credentials of the hosts' agents: files username and password."
        ),
    ] = None,
    agent_url: Annotated[
        str, typer.Option(metavar="URL", help="E.g. https://{host}:8443; else the fabric's word.")
    ] = "",
    agent_scheme: Annotated[
        AgentScheme, typer.Option(help="How agents speak that the fabric manager names.")
    ] = AgentScheme.HTTPS,
    agent_ca: Annotated[Path | None, typer.Option(metavar="FILE", help="Their CA, PEM.")] = None,
    driver_name: Annotated[
        str, typer.Option(envvar="DRIVER_NAME", help="The driver's name in the cluster.")
    ] = names.DRIVER_NAME,
    namespace: Annotated[
        str, typer.Option(envvar="NAMESPACE", help="Where the ledger and the lease are kept.")
    ] = "",
    identity: Annotated[
        str, typer.Option(envvar="POD_NAME", help="This process among several.")
    ] = "",
    cluster_name: Annotated[
        str,
        typer.Option(help="Marks this cluster's regions; else the UID of its kube-system."),
    ] = "",
    kubeconfig: Annotated[
        Path | None,
        typer.Option(metavar="FILE", envvar="KUBECONFIG", help="Else the pod's service account."),
    ] = None,
    http: Annotated[
        Address | None, AddressOption("Where /metrics and /healthz are served.")
    ] = None,
    fabric_period: Annotated[
        str, typer.Option(metavar="TIME", help="How often blades are looked at; at least 10s.")
    ] = "30s",
    attach_deadline: Annotated[
        str, typer.Option(metavar="TIME", help="How long a host's agent may be away.")
    ] = "30s",
    compose_timeout: Annotated[
        str, typer.Option(metavar="TIME", help="How long a compose or a free may take.")
    ] = "90s",
    orphan_grace: Annotated[
        str, typer.Option(metavar="TIME", help="How long a region of nobody is left alone.")
    ] = "60s",
    quarantine: Annotated[
        str, typer.Option(metavar="TIME", help="How long a host that failed gets no new pods.")
    ] = "60s",
    fence_after: Annotated[
        str, typer.Option(metavar="TIME", help="End who holds memory to be freed; else never.")
    ] = "",
    give_up_after: Annotated[
        str, typer.Option(metavar="TIME", help="Let claims go that cannot be freed; else never.")
    ] = "",
    exclusive: Annotated[
        bool, typer.Option("--exclusive", help="All regions on the blades are this driver's.")
    ] = False,
    default_qos: Annotated[
        int | None,
        typer.Option(help="Channels of a region: 1, 2, 4, 8; else what its size allows."),
    ] = None,
    default_request_mib: Annotated[
        int, typer.Option(min=1, help="Size of a claim that does not say one.")
    ] = 1024,
    lease_duration: Annotated[
        str, typer.Option(metavar="TIME", help="How soon another replica takes over.")
    ] = "15s",
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log what happens, not only what is wrong.")
    ] = False,
) -> None:
    """Run the controller: one replica of it leads, the others stand by."""
    lease_s = _duration_s("--lease-duration", lease_duration)
    compose_s = _duration_s("--compose-timeout", compose_timeout)
    settings = ControllerSettings(
        namespace=namespace or _own_namespace(),
        identity=identity or f"{socket.gethostname()}-{os.getpid()}",
        driver=driver_name,
        cluster=cluster_name,
        fabric_period_s=_duration_s("--fabric-period", fabric_period),
        attach_deadline_s=_duration_s("--attach-deadline", attach_deadline),
        late_compose_s=compose_s * _LATE_FACTOR,
        orphan_grace_s=_duration_s("--orphan-grace", orphan_grace),
        quarantine_s=_duration_s("--quarantine", quarantine),
        fence_after_s=_duration_s("--fence-after", fence_after) if fence_after else None,
        give_up_after_s=_duration_s("--give-up-after", give_up_after) if give_up_after else None,
        exclusive=exclusive,
        default_qos=default_qos,
        default_request_mib=default_request_mib,
        lease=LeaseTimes(
            duration_s=lease_s, renew_deadline_s=lease_s * 2 / 3, retry_s=lease_s * 2 / 15
        ),
    )
    fabric_settings = FabricSettings(
        url=fabric,
        dialect=dialect,
        ca_file=fabric_ca,
        agents=_agents(agents, agent_url, agent_scheme, agent_ca),
        timeouts=FabricTimeouts(compose_s=compose_s),
    )
    log_to_stderr(verbose)
    options = ControllerOptions(settings, fabric_settings, kubeconfig, http)
    asyncio.run(_until_signal(options))


async def _until_signal(options: ControllerOptions) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve_controller(options, stop)


def _agents(
    folder: Path | None, url: str, scheme: AgentScheme, ca_file: Path | None
) -> HostAgentSettings | None:
    if folder is None:
        if url or ca_file is not None:
            raise ConfigError("--agent-url and --agent-ca go with --agents; name that folder too")
        return None
    credentials = Credentials.read(folder)
    return HostAgentSettings(
        user_name=credentials.user_name,
        password=credentials.password,
        url=url or None,
        scheme=scheme.value,
        ca_file=ca_file,
    )


def _own_namespace() -> str:
    try:
        return _NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError("--namespace: not in a pod; name the driver's namespace") from error


def _duration_s(option: str, text: str) -> float:
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from error
