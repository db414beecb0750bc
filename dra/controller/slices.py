"""A blade as a ResourceSlice: one pool, one slice, reachable from exactly the cabled hosts.

counting scheduler    one device of the blade's whole capacity, shared by many claims
others (<= 1.35)      several devices of the free capacity, a claim each; claims say their
                      size in annotations, as in arXiv 2609.10790
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hymcache.dra import names
from hymcache.dra.cluster import RESOURCE_SLICE, JsonObject
from hymcache.dra.controller.blades import BladeBook, BladeState, device_name, pool_name, slice_name
from hymcache.dra.controller.settings import ControllerSettings
from hymcache.dra.quantity import parse_quantity

_HOSTNAME: Final = "kubernetes.io/hostname"


@dataclass(frozen=True)
class Features:
    """What the API server keeps of a device. Learned from what it drops."""

    capacity: bool = True
    conditions: bool = True
    taints: bool = True


@dataclass(frozen=True)
class Taint:
    """Why a blade takes no new claims, and whether pods have to leave it."""

    value: str
    evicts: bool = False


def make_slice(
    state: BladeState,
    book: BladeBook,
    settings: ControllerSettings,
    features: Features,
    taint: Taint | None,
) -> JsonObject | None:
    """The slice without its generation; None for a blade that no host can reach."""
    hosts = book.hosts(state)
    if not hosts:
        return None
    key = state.blade.key
    expression = {"key": _HOSTNAME, "operator": "In", "values": list(hosts)}
    devices = (
        _counted_device(state, book, settings)
        if features.capacity
        else _uncounted_devices(state, book, settings)
    )
    for device in devices:
        if features.conditions:
            device["bindingConditions"] = [names.CONDITION_ATTACHED]
            device["bindingFailureConditions"] = [names.CONDITION_ATTACH_FAILED]
        if features.taints and taint is not None:
            effect = "NoExecute" if taint.evicts else "NoSchedule"
            device["taints"] = [{"key": names.TAINT_BLADE, "value": taint.value, "effect": effect}]
    if taint is not None and not features.taints:
        # What cannot be tainted is taken off the shelf.
        devices = []
    return {
        "apiVersion": RESOURCE_SLICE.api_version,
        "kind": RESOURCE_SLICE.kind,
        "metadata": {"name": slice_name(settings.driver, key)},
        "spec": {
            "driver": settings.driver,
            "pool": {"name": pool_name(key), "resourceSliceCount": 1},
            "nodeSelector": {"nodeSelectorTerms": [{"matchExpressions": [expression]}]},
            "devices": devices,
        },
    }


def learn(sent: JsonObject, stored: JsonObject) -> Features:
    """What the server kept of the devices that were sent to it."""
    pairs = zip(sent["spec"]["devices"], stored["spec"].get("devices") or (), strict=True)
    kept = {"capacity": True, "conditions": True, "taints": True}
    fields = {
        "capacity": "allowMultipleAllocations",
        "conditions": "bindingConditions",
        "taints": "taints",
    }
    for before, after in pairs:
        for feature, field in fields.items():
            if field in before and field not in after:
                kept[feature] = False
    return Features(**kept)


def same(wanted: JsonObject, stored: JsonObject) -> bool:
    """Whether a stored slice says what is wanted, whatever its generation."""
    return _comparable(wanted["spec"]) == _comparable(stored["spec"])


def _comparable(spec: JsonObject) -> JsonObject:
    pool = {key: value for key, value in spec["pool"].items() if key != "generation"}
    devices = []
    for device in spec.get("devices") or ():
        taints = [
            {key: value for key, value in taint.items() if key != "timeAdded"}
            for taint in device.get("taints") or ()
        ]
        capacity = {
            name: _with_numbers(value) for name, value in (device.get("capacity") or {}).items()
        }
        devices.append({**device, "taints": taints, "capacity": capacity})
    return {**spec, "pool": pool, "devices": devices}


def _with_numbers(capacity: JsonObject) -> JsonObject:
    """Quantities as numbers: the server writes "512000" as "512k"."""
    numbers: JsonObject = {}
    for key, value in capacity.items():
        if isinstance(value, dict):
            numbers[key] = _with_numbers(value)
        elif isinstance(value, str):
            numbers[key] = parse_quantity(value)
        else:
            numbers[key] = value
    return numbers


def _attributes(state: BladeState) -> JsonObject:
    key = state.blade.key
    return {
        names.ATTRIBUTE_APPLIANCE: {"string": key.appliance_id},
        names.ATTRIBUTE_BLADE: {"string": key.blade_id},
    }


def _counted_device(
    state: BladeState, book: BladeBook, settings: ControllerSettings
) -> list[JsonObject]:
    block_mib = max(1, state.blade.block_mib)
    capacity_mib = book.sellable_mib(state)
    if capacity_mib < block_mib:
        # A policy that nothing satisfies is not valid.
        return []
    valid_range = {"min": str(block_mib), "step": str(block_mib)}
    most_mib = capacity_mib
    if state.refused_mib is not None:
        # Larger regions go to other blades; smaller ones may fit between those that are there.
        most_mib = min(capacity_mib, (state.refused_mib - 1) // block_mib * block_mib)
        if most_mib < block_mib:
            return []
        valid_range["max"] = str(most_mib)
    blocks = -(-settings.default_request_mib // block_mib)
    policy = {"default": str(min(blocks * block_mib, most_mib)), "validRange": valid_range}
    return [
        {
            "name": device_name(state.blade.key),
            "attributes": _attributes(state),
            "allowMultipleAllocations": True,
            "capacity": {names.CAPACITY: {"value": str(capacity_mib), "requestPolicy": policy}},
        }
    ]


def _uncounted_devices(
    state: BladeState, book: BladeBook, settings: ControllerSettings
) -> list[JsonObject]:
    free_mib = book.free_mib(state)
    return [
        {
            "name": f"{device_name(state.blade.key)}-{index}",
            "attributes": _attributes(state),
            "capacity": {names.CAPACITY: {"value": str(free_mib)}},
        }
        for index in range(settings.compat_devices)
    ]
