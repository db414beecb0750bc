"""A node of the cluster: kubelet, plugin, host agent; and claims that a controller attaches to it.

What the scheduler and the controller would write on a claim is written here.
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

from hymcache.bench.fake_kubelet import FakeKubelet
from hymcache.dra import cluster, names
from hymcache.dra.host_agent.allocations import HostAllocations, HostState
from hymcache.dra.host_agent.file_backend import DEFAULT_RANGE, FileBackend
from hymcache.dra.kubelet_plugin import plugin_pb2
from hymcache.dra.state_file import StateFile
from tests.dra.kubelet.plugin_process import DRIVER, NODE, PluginProcess
from tests.dra.kubernetes.cluster_api import ClusterApi
from tests.dra.kubernetes.cluster_process import ClusterProcess

MIB = 1 << 20
POOL, DEVICE = "appliance-1", "blade-0"


class Node:
    """The kubelet runs; plugins are started by the tests."""

    def __init__(self, folder: Path, cdi_root: Path | None = None) -> None:
        self._stack = ExitStack()
        self.cdi_root = cdi_root or folder / "cdi"
        with ExitStack() as failed:
            failed.push(self._stack)
            self.cluster = self._stack.enter_context(ClusterProcess(folder, "--no-scheduler"))
            self.api = self._stack.enter_context(ClusterApi(self.cluster.kubeconfig))
            # A socket's path has at most 107 bytes; those of pytest's folders are longer.
            root = self._stack.enter_context(TemporaryDirectory(prefix="kubelet-"))
            self.kubelet = self._stack.enter_context(FakeKubelet(Path(root), retry_s=0.5))
            failed.pop_all()
        backend = FileBackend(folder / "memory", NODE)
        state = StateFile(folder / "agent" / "allocations.json", HostState)
        self.agent = HostAllocations(backend, state, self.cdi_root)
        self._next_start = DEFAULT_RANGE.start

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def add_plugin(self, pod_uid: str = "") -> PluginProcess:
        """One that is not started yet; it is killed in the end."""
        process = PluginProcess(self.kubelet, self.cluster.kubeconfig, self.cdi_root, pod_uid)
        self._stack.callback(process.kill)
        return process

    def materialize(self, size_mib: int = 2) -> str:
        """A region of this host, made by its agent; the allocation id."""
        allocation_id = str(uuid.uuid4())
        start, self._next_start = self._next_start, self._next_start + size_mib * MIB
        asyncio.run(self.agent.materialize(allocation_id, start, size_mib * MIB))
        return allocation_id

    def unmaterialize(self, allocation_id: str) -> None:
        assert asyncio.run(self.agent.unmaterialize(allocation_id, fence=False, wait_s=0)) == ()

    # --- what the control plane writes -----------------------------------------------------------

    def add_claim(self, name: str, **parameters: Any) -> plugin_pb2.Claim:
        """A claim that the scheduler has allocated; not attached yet."""
        claim = self.api.add_claim(name, 2, parameters=parameters or None)
        self._write_status(name, claim["metadata"]["uid"], None)
        return plugin_pb2.Claim(
            namespace=self.api.namespace, name=name, uid=claim["metadata"]["uid"]
        )

    def attach(
        self,
        claim: plugin_pb2.Claim,
        allocation_id: str,
        hosts: tuple[str, ...] = (NODE,),
        *,
        failure: str = "",
    ) -> None:
        """What the controller says of the claim's device."""
        entry = {
            **self._key(claim.uid),
            "conditions": [
                _condition(names.CONDITION_ATTACHED, not failure, failure or "attached"),
                _condition(names.CONDITION_ATTACH_FAILED, bool(failure), failure or "attached"),
            ],
            "data": {
                names.DATA_ALLOCATION_ID: allocation_id,
                names.DATA_CDI_DEVICES: [names.cdi_device_name(allocation_id)],
                names.DATA_MAPPED_HOSTS: list(hosts),
            },
        }
        self._write_status(claim.name, claim.uid, entry)

    def add_attached(self, name: str) -> tuple[plugin_pb2.Claim, str]:
        """A claim with a region on this node, and its allocation id."""
        claim, allocation_id = self.add_claim(name), self.materialize()
        self.attach(claim, allocation_id)
        return claim, allocation_id

    def share_id(self, uid: str) -> str:
        """The share of the blade that the claim with this UID has."""
        return str(uuid.uuid5(uuid.NAMESPACE_OID, uid))

    def _key(self, uid: str) -> dict[str, Any]:
        key = {"driver": DRIVER, "pool": POOL, "device": DEVICE}
        return {**key, "shareID": self.share_id(uid)}

    def _write_status(self, name: str, uid: str, entry: dict[str, Any] | None) -> None:
        spec = self.api.claim(name)["spec"]["devices"]
        config = [
            {**given, "source": "FromClaim", "requests": []} for given in spec.get("config") or ()
        ]
        result = {
            **self._key(uid),
            "request": "memory",
            "consumedCapacity": {names.CAPACITY: "2"},
            "bindingConditions": [names.CONDITION_ATTACHED],
            "bindingFailureConditions": [names.CONDITION_ATTACH_FAILED],
        }
        status: dict[str, Any] = {
            "allocation": {"devices": {"results": [result], "config": config}},
            "reservedFor": [{"resource": "pods", "name": "pod", "uid": "pod-uid"}],
        }
        if entry is not None:
            status["devices"] = [entry]
        body = {
            "apiVersion": cluster.RESOURCE_CLAIM.api_version,
            "kind": cluster.RESOURCE_CLAIM.kind,
            "metadata": {"name": name, "namespace": self.api.namespace},
            "status": status,
        }
        self.api.call(
            self.api.client.apply(cluster.RESOURCE_CLAIM, body, "control-plane", part="status")
        )


def _condition(kind: str, true: bool, message: str) -> dict[str, str]:
    return {
        "type": kind,
        "status": str(true),
        "reason": "Test",
        "message": message,
        "lastTransitionTime": "2026-11-30T08:00:00Z",
    }
