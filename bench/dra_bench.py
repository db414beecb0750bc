"""How long the Kubernetes driver takes: from allocation to attached, Prepare, a thousand claims.

Everything but the cluster and the hardware is real: controller and kubelet plugin are processes of
their own, as are the fabric manager's simulator with its hosts and the control plane that stands
in for a cluster. What the scheduler would write is written here.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from hymcache.bench.child_process import ChildProcess
from hymcache.bench.fake_kubelet import FakeKubelet
from hymcache.bench.samples import SampleLog, machine_context
from hymcache.dra import cluster, names
from hymcache.dra.cluster import ClusterClient, JsonObject
from hymcache.dra.kubelet_plugin import plugin_pb2
from hymcache.errors import HymcacheError

NODES: Final = ("node-1", "node-2")
NAMESPACE: Final = "default"
LEDGER_NAMESPACE: Final = "hymcache-dra"
BLOCK_MIB: Final = 64
BLADES: Final = 4
WARM_UP_CLAIMS: Final = 3
_START_TIMEOUT_S: Final = 120.0
_ATTACH_TIMEOUT_S: Final = 60.0
_RECONCILE_TIMEOUT_S: Final = 600.0
_WRITERS: Final = 8


@dataclass(frozen=True)
class DraOptions:
    """`claims` one after the other, then `many` at once; raw samples go to `out_dir`."""

    out_dir: Path
    claims: int = 50
    many: int = 1000

    @property
    def samples_path(self) -> Path:
        """The raw samples."""
        return self.out_dir / "samples.jsonl"

    @property
    def steps(self) -> int:
        """For a progress bar."""
        return 4


def run_dra(
    options: DraOptions, report: Callable[[str], None], advance: Callable[[], None]
) -> None:
    """Takes all samples."""
    log = SampleLog(options.samples_path, {**machine_context(), "simulated": "cluster, fabric"})
    with ExitStack() as stack:
        # In memory: the disk under the simulated fabric manager is not what is measured.
        shm = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - a folder of its own
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="hymcache-dra-", dir=shm))
        )
        report("starting control plane, fabric manager, controller and plugin")
        system = _System(options, folder, stack)
        advance()
        asyncio.run(_measure(system, options, log, report, advance))


class _System:
    """The processes, ready."""

    def __init__(self, options: DraOptions, folder: Path, stack: ExitStack) -> None:
        self._processes: list[ChildProcess] = []
        self.kubeconfig = folder / "kubeconfig"
        logs = options.out_dir / "logs"
        python = (sys.executable, "-P", "-m")
        blocks = -(-(options.claims + WARM_UP_CLAIMS + options.many) // BLADES)
        capacity_mib = -(-blocks // 8) * 8 * BLOCK_MIB
        self._start(
            stack,
            logs,
            "cluster",
            [
                *(*python, "hymcache.bench.fake_cluster", "--no-scheduler"),
                *("--kubeconfig", str(self.kubeconfig)),
            ],
            "{",
        )
        hymcache = (*python, "hymcache", "dra")
        simulator = self._start(
            stack,
            logs,
            "fabric",
            [
                *(*hymcache, "simulate", "--listen", "127.0.0.1:0"),
                *("--state", str(folder / "fabric"), "--blades", str(BLADES)),
                *("--capacity", f"{capacity_mib}MiB", "--block", f"{BLOCK_MIB}MiB"),
            ],
        )
        self.controller = self._start(
            stack,
            logs,
            "controller",
            [
                *(*hymcache, "controller", "--namespace", LEDGER_NAMESPACE),
                *("--fabric", _address(simulator, "fabric manager")),
                *("--kubeconfig", str(self.kubeconfig), "--http", "127.0.0.1:0"),
            ],
        )
        self.metrics_url = f"http://{_address(self.controller, 'controller.http')}/metrics"
        # A socket's path has at most 107 bytes.
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="kubelet-", dir="/tmp"))
        self.kubelet = stack.enter_context(FakeKubelet(Path(root)))
        self._start(
            stack,
            logs,
            "plugin",
            [
                *(*hymcache, "kubelet-plugin", "--node-name", NODES[0]),
                *("--kubeconfig", str(self.kubeconfig)),
                *("--cdi-root", str(folder / "fabric" / "hosts" / NODES[0] / "cdi")),
                *("--plugins-folder", str(self.kubelet.plugins_folder)),
                *("--registrar-folder", str(self.kubelet.registry)),
                *("--healthcheck-port", "0", "--metrics-port", "0"),
            ],
        )
        self.kubelet.wait_registered(names.DRIVER_NAME, timeout_s=_START_TIMEOUT_S)

    def _start(
        self,
        stack: ExitStack,
        logs: Path,
        name: str,
        command: list[str],
        line: str = "hymcache: ready",
    ) -> ChildProcess:
        process = stack.enter_context(ChildProcess(name, command, logs / f"{name}.log"))
        process.wait_for_line(line, _START_TIMEOUT_S)
        self._processes.append(process)
        return process

    async def fabric_seconds(self) -> float:
        """What the controller has spent at the fabric manager so far."""
        async with httpx.AsyncClient() as http:
            text = (await http.get(self.metrics_url)).text
        for metric in text.splitlines():
            name, _, value = metric.rpartition(" ")
            if name == "hymcache_dra_fabric_seconds_total":
                return float(value)
        raise HymcacheError(f"{self.metrics_url}: no hymcache_dra_fabric_seconds_total")

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time that each process has used so far, by its name."""
        used = {}
        for process in self._processes:
            fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii")
            user, kernel = fields.rpartition(")")[2].split()[11:13]
            used[process.name] = (int(user) + int(kernel)) / os.sysconf("SC_CLK_TCK")
        return used

    def controller_peak_mib(self) -> float:
        """The controller's peak of resident memory."""
        status = Path(f"/proc/{self.controller.pid}/status").read_text(encoding="ascii")
        kib = next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1]
        return int(kib) / 1024


class _Claims:
    """Makes claims, gives them to pods, and sees when they are attached."""

    def __init__(self, client: ClusterClient, pools: list[tuple[str, str]]) -> None:
        self._client = client
        self._pools = pools
        self._made = 0
        self.attached_at: dict[str, float] = {}
        self._changed = asyncio.Condition()

    async def follow(self, version: str) -> None:
        """Notes when claims are attached, until it is cancelled."""
        while True:
            async for event in self._client.watch(cluster.RESOURCE_CLAIM, version):
                version = event.item["metadata"]["resourceVersion"]
                name = event.item["metadata"].get("name", "")
                if name not in self.attached_at and _is_attached(event.item):
                    self.attached_at[name] = time.monotonic()
                    async with self._changed:
                        self._changed.notify_all()

    async def make(self) -> JsonObject:
        """A claim without an allocation, with the pod that is going to use it."""
        self._made += 1
        name = f"claim-{self._made}"
        exactly = {
            "deviceClassName": names.DEVICE_CLASS,
            "capacity": {"requests": {names.CAPACITY: str(BLOCK_MIB)}},
        }
        spec = {"devices": {"requests": [{"name": "memory", "exactly": exactly}]}}
        claim = await self._create(cluster.RESOURCE_CLAIM, name, spec)
        entry = {"name": "memory", "resourceClaimName": name}
        pod = await self._create(
            cluster.POD, name, {"nodeName": NODES[0], "resourceClaims": [entry]}
        )
        claim["status"] = self._status(pod)
        return claim

    async def allocate(self, claim: JsonObject) -> float:
        """Writes what the scheduler would; when the API server was asked to."""
        body = {key: claim[key] for key in ("apiVersion", "kind", "status")}
        body["metadata"] = {"name": claim["metadata"]["name"], "namespace": NAMESPACE}
        asked_at = time.monotonic()
        await self._client.apply(cluster.RESOURCE_CLAIM, body, "scheduler", part="status")
        return asked_at

    async def wait_attached(self, count: int, timeout_s: float) -> None:
        """Until so many claims are attached."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: len(self.attached_at) >= count)

    async def _create(self, kind: cluster.ResourceKind, name: str, spec: JsonObject) -> JsonObject:
        body = {
            "apiVersion": kind.api_version,
            "kind": kind.kind,
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": spec,
        }
        return await self._client.create(kind, body)

    def _status(self, pod: JsonObject) -> JsonObject:
        pool, device = self._pools[self._made % len(self._pools)]
        result = {
            "request": "memory",
            "driver": names.DRIVER_NAME,
            "pool": pool,
            "device": device,
            "shareID": str(uuid.uuid4()),
            "consumedCapacity": {names.CAPACITY: str(BLOCK_MIB)},
            "bindingConditions": [names.CONDITION_ATTACHED],
            "bindingFailureConditions": [names.CONDITION_ATTACH_FAILED],
        }
        consumer = {
            "resource": "pods",
            "name": pod["metadata"]["name"],
            "uid": pod["metadata"]["uid"],
        }
        return {"allocation": {"devices": {"results": [result]}}, "reservedFor": [consumer]}


async def _measure(
    system: _System,
    options: DraOptions,
    log: SampleLog,
    report: Callable[[str], None],
    advance: Callable[[], None],
) -> None:
    client = await cluster.connect(system.kubeconfig)
    try:
        claims = _Claims(client, await _pools(client))
        version = (await client.list_all(cluster.RESOURCE_CLAIM)).resource_version
        following = asyncio.create_task(claims.follow(version))
        try:
            report(f"{options.claims} claims, one after the other")
            made = await _attach_each(system, claims, options, log)
            advance()
            report("Prepare of each of them")
            await asyncio.to_thread(_prepare_each, system, made, log)
            advance()
            report(f"{options.many} claims at once")
            await _attach_many(system, claims, options, log)
            advance()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
    finally:
        await client.close()


async def _pools(client: ClusterClient) -> list[tuple[str, str]]:
    """Pool and device of each blade, once all are published."""
    async with asyncio.timeout(_START_TIMEOUT_S):
        while True:
            slices = (await client.list_all(cluster.RESOURCE_SLICE)).items
            if len(slices) == BLADES:
                break
            await asyncio.sleep(0.2)
    return [(s["spec"]["pool"]["name"], s["spec"]["devices"][0]["name"]) for s in slices]


async def _attach_each(
    system: _System, claims: _Claims, options: DraOptions, log: SampleLog
) -> list[JsonObject]:
    made = []
    for number in range(WARM_UP_CLAIMS + options.claims):
        claim = await claims.make()
        name = claim["metadata"]["name"]
        fabric_s = await system.fabric_seconds()
        asked_at = await claims.allocate(claim)
        await claims.wait_attached(number + 1, _ATTACH_TIMEOUT_S)
        total_s = claims.attached_at[name] - asked_at
        fabric_s = await system.fabric_seconds() - fabric_s
        if number >= WARM_UP_CLAIMS:
            made.append(claim)
            log.add(
                "attach",
                claim=name,
                total_ms=total_s * 1e3,
                fabric_ms=fabric_s * 1e3,
                own_ms=max(0.0, total_s - fabric_s) * 1e3,
            )
    return made


def _prepare_each(system: _System, made: list[JsonObject], log: SampleLog) -> None:
    for claim in made:
        metadata = claim["metadata"]
        asked = plugin_pb2.Claim(namespace=NAMESPACE, name=metadata["name"], uid=metadata["uid"])
        started = time.monotonic()
        system.kubelet.prepare(names.DRIVER_NAME, [asked])
        log.add("prepare", claim=metadata["name"], ms=(time.monotonic() - started) * 1e3)


async def _attach_many(
    system: _System, claims: _Claims, options: DraOptions, log: SampleLog
) -> None:
    before = len(claims.attached_at)
    made = [await claims.make() for _ in range(options.many)]
    fabric_s, cpu_s = await system.fabric_seconds(), system.cpu_seconds()
    started = time.monotonic()
    waiting = iter(made)

    async def write() -> None:
        for claim in waiting:
            await claims.allocate(claim)

    await asyncio.gather(*(write() for _ in range(_WRITERS)))
    written_s = time.monotonic() - started
    await claims.wait_attached(before + options.many, _RECONCILE_TIMEOUT_S)
    log.add(
        "reconcile",
        claims=options.many,
        seconds=time.monotonic() - started,
        written_s=written_s,
        fabric_s=await system.fabric_seconds() - fabric_s,
        cpu_s={name: used - cpu_s[name] for name, used in system.cpu_seconds().items()},
        controller_peak_mib=system.controller_peak_mib(),
    )


def _is_attached(claim: JsonObject) -> bool:
    for device in (claim.get("status") or {}).get("devices") or ():
        for condition in device.get("conditions") or ():
            if condition["type"] == names.CONDITION_ATTACHED:
                return bool(condition["status"] == "True")
    return False


def _address(process: ChildProcess, name: str) -> str:
    for line in process.log_path.read_text(encoding="utf-8").splitlines():
        key, _, value = line.strip().rpartition(" ")
        if key.strip() == name:
            return value
    raise HymcacheError(f"{process.log_path}: does not say where {name} is")
