"""The scheduler, and the controllers that give claims up, as far as DRA drivers meet them.

    pod, unbound ──▶ claims allocated, reserved; node nominated ──▶ conditions true ──▶ bound
         ▲                                   │ a failure condition, or the time is up
         └───────────── deallocated ◀────────┘

When a pod ends, its claims lose it from reservedFor; one without any loses its allocation and
status.devices at once, whatever finalizers a driver has set.
"""

from __future__ import annotations

import asyncio
import copy
import time
from dataclasses import dataclass
from typing import Final

from hymcache.bench.fake_cluster.device_allocator import DeviceAllocator, results_of
from hymcache.bench.fake_cluster.object_store import Change, Item, Name, ObjectStore
from hymcache.bench.fake_cluster.status_error import StatusError

DELETE_PROTECTION: Final = "resource.kubernetes.io/delete-protection"
_ROUNDS_PER_PASS_MAX: Final = 1_000_000


@dataclass(frozen=True)
class SchedulerOptions:
    """`retry_s`: before an unschedulable pod is tried again without an event (with: at once)."""

    binding_timeout_s: float = 600.0
    retry_s: float = 5.0


class Scheduler:
    """Runs as a task beside the API server; writes through the same store."""

    def __init__(self, store: ObjectStore, options: SchedulerOptions) -> None:
        self._store = store
        self._options = options
        self._allocator = DeviceAllocator(store)
        self._changed = asyncio.Event()
        # Pods that wait for binding conditions: until when.
        self._waiting: dict[Name, float] = {}
        self._not_before: dict[Name, float] = {}
        store.listen(self._notice)

    def _notice(self, change: Change) -> None:
        if change.kind in ("Pod", "ResourceClaim", "ResourceSlice", "Node", "DeviceClass"):
            self._changed.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._options.retry_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            self._release_ended()
            self._evict()
            for name in [_name_of(pod) for pod in self._store.items("Pod")]:
                self._try_pod(name)
                # Requests are served between pods, as beside a real scheduler.
                await asyncio.sleep(0)

    # --- pods --------------------------------------------------------------------------------

    def _try_pod(self, name: Name) -> None:
        pod = self._store.find("Pod", name)
        if pod is None or pod["spec"].get("nodeName") or _ended(pod):
            self._waiting.pop(name, None)
            return
        now = time.monotonic()
        if now < self._not_before.get(name, 0.0):
            return
        try:
            claims = [self._store.get("ResourceClaim", key) for key in claims_of(pod)]
        except StatusError:
            return
        if any("deletionTimestamp" in claim["metadata"] for claim in claims):
            return
        if name in self._waiting:
            self._try_to_bind(pod, claims, now)
        else:
            self._try_to_place(pod, claims, now)

    def _try_to_place(self, pod: Item, claims: list[Item], now: float) -> None:
        for node in self._store.items("Node"):
            if not _fits_node(pod, node):
                continue
            allocations = self._allocations(claims, node)
            if allocations is None:
                continue
            name = _name_of(pod)
            node_name = node["metadata"]["name"]
            self._store.merge("Pod", name, {"status": {"nominatedNodeName": node_name}}, "status")
            for claim, allocation in zip(claims, allocations, strict=True):
                self._reserve(claim, allocation, pod)
            self._waiting[name] = now + self._options.binding_timeout_s
            fresh = [self._store.get("ResourceClaim", _name_of(claim)) for claim in claims]
            self._try_to_bind(self._store.get("Pod", name), fresh, now)
            return

    def _allocations(self, claims: list[Item], node: Item) -> list[Item | None] | None:
        """One for each claim, None for one that has it; None where the node will not do."""
        allocations: list[Item | None] = []
        for claim in claims:
            held = claim["status"].get("allocation")
            if held:
                if not _reaches(held, node) or len(claim["status"].get("reservedFor") or ()) >= 256:
                    return None
                allocations.append(None)
                continue
            allocation = self._allocator.allocate(claim, node)
            if allocation is None:
                return None
            allocations.append(allocation)
        return allocations

    def _reserve(self, claim: Item, allocation: Item | None, pod: Item) -> None:
        name = _name_of(claim)
        if allocation is not None:
            finalizers = claim["metadata"].get("finalizers") or []
            if DELETE_PROTECTION not in finalizers:
                patch = {"metadata": {"finalizers": [*finalizers, DELETE_PROTECTION]}}
                self._store.merge("ResourceClaim", name, patch)
        status = copy.deepcopy(claim["status"])
        if allocation is not None:
            status["allocation"] = allocation
            status.pop("devices", None)
        consumer = {
            "resource": "pods",
            "name": pod["metadata"]["name"],
            "uid": pod["metadata"]["uid"],
        }
        reserved = status.setdefault("reservedFor", [])
        if consumer not in reserved:
            reserved.append(consumer)
        self._store.merge("ResourceClaim", name, {"status": status}, "status")

    def _try_to_bind(self, pod: Item, claims: list[Item], now: float) -> None:
        name = _name_of(pod)
        failed = [claim for claim in claims if _condition(claim, "bindingFailureConditions", any)]
        timed_out = now > self._waiting[name]
        if failed or timed_out or any(not results_of(claim) for claim in claims):
            del self._waiting[name]
            self._not_before[name] = now + min(1.0, self._options.retry_s)
            for claim in failed or claims:
                self._unreserve(claim, pod, deallocate=True)
            patch = {"status": {"nominatedNodeName": None}}
            self._store.merge("Pod", name, patch, "status")
            return
        if not all(_condition(claim, "bindingConditions", all) for claim in claims):
            return
        del self._waiting[name]
        node_name = pod["status"]["nominatedNodeName"]
        self._store.merge("Pod", name, {"spec": {"nodeName": node_name}})

    # --- claims ------------------------------------------------------------------------------

    def _release_ended(self) -> None:
        for claim in list(self._store.items("ResourceClaim")):
            reserved = claim["status"].get("reservedFor") or ()
            namespace = claim["metadata"].get("namespace", "")
            gone = [
                r
                for r in reserved
                if _gone(self._store.find("Pod", (namespace, r["name"])), r["uid"])
            ]
            if gone or (results_of(claim) and not reserved):
                keep = [r for r in reserved if r not in gone]
                self._give_up(claim, keep)
            elif not results_of(claim) and DELETE_PROTECTION in (
                claim["metadata"].get("finalizers") or ()
            ):
                self._unprotect(_name_of(claim))

    def _unreserve(self, claim: Item, pod: Item, *, deallocate: bool) -> None:
        uid = pod["metadata"]["uid"]
        claim = self._store.get("ResourceClaim", _name_of(claim))
        keep = [r for r in claim["status"].get("reservedFor") or () if r["uid"] != uid]
        if keep or deallocate:
            self._give_up(claim, keep)

    def _give_up(self, claim: Item, keep: list[Item]) -> None:
        name = _name_of(claim)
        if keep:
            self._store.merge("ResourceClaim", name, {"status": {"reservedFor": keep}}, "status")
            return
        cleared = {"status": {"reservedFor": None, "allocation": None, "devices": None}}
        self._store.merge("ResourceClaim", name, cleared, "status")
        self._unprotect(name)

    def _unprotect(self, name: Name) -> None:
        claim = self._store.find("ResourceClaim", name)
        if claim is None:
            return
        finalizers = [
            f for f in claim["metadata"].get("finalizers") or () if f != DELETE_PROTECTION
        ]
        patch = {"metadata": {"finalizers": finalizers or None}}
        self._store.merge("ResourceClaim", name, patch)

    def _evict(self) -> None:
        for claim in list(self._store.items("ResourceClaim")):
            if not self._allocator.tainted(claim, "NoExecute"):
                continue
            namespace = claim["metadata"].get("namespace", "")
            for consumer in claim["status"].get("reservedFor") or ():
                pod = self._store.find("Pod", (namespace, consumer["name"]))
                if pod is not None and pod["spec"].get("nodeName"):
                    self._store.delete("Pod", (namespace, consumer["name"]))
        self._changed_by_eviction()

    def _changed_by_eviction(self) -> None:
        # What was evicted is released in the next round.
        if any(_gone_consumers(self._store)):
            self._changed.set()


def claims_of(pod: Item) -> list[Name]:
    """The claims that a pod names."""
    namespace = pod["metadata"].get("namespace", "")
    return [
        (namespace, entry["resourceClaimName"]) for entry in pod["spec"].get("resourceClaims") or ()
    ]


def _gone_consumers(store: ObjectStore) -> list[str]:
    return [
        consumer["uid"]
        for claim in store.items("ResourceClaim")
        for consumer in claim["status"].get("reservedFor") or ()
        if _gone(
            store.find("Pod", (claim["metadata"].get("namespace", ""), consumer["name"])),
            consumer["uid"],
        )
    ]


def _name_of(item: Item) -> Name:
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


def _ended(pod: Item) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def _gone(pod: Item | None, uid: str) -> bool:
    return pod is None or pod["metadata"]["uid"] != uid or _ended(pod)


def _fits_node(pod: Item, node: Item) -> bool:
    labels = node["metadata"].get("labels") or {}
    wanted = pod["spec"].get("nodeSelector") or {}
    if node["spec"].get("unschedulable"):
        return False
    return all(labels.get(key) == value for key, value in wanted.items())


def _reaches(allocation: Item, node: Item) -> bool:
    from hymcache.bench.fake_cluster.selectors import matches_node

    return matches_node(node, allocation.get("nodeSelector"))


def _condition(claim: Item, field: str, quantifier: object) -> bool:
    """Whether all (or any) of the conditions that the allocation names are true."""
    devices = {
        (d["driver"], d["pool"], d["device"], d.get("shareID", "")): d
        for d in claim["status"].get("devices") or ()
    }
    found = []
    for result in results_of(claim):
        key = (result["driver"], result["pool"], result["device"], result.get("shareID", ""))
        true = {
            c["type"] for c in devices.get(key, {}).get("conditions") or () if c["status"] == "True"
        }
        found += [name in true for name in result.get(field) or ()]
    return all(found) if quantifier is all else any(found)
