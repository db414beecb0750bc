"""Runs the control plane until SIGTERM: python -m hymcache.bench.fake_cluster --kubeconfig FILE.

Prints one JSON line when it serves: {"server": URL, "control": URL}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from pathlib import Path

from aiohttp import web

from hymcache.bench.fake_cluster.control_app import make_control_app
from hymcache.bench.fake_cluster.faults import Faults
from hymcache.bench.fake_cluster.feature_gates import FeatureGates
from hymcache.bench.fake_cluster.http_app import ApiServer
from hymcache.bench.fake_cluster.kubeconfig import write_kubeconfig
from hymcache.bench.fake_cluster.listener import OutageListener
from hymcache.bench.fake_cluster.namespace_controller import NamespaceController
from hymcache.bench.fake_cluster.object_store import ObjectStore
from hymcache.bench.fake_cluster.scheduler import Scheduler, SchedulerOptions


async def _serve(options: argparse.Namespace) -> None:
    store = ObjectStore(FeatureGates.of_version(options.minor))
    NamespaceController(store)
    for namespace in ("kube-system", "default"):
        store.create(
            "Namespace",
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}},
        )
    faults = Faults()
    api = ApiServer(store, faults)
    back_port = await _listen(api.make_app())
    front = OutageListener(back_port)
    await front.start()
    control_port = await _listen(make_control_app(api, faults, front))
    server = f"http://127.0.0.1:{front.port}"
    write_kubeconfig(options.kubeconfig, server)
    scheduler = Scheduler(store, SchedulerOptions(options.binding_timeout_s, options.retry_s))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    ready = {"server": server, "control": f"http://127.0.0.1:{control_port}"}
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
    waits: list[asyncio.Task[object]] = [asyncio.create_task(stop.wait())]
    if options.scheduler:
        waits.append(asyncio.create_task(scheduler.run()))
    done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    for task in done:
        task.result()


async def _listen(app: web.Application) -> int:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    port: int = runner.addresses[0][1]
    return port


def main() -> None:
    """Parses the command line and serves."""
    parser = argparse.ArgumentParser(prog="hymcache.bench.fake_cluster")
    parser.add_argument("--kubeconfig", type=Path, required=True, help="file to write")
    parser.add_argument("--minor", type=int, default=36, help="Kubernetes 1.MINOR")
    parser.add_argument("--binding-timeout-s", type=float, default=600.0)
    parser.add_argument("--retry-s", type=float, default=5.0)
    parser.add_argument("--no-scheduler", dest="scheduler", action="store_false")
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
