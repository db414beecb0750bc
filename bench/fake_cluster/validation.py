"""The rules of the API server that a driver can break."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from hymcache.bench.fake_cluster.status_error import StatusError
from hymcache.dra.quantity import parse_quantity

Item = dict[str, Any]

# Limits of resource.k8s.io/v1.
_CONDITIONS_MAX: Final = 8
_DATA_BYTES_MAX: Final = 10 * 1024
_DEVICES_MAX: Final = 128
_RESERVED_MAX: Final = 256
_QUALIFIED_NAME: Final = re.compile(
    r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
)
_DNS_LABEL: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_C_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_POOL_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?(/[a-z0-9]([a-z0-9.-]*[a-z0-9])?)*")
_EFFECTS: Final = ("NoSchedule", "NoExecute", "None")


def validate(kind: str, before: Item | None, after: Item) -> None:
    """Raises StatusError 422 for what the API server would not take."""
    name = after["metadata"].get("name", "")
    if len(name) > 253 or not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name):
        raise _invalid(kind, name, "metadata.name: not a DNS subdomain")
    for finalizer in after["metadata"].get("finalizers") or ():
        if not _QUALIFIED_NAME.fullmatch(finalizer):
            raise _invalid(kind, name, f"metadata.finalizers: {finalizer}: not a qualified name")
    size = sum(len(k) + len(v) for k, v in (after["metadata"].get("annotations") or {}).items())
    if size > 256 * 1024:
        raise _invalid(kind, name, "metadata.annotations: larger than 256 KiB")
    if kind == "ResourceClaim":
        _validate_claim(name, before, after)
    elif kind == "ResourceSlice":
        _validate_slice(name, before, after)
    elif kind == "ConfigMap" and len(json.dumps(after.get("data") or {})) > 1 << 20:
        raise _invalid(kind, name, "data: larger than 1 MiB")


def _validate_claim(name: str, before: Item | None, after: Item) -> None:
    kind = "ResourceClaim"
    if before is not None and before.get("spec") != after.get("spec"):
        raise _invalid(kind, name, "spec: field is immutable")
    if before is not None and "deletionTimestamp" in before["metadata"]:
        added = set(after["metadata"].get("finalizers") or ()) - set(
            before["metadata"].get("finalizers") or ()
        )
        if added:
            raise _invalid(kind, name, f"metadata.finalizers: no new ones at deletion: {added}")
    status = after.get("status") or {}
    results = (status.get("allocation") or {}).get("devices", {}).get("results") or ()
    allocated = {_device_key(result) for result in results}
    if len(status.get("reservedFor") or ()) > _RESERVED_MAX:
        raise _invalid(kind, name, f"status.reservedFor: more than {_RESERVED_MAX}")
    for device in status.get("devices") or ():
        if _device_key(device) not in allocated:
            raise _invalid(kind, name, "status.devices: must be an allocated device in the claim")
        conditions = device.get("conditions") or ()
        if len(conditions) > _CONDITIONS_MAX:
            raise _invalid(kind, name, f"status.devices.conditions: more than {_CONDITIONS_MAX}")
        for condition in conditions:
            _validate_condition(name, condition)
        if len(json.dumps(device.get("data") or {})) > _DATA_BYTES_MAX:
            raise _invalid(kind, name, "status.devices.data: larger than 10 KiB")


def _validate_condition(name: str, condition: Item) -> None:
    kind = "ResourceClaim"
    missing = {"type", "status", "lastTransitionTime", "reason", "message"} - condition.keys()
    if missing:
        raise _invalid(kind, name, f"status.devices.conditions: {sorted(missing)} missing")
    if not _QUALIFIED_NAME.fullmatch(condition["type"]):
        raise _invalid(kind, name, f"condition {condition['type']}: not a qualified name")
    if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", condition["reason"]):
        raise _invalid(kind, name, f"condition reason {condition['reason']}: not CamelCase")
    if len(condition["message"]) > 32_768 or condition["status"] not in (
        "True",
        "False",
        "Unknown",
    ):
        raise _invalid(kind, name, f"condition {condition['type']}: bad status or message")


def _validate_slice(name: str, before: Item | None, after: Item) -> None:
    kind = "ResourceSlice"
    spec = after["spec"]
    if before is not None:
        for field in ("driver", "nodeName"):
            if before["spec"].get(field) != spec.get(field):
                raise _invalid(kind, name, f"spec.{field}: field is immutable")
        if before["spec"]["pool"]["name"] != spec["pool"]["name"]:
            raise _invalid(kind, name, "spec.pool.name: field is immutable")
    places = [spec.get("nodeName"), spec.get("nodeSelector"), spec.get("allNodes")]
    if sum(bool(place) for place in places) != 1:
        raise _invalid(kind, name, "spec: exactly one of nodeName, nodeSelector, allNodes")
    if len((spec.get("nodeSelector") or {}).get("nodeSelectorTerms", [0])) != 1:
        raise _invalid(kind, name, "spec.nodeSelector: must have exactly one term")
    if not _POOL_NAME.fullmatch(spec["pool"]["name"]):
        raise _invalid(kind, name, f"spec.pool.name: {spec['pool']['name']}: not a pool's name")
    if spec["pool"]["resourceSliceCount"] < 1:
        raise _invalid(kind, name, "spec.pool.resourceSliceCount: at least 1")
    devices = spec.get("devices") or ()
    if len(devices) > _DEVICES_MAX:
        raise _invalid(kind, name, f"spec.devices: more than {_DEVICES_MAX}")
    if len({device["name"] for device in devices}) != len(devices):
        raise _invalid(kind, name, "spec.devices: names must differ")
    for device in devices:
        _validate_device(name, device)


def _validate_device(name: str, device: Item) -> None:
    kind = "ResourceSlice"
    if not _DNS_LABEL.fullmatch(device["name"]):
        raise _invalid(kind, name, f"spec.devices.name: {device['name']}: not a DNS label")
    for attribute, value in (device.get("attributes") or {}).items():
        if not _C_IDENTIFIER.fullmatch(attribute.rpartition("/")[2]):
            raise _invalid(kind, name, f"attribute {attribute}: not a C identifier")
        if len(value) != 1 or len(str(value.get("string", ""))) > 64:
            raise _invalid(kind, name, f"attribute {attribute}: one value of at most 64 characters")
    _validate_capacity(name, device)
    for taint in device.get("taints") or ():
        if taint["effect"] not in _EFFECTS or not _QUALIFIED_NAME.fullmatch(taint["key"]):
            raise _invalid(kind, name, f"taint {taint}: bad key or effect")
        if len(taint.get("value", "")) > 63:
            raise _invalid(kind, name, f"taint {taint['key']}: value too long")
    for field in ("bindingConditions", "bindingFailureConditions"):
        if len(device.get(field) or ()) > 4:
            raise _invalid(kind, name, f"{field}: more than 4")


def _validate_capacity(name: str, device: Item) -> None:
    kind = "ResourceSlice"
    for capacity_name, capacity in (device.get("capacity") or {}).items():
        if not _C_IDENTIFIER.fullmatch(capacity_name.rpartition("/")[2]):
            raise _invalid(kind, name, f"capacity {capacity_name}: not a C identifier")
        policy = capacity.get("requestPolicy")
        if policy and not device.get("allowMultipleAllocations"):
            raise _invalid(kind, name, "requestPolicy without allowMultipleAllocations")
        if policy:
            _validate_policy(name, parse_quantity(capacity["value"]), policy)


def _validate_policy(name: str, value: Any, policy: Item) -> None:
    kind = "ResourceSlice"
    valid_range = policy.get("validRange")
    default = policy.get("default")
    if valid_range and default is None:
        raise _invalid(kind, name, "requestPolicy.default: required with validRange")
    if not valid_range:
        return
    least = parse_quantity(valid_range["min"])
    step = parse_quantity(valid_range.get("step", 0))
    most = parse_quantity(valid_range.get("max", value))
    chosen = parse_quantity(default)
    if least > most or least > value:
        raise _invalid(kind, name, f"requestPolicy.validRange.min: {least} above the maximum")
    if not least <= chosen <= most or (step and (chosen - least) % step):
        raise _invalid(kind, name, f"requestPolicy.default: {chosen} outside of validRange")
    if step and valid_range.get("max") and (most - least) % step:
        raise _invalid(kind, name, "requestPolicy.validRange.max: not on a step")


def _device_key(entry: Item) -> tuple[str, str, str, str]:
    return (entry["driver"], entry["pool"], entry["device"], entry.get("shareID", ""))


def _invalid(kind: str, name: str, why: str) -> StatusError:
    return StatusError(422, "Invalid", f'{kind} "{name}" is invalid: {why}')
