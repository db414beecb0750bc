"""`hymcache dra kubelet-plugin`."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated, Final

import typer

from hymcache.address import Address
from hymcache.dra import names
from hymcache.dra.cluster import connect
from hymcache.dra.kubelet_plugin.claim_source import ClusterClaims
from hymcache.dra.kubelet_plugin.plugin import (
    PLUGINS_FOLDER,
    REGISTRAR_FOLDER,
    KubeletPlugin,
    PluginOptions,
)
from hymcache.dra.service_process import log_to_stderr, say_ready

# As other DRA drivers have them.
_HEALTHCHECK_PORT: Final = 51_515
_METRICS_PORT: Final = 8_080
_ALL_INTERFACES: Final = "0.0.0.0"  # noqa: S104 - the kubelet and Prometheus come from outside


def kubelet_plugin(
    *,
    node_name: Annotated[
        str, typer.Option(envvar="NODE_NAME", help="This node, as the cluster calls it.")
    ],
    driver_name: Annotated[
        str, typer.Option(envvar="DRIVER_NAME", help="The driver, as in ResourceSlices.")
    ] = names.DRIVER_NAME,
    pod_uid: Annotated[
        str,
        typer.Option(envvar="POD_UID", help="Of this pod: lets two serve during an update."),
    ] = "",
    kubeconfig: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", envvar="KUBECONFIG", help="Without it, the cluster it runs in."
        ),
    ] = None,
    cdi_root: Annotated[
        Path, typer.Option(metavar="DIR", envvar="CDI_ROOT", help="Where the host's CDI specs are.")
    ] = Path(names.CDI_ROOT),
    plugins_folder: Annotated[
        Path, typer.Option(metavar="DIR", envvar="KUBELET_PLUGINS_DIRECTORY_PATH")
    ] = Path(PLUGINS_FOLDER),
    registrar_folder: Annotated[
        Path, typer.Option(metavar="DIR", envvar="KUBELET_REGISTRAR_DIRECTORY_PATH")
    ] = Path(REGISTRAR_FOLDER),
    healthcheck_port: Annotated[
        int,
        typer.Option(envvar="HEALTHCHECK_PORT", max=65_535, help="gRPC health; negative: none."),
    ] = _HEALTHCHECK_PORT,
    metrics_port: Annotated[
        int,
        typer.Option(envvar="METRICS_PORT", max=65_535, help="/metrics; negative: none."),
    ] = _METRICS_PORT,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log what happens, not only what is wrong.")
    ] = False,
) -> None:
    """Run the plugin of a node's kubelet: it gives pods the devices of their claims."""
    log_to_stderr(verbose)
    options = PluginOptions(
        node=node_name,
        driver=driver_name,
        pod_uid=pod_uid,
        cdi_root=cdi_root,
        plugins_folder=plugins_folder.absolute(),
        registrar_folder=registrar_folder.absolute(),
        liveness=_address(healthcheck_port),
        http=_address(metrics_port),
    )
    asyncio.run(_run(options, kubeconfig))


async def _run(options: PluginOptions, kubeconfig: Path | None) -> None:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    client = await connect(kubeconfig)
    plugin = KubeletPlugin(options, ClusterClaims(client))
    try:
        await plugin.start()
        say_ready(plugin.endpoints)
        await stopped.wait()
    finally:
        await plugin.stop()
        await client.close()


def _address(port: int) -> Address | None:
    return None if port < 0 else Address(_ALL_INTERFACES, port)
