"""Fields of resource.k8s.io/v1 that a server without the feature drops silently."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FeatureGates:
    """The gates that matter to a driver: on in 1.36, off in 1.34 and 1.35."""

    consumable_capacity: bool = True
    binding_conditions: bool = True
    device_taints: bool = True

    @classmethod
    def of_version(cls, minor: int) -> FeatureGates:
        """What Kubernetes 1.`minor` has by default."""
        on = minor >= 36
        return cls(on, on, on)


def drop_disabled(kind: str, item: dict[str, Any], gates: FeatureGates) -> None:
    """Removes what a gate that is off does not let in, from an object that is being written."""
    if kind == "ResourceSlice":
        for device in item.get("spec", {}).get("devices") or ():
            _drop_from_device(device, gates)
    elif kind == "ResourceClaim":
        for request in _exact_requests(item):
            if not gates.consumable_capacity:
                request.pop("capacity", None)
        _drop_from_status(item.get("status") or {}, gates)


def _drop_from_device(device: dict[str, Any], gates: FeatureGates) -> None:
    if not gates.consumable_capacity:
        device.pop("allowMultipleAllocations", None)
        for capacity in (device.get("capacity") or {}).values():
            capacity.pop("requestPolicy", None)
    if not gates.binding_conditions:
        for field in ("bindingConditions", "bindingFailureConditions", "bindsToNode"):
            device.pop(field, None)
    if not gates.device_taints:
        device.pop("taints", None)


def _drop_from_status(status: dict[str, Any], gates: FeatureGates) -> None:
    if gates.consumable_capacity:
        return
    results = (status.get("allocation") or {}).get("devices", {}).get("results") or ()
    for entry in (*results, *(status.get("devices") or ())):
        entry.pop("shareID", None)
        entry.pop("consumedCapacity", None)


def _exact_requests(claim: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for request in claim.get("spec", {}).get("devices", {}).get("requests") or ():
        if "exactly" in request:
            yield request["exactly"]
