"""On which nodes the pods of claims are, or are about to be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from hymcache.dra.cluster import JsonObject
from hymcache.dra.fabric import HostId

_ENDED: Final = ("Succeeded", "Failed")


class Consumers:
    """Nodes of pods by pod UID; fed by the pod informer."""

    def __init__(self) -> None:
        self._nodes: dict[str, HostId] = {}

    def note(self, before: JsonObject | None, after: JsonObject | None) -> bool:
        """Takes a change of a pod in; whether it changes the pod's node."""
        item = after or before
        if item is None:
            return False
        uid = item["metadata"]["uid"]
        node = after["node"] if after else ""
        if self._nodes.get(uid, "") == node:
            return False
        if node:
            self._nodes[uid] = HostId(node)
        else:
            self._nodes.pop(uid, None)
        return True

    def hosts_of(self, pod_uids: Iterable[str]) -> tuple[tuple[HostId, ...], bool]:
        """The nodes of these pods, sorted, and whether all pods have one."""
        uids = tuple(pod_uids)
        found = [self._nodes[uid] for uid in uids if uid in self._nodes]
        return tuple(sorted(set(found))), len(found) == len(uids)


def trim_pod(item: JsonObject) -> JsonObject | None:
    """What of a pod the controller keeps; None for one without claims, or one that has ended.

    The scheduler nominates the node before it waits for binding conditions.
    """
    spec, status = item.get("spec") or {}, item.get("status") or {}
    extended = status.get("extendedResourceClaimStatus") or {}
    if not spec.get("resourceClaims") and not extended:
        return None
    if status.get("phase") in _ENDED:
        return None
    metadata = item["metadata"]
    return {
        "metadata": {key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion")},
        "node": spec.get("nodeName") or status.get("nominatedNodeName") or "",
        "claims": claim_names(item),
    }


def claim_names(pod: JsonObject) -> tuple[str, ...]:
    """Names of the claims of a pod, in its namespace."""
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    named = [
        entry["resourceClaimName"]
        for entry in spec.get("resourceClaims") or ()
        if entry.get("resourceClaimName")
    ]
    made = [
        entry["resourceClaimName"]
        for entry in status.get("resourceClaimStatuses") or ()
        if entry.get("resourceClaimName")
    ]
    extended = (status.get("extendedResourceClaimStatus") or {}).get("resourceClaimName")
    return tuple(sorted({*named, *made, *([extended] if extended else ())}))
