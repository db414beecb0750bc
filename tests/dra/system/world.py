"""Everything at once: control plane, fabric manager with its hosts, controllers, as processes."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from hymcache.bench.fake_cluster.namespace_controller import SERVICE_ACCOUNT
from hymcache.dra import cluster, names
from hymcache.dra.cluster import JsonObject, ObjectConflict, ObjectMissing
from hymcache.dra.controller.ledger import LABEL
from hymcache.dra.controller.region_record import RecordState
from tests.dra.kubernetes.cluster_api import ClusterApi, wait_until
from tests.dra.kubernetes.cluster_process import ClusterProcess
from tests.dra.simulator_process import APPLIANCE, SimulatorProcess
from tests.dra.system.controller_process import ControllerProcess

CLUSTER_VARIABLE = "HYMCACHE_TEST_CLUSTER"
NODES = ("node-1", "node-2")
NAMESPACE = "hymcache-test"
BLADE = "blade-0"
BLADE_MIB = 4096
BLOCK_MIB = 128
LEDGER_NAMESPACE = "hymcache-dra"


def real_cluster() -> Path | None:
    """The kubeconfig of a cluster that is there already, if the tests are to run against one."""
    named = os.environ.get(CLUSTER_VARIABLE, "")
    return Path(named).absolute() if named else None


class World:
    """`dialect` is the fabric manager's; `minor` is that of Kubernetes 1.x.

    With $HYMCACHE_TEST_CLUSTER, a kubeconfig, the control plane is that of a real cluster (from
    1.36 on) on which the driver is not installed; its own nodes are cabled to the blade then.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dialect: str = "paper",
        minor: int = 36,
        blades: int = 1,
    ) -> None:
        self.folder = folder
        self.dialect = dialect
        self.minor = minor
        self._controllers: list[ControllerProcess] = []
        self._cluster: ClusterProcess | None = None
        self._stack = ExitStack()
        with ExitStack() as failed:
            failed.push(self._stack)
            real = real_cluster()
            self.kubeconfig = real or self._fake_cluster(minor)
            self.api = self._stack.enter_context(ClusterApi(self.kubeconfig, NAMESPACE))
            self.nodes = self._real_nodes() if real else self._add_nodes()
            self._add_device_class()
            if real:
                self._stack.callback(self._leave_nothing)
            self._add_namespaces()
            hosts = [option for node in self.nodes for option in ("--host", node)]
            self._simulator_options = (
                *("--dialect", dialect, "--blades", str(blades), *hosts),
                *("--capacity", f"{BLADE_MIB}MiB", "--block", f"{BLOCK_MIB}MiB"),
                *("--channels", "4"),
            )
            self.simulator = SimulatorProcess(folder / "fabric", *self._simulator_options)
            self._stack.callback(lambda: self.simulator.__exit__(None, None, None))
            failed.pop_all()

    @property
    def cluster(self) -> ClusterProcess:
        """The fake control plane, for tests that break it."""
        if self._cluster is None:
            pytest.skip("breaks the control plane")
        return self._cluster

    def _fake_cluster(self, minor: int) -> Path:
        process = ClusterProcess(self.folder, "--minor", str(minor), "--retry-s", "0.5")
        self._cluster = self._stack.enter_context(process)
        return self._cluster.kubeconfig

    def _add_nodes(self) -> tuple[str, ...]:
        for node in NODES:
            self.api.add_node(node)
        return NODES

    def _real_nodes(self) -> tuple[str, ...]:
        found = sorted(node["metadata"]["name"] for node in self.api.items(cluster.NODE))
        assert len(found) >= len(NODES), f"{CLUSTER_VARIABLE}: a cluster of two nodes is needed"
        return tuple(found[-len(NODES) :])

    def _add_device_class(self) -> None:
        try:
            self.api.add_device_class()
        except ObjectConflict as error:
            raise AssertionError(
                f"{CLUSTER_VARIABLE}: the driver is installed there, or a run of these tests was "
                f"cut off: delete DeviceClass {names.DEVICE_CLASS}, its driver's ResourceSlices "
                f"and namespaces {NAMESPACE} and {LEDGER_NAMESPACE} if nobody needs them"
            ) from error

    def _add_namespaces(self) -> None:
        for name in (NAMESPACE, LEDGER_NAMESPACE):
            if self.api.find(cluster.NAMESPACE, name) is None:
                self.api.create(cluster.NAMESPACE, {"metadata": {"name": name}})
        wait_until(lambda: self.api.find(SERVICE_ACCOUNT, "default"), "pods may be made")

    def _leave_nothing(self) -> None:
        """Of what tests and driver made in a real cluster, but the namespaces."""
        for pod in self.api.items(cluster.POD, NAMESPACE):
            self.api.delete_item(cluster.POD, pod)
        for claim in self.api.items(cluster.RESOURCE_CLAIM, NAMESPACE):
            self.api.delete_item(cluster.RESOURCE_CLAIM, claim)
            # No controller is left that would do it.
            self._release(claim["metadata"]["name"])
        wait_until(lambda: not self.api.items(cluster.RESOURCE_CLAIM, NAMESPACE), "all claims gone")
        self.lose_ledger()
        for lease in self.api.items(cluster.LEASE, LEDGER_NAMESPACE):
            self.api.delete_item(cluster.LEASE, lease)
        for resource_slice in self.slices():
            self.api.delete_item(cluster.RESOURCE_SLICE, resource_slice)
        self.api.delete(cluster.DEVICE_CLASS, names.DEVICE_CLASS)

    def _release(self, claim: str) -> None:
        with contextlib.suppress(ObjectMissing):
            held = self.api.claim(claim)["metadata"].get("finalizers") or ()
            others = [finalizer for finalizer in held if finalizer != names.FINALIZER]
            patch = {"metadata": {"finalizers": others or None}}
            self.api.patch(cluster.RESOURCE_CLAIM, claim, patch)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop_controllers()
        self._stack.__exit__(kind, error, trace)

    def close(self) -> None:
        """Ends all processes."""
        self.__exit__(None, None, None)

    def start_controller(
        self, *options: str, crash_at: str | None = None, identity: str = "controller-a"
    ) -> ControllerProcess:
        """One replica more; it is stopped at the end if nobody does before."""
        process = ControllerProcess(
            self.kubeconfig,
            self.simulator.url,
            self.folder / f"{identity}.log",
            *("--dialect", self.dialect, *self._agent_options()),
            *options,
            crash_at=crash_at,
            identity=identity,
        )
        self._controllers.append(process)
        return process

    @contextlib.contextmanager
    def fabric_down(self) -> Iterator[None]:
        """The fabric manager, and the agents of its process, are killed before the block.

        They are back after it, with what was on disk.
        """
        address = self.simulator.url.removeprefix("http://")
        self.simulator.kill()
        yield
        options = (*self._simulator_options, "--listen", address)
        self.simulator = SimulatorProcess(self.folder / "fabric", *options)

    def stop_controllers(self) -> None:
        """Ends all that still run."""
        while self._controllers:
            self._controllers.pop().__exit__(None, None, None)

    def _agent_options(self) -> tuple[str, ...]:
        folder = self.folder / "fabric" / "credentials"
        return ("--agents", str(folder), "--agent-scheme", "http")

    def add_claim_and_pod(
        self, size_mib: int | None, claim: str = "kv", pod: str = "engine"
    ) -> None:
        """A claim, and a pod that uses it."""
        self.api.add_claim(claim, size_mib)
        self.api.add_pod(pod, claim)

    def remove_claim_and_pod(
        self, claim: str = "kv", pod: str = "engine", timeout_s: float = 60.0
    ) -> None:
        """Until nothing is left of them, nor of any other."""
        self.api.delete(cluster.POD, pod)
        self.api.delete(cluster.RESOURCE_CLAIM, claim)
        self.wait_gone(claim, timeout_s)
        self.wait_clean(timeout_s)

    # --- looking -----------------------------------------------------------------------------

    def _records(self) -> tuple[JsonObject, ...]:
        selector = f"{LABEL}={names.DRIVER_NAME}"
        return self.api.items(cluster.CONFIG_MAP, LEDGER_NAMESPACE, label_selector=selector)

    def ledger(self) -> list[dict[str, Any]]:
        """All records."""
        return [json.loads(item["data"]["record"]) for item in self._records()]

    def lose_ledger(self) -> None:
        """Deletes all records."""
        for record in self._records():
            self.api.delete_item(cluster.CONFIG_MAP, record)

    def states(self) -> list[str]:
        """Of all records."""
        return sorted(record["state"] for record in self.ledger())

    def regions(self) -> list[str]:
        """Names of all regions on the first blade."""
        return self.simulator.regions(BLADE)

    def allocated_mib(self) -> int:
        """What the fabric manager says is taken of the first blade."""
        answer = self.simulator.http.get(f"/cfm/v1/appliances/{APPLIANCE}/blades/{BLADE}")
        return int(answer.json()["totalMemoryAllocatedMiB"])

    def mapped_hosts(self, claim: str) -> list[str]:
        """Hosts that the claim's status names."""
        status = self.api.device_status(claim) or {}
        return list((status.get("data") or {}).get(names.DATA_MAPPED_HOSTS) or ())

    def slices(self) -> list[dict[str, Any]]:
        """The driver's."""
        found = self.api.items(cluster.RESOURCE_SLICE)
        return [s for s in found if s["spec"]["driver"] == names.DRIVER_NAME]

    def slice_device(self) -> dict[str, Any] | None:
        """The first device of the first slice."""
        slices = self.slices()
        devices = slices[0]["spec"].get("devices") if slices else None
        return devices[0] if devices else None

    def published_mib(self) -> int | None:
        """The capacity that the scheduler sees."""
        device = self.slice_device()
        return int(device["capacity"][names.CAPACITY]["value"]) if device else None

    def cdi_specs(self) -> list[Path]:
        """Of all hosts."""
        return sorted((self.folder / "fabric").glob("hosts/*/cdi/*.json"))

    def is_pristine(self) -> bool:
        """Whether nothing is left of what a test did; faults are taken away."""
        if self._cluster is not None:
            self._cluster.fault()
        self.simulator.clear_faults()
        left = [
            self.api.items(cluster.RESOURCE_CLAIM, NAMESPACE),
            self.api.items(cluster.POD, NAMESPACE),
            self.ledger(),
            self.regions(),
            self.cdi_specs(),
        ]
        return not any(left)

    # --- waiting -----------------------------------------------------------------------------

    def wait_led(self, timeout_s: float = 60.0) -> None:
        """Until a controller acts: what is in the cluster may be of one before."""
        wait_until(lambda: any(c.leads for c in self._controllers), "a leader", timeout_s=timeout_s)

    def wait_published(self, size_mib: int = BLADE_MIB, timeout_s: float = 60.0) -> None:
        """Until the slice offers that much."""
        self.wait_led(timeout_s)
        wait_until(
            lambda: self.published_mib() == size_mib,
            f"a slice of {size_mib} MiB",
            timeout_s=timeout_s,
        )

    def wait_attached(self, claim: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """Until the claim's device is attached; its status."""
        wait_until(lambda: self.api.is_attached(claim), f"{claim} attached", timeout_s=timeout_s)
        status = self.api.device_status(claim)
        assert status is not None
        return status

    def wait_bound(self, pod: str, timeout_s: float = 60.0) -> str:
        """Until the pod has a node; which."""
        node = wait_until(
            lambda: self.api.node_of(pod), f"{pod} bound to a node", timeout_s=timeout_s
        )
        assert node is not None
        return node

    def wait_gone(self, claim: str, timeout_s: float = 60.0) -> None:
        """Until the claim is no more."""
        wait_until(
            lambda: self.api.find(cluster.RESOURCE_CLAIM, claim) is None,
            f"{claim} gone",
            timeout_s=timeout_s,
        )

    def wait_clean(self, timeout_s: float = 60.0) -> None:
        """Until nothing is left: no record, no region, no device, and all capacity on offer."""
        wait_until(lambda: not self.regions(), "no regions", timeout_s=timeout_s)
        wait_until(lambda: not self.cdi_specs(), "no CDI specs", timeout_s=timeout_s)
        # Its records go last.
        wait_until(lambda: not self.ledger(), "an empty ledger", timeout_s=timeout_s)
        self.wait_published(timeout_s=timeout_s)

    def assert_never_sold_twice(self) -> None:
        """Every region has one record, every record a region of its own, and all fit the blade."""
        # The name of one that is free, but whose record is not gone yet, may be in use again.
        free = RecordState.FREED.value
        records = [r for r in self.ledger() if r["memory_id"] is not None and r["state"] != free]
        names_of = [(tuple(record["blade"]), record["memory_id"]) for record in records]
        assert len(set(names_of)) == len(names_of), records
        allocations = [record["allocation_id"] for record in records]
        assert len(set(allocations)) == len(allocations), records
        assert self.allocated_mib() <= BLADE_MIB
