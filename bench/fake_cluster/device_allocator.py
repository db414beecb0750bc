"""Chooses devices for claims as the scheduler does: selectors, taints, capacity with its policy."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import Any, Final

from hymcache.bench.fake_cluster.object_store import Item, ObjectStore, now_text
from hymcache.bench.fake_cluster.selectors import matches_node
from hymcache.dra.quantity import parse_quantity

# The form of selector that device classes of drivers have; others need a real scheduler.
_DRIVER_SELECTOR: Final = re.compile(r"""device\.driver\s*==\s*["']([^"']+)["']""")


@dataclass(frozen=True)
class _Candidate:
    slice: Item
    device: Item

    @property
    def key(self) -> tuple[str, str, str]:
        spec = self.slice["spec"]
        return (spec["driver"], spec["pool"]["name"], self.device["name"])


class DeviceAllocator:
    """Allocates from the ResourceSlices of a store. Decides only; the scheduler writes."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def allocate(self, claim: Item, node: Item) -> Item | None:
        """`status.allocation` for a claim on a node, None where nothing fits."""
        results: list[Item] = []
        selector: Item | None = None
        for request in claim["spec"]["devices"]["requests"]:
            chosen = self._choose(request["name"], request["exactly"], node, results)
            if chosen is None:
                return None
            candidate, result = chosen
            results.append(result)
            selector = _selector_of(candidate, node)
        config = [
            {"source": "FromClaim", **entry}
            for entry in claim["spec"]["devices"].get("config") or ()
        ]
        allocation: Item = {"devices": {"results": results}, "allocationTimestamp": now_text()}
        if config:
            allocation["devices"]["config"] = config
        if selector is not None:
            allocation["nodeSelector"] = selector
        return allocation

    def tainted(self, claim: Item, effect: str) -> bool:
        """Whether a device of the claim has a taint of this effect that it does not tolerate."""
        devices = {c.key: c.device for c in self._candidates()}
        for result in results_of(claim):
            device = devices.get((result["driver"], result["pool"], result["device"]))
            tolerations = result.get("tolerations") or ()
            if device and _untolerated(device, tolerations, (effect,)):
                return True
        return False

    def _choose(
        self, name: str, exactly: Item, node: Item, taken: list[Item]
    ) -> tuple[_Candidate, Item] | None:
        driver = self._driver(exactly["deviceClassName"])
        for candidate in self._candidates():
            if candidate.key[0] != driver or not _reachable(candidate.slice, node):
                continue
            tolerations = exactly.get("tolerations") or ()
            if _untolerated(candidate.device, tolerations, ("NoSchedule", "NoExecute")):
                continue
            result = self._result(name, exactly, candidate, taken)
            if result is not None:
                return candidate, result
        return None

    def _result(
        self, name: str, exactly: Item, candidate: _Candidate, taken: list[Item]
    ) -> Item | None:
        device = candidate.device
        driver, pool, device_name = candidate.key
        result: Item = {"request": name, "driver": driver, "pool": pool, "device": device_name}
        used = [r for r in (*self._used(), *taken) if _result_key(r) == candidate.key]
        if not device.get("allowMultipleAllocations"):
            if used:
                return None
        else:
            consumed = _consumption(device, (exactly.get("capacity") or {}).get("requests") or {})
            if consumed is None or not _fits(device, consumed, used):
                return None
            result["shareID"] = str(uuid.uuid4())
            result["consumedCapacity"] = {key: str(value) for key, value in consumed.items()}
        for field in ("bindingConditions", "bindingFailureConditions"):
            if device.get(field):
                result[field] = list(device[field])
        if exactly.get("tolerations"):
            result["tolerations"] = exactly["tolerations"]
        return result

    def _used(self) -> Iterator[Item]:
        for claim in self._store.items("ResourceClaim"):
            yield from results_of(claim)

    def _driver(self, class_name: str) -> str | None:
        device_class = self._store.find("DeviceClass", ("", class_name))
        for selector in (device_class or {}).get("spec", {}).get("selectors") or ():
            match = _DRIVER_SELECTOR.search(selector.get("cel", {}).get("expression", ""))
            if match:
                return match[1]
        return None

    def _candidates(self) -> Iterator[_Candidate]:
        slices = list(self._store.items("ResourceSlice"))
        newest: dict[tuple[str, str], int] = {}
        for item in slices:
            pool = (item["spec"]["driver"], item["spec"]["pool"]["name"])
            generation = item["spec"]["pool"]["generation"]
            newest[pool] = max(newest.get(pool, 0), generation)
        for item in slices:
            pool = (item["spec"]["driver"], item["spec"]["pool"]["name"])
            if item["spec"]["pool"]["generation"] == newest[pool]:
                for device in item["spec"].get("devices") or ():
                    yield _Candidate(item, device)


def results_of(claim: Item) -> list[Item]:
    """The devices that a claim has."""
    allocation = (claim.get("status") or {}).get("allocation") or {}
    results: list[Item] = allocation.get("devices", {}).get("results") or []
    return results


def _result_key(result: Item) -> tuple[str, str, str]:
    return (result["driver"], result["pool"], result["device"])


def _reachable(resource_slice: Item, node: Item) -> bool:
    spec = resource_slice["spec"]
    if spec.get("nodeName"):
        return bool(spec["nodeName"] == node["metadata"]["name"])
    return matches_node(node, spec.get("nodeSelector"))


def _selector_of(candidate: _Candidate, node: Item) -> Item | None:
    spec = candidate.slice["spec"]
    if spec.get("nodeName") or candidate.device.get("bindsToNode"):
        name = node["metadata"]["name"]
        fields = [{"key": "metadata.name", "operator": "In", "values": [name]}]
        return {"nodeSelectorTerms": [{"matchFields": fields}]}
    selector: Item | None = spec.get("nodeSelector")
    return selector


def _untolerated(device: Item, tolerations: Iterable[Item], effects: tuple[str, ...]) -> bool:
    return any(
        taint["effect"] in effects and not any(_tolerates(t, taint) for t in tolerations)
        for taint in device.get("taints") or ()
    )


def _tolerates(toleration: Item, taint: Item) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("key") not in (None, "", taint["key"]):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return True
    return bool(toleration.get("value", "") == taint.get("value", ""))


def _consumption(device: Item, requests: Item) -> dict[str, Decimal] | None:
    consumed = {}
    for name, capacity in (device.get("capacity") or {}).items():
        value = parse_quantity(capacity["value"])
        policy = capacity.get("requestPolicy")
        asked = requests.get(name)
        if asked is None:
            consumed[name] = parse_quantity(policy["default"]) if policy else value
            continue
        amount = parse_quantity(asked)
        if policy and policy.get("validRange"):
            rounded = _rounded(amount, policy["validRange"])
            if rounded is None:
                return None
            amount = rounded
        consumed[name] = amount
    return None if requests.keys() - consumed.keys() else consumed


def _rounded(amount: Decimal, valid_range: Item) -> Decimal | None:
    least = parse_quantity(valid_range["min"])
    step = parse_quantity(valid_range.get("step", 0))
    amount = max(amount, least)
    if step:
        steps = ((amount - least) / step).to_integral_value(ROUND_CEILING)
        amount = least + steps * step
    if valid_range.get("max") and amount > parse_quantity(valid_range["max"]):
        return None
    return amount


def _fits(device: Item, consumed: dict[str, Decimal], used: list[Any]) -> bool:
    for name, amount in consumed.items():
        total = parse_quantity(device["capacity"][name]["value"])
        before = sum(
            (parse_quantity((r.get("consumedCapacity") or {}).get(name, 0)) for r in used),
            Decimal(0),
        )
        if before + amount > total:
            return False
    return True
