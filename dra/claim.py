"""What a ResourceClaim asks of the driver and has from the scheduler.

Size, share count and QoS come from, in this order: the capacity that the scheduler counted, the
opaque configuration of the request or its class, the annotations of the paper.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from hymcache.dra import names
from hymcache.dra.cluster import JsonObject
from hymcache.dra.quantity import whole_quantity
from hymcache.errors import HymcacheError

_QOS: Final = (1, 2, 4, 8)
_SHARES_MAX: Final = 1024
_PARAMETERS: Final = ("apiVersion", "kind", "shareCount", "qos", "anyHostWillDo")


class RegionKey(NamedTuple):
    """What a region is for: a claim, and the share that the scheduler gave it.

    Where the API server knows no shares, the share is the pool and device of the allocation.
    """

    claim_uid: str
    share_id: str

    def owner(self, cluster: str) -> str:
        """What the fabric manager is told: begins with the claim's UID, names the cluster too."""
        return f"{self.claim_uid}/{self.share_id}@{cluster}"


class BadRequest(HymcacheError):
    """The claim asks for what cannot be; the text names the field and the fix."""


@dataclass(frozen=True)
class Wish:
    """What one request of a claim wants. None: the driver's default."""

    size_mib: int | None = None
    share_count: int | None = None
    qos: int | None = None
    any_host_will_do: bool = False


@dataclass(frozen=True)
class AllocatedDevice:
    """One result of the scheduler for this driver. `counted_mib` is what it counted, if it did."""

    key: RegionKey
    request: str
    pool: str
    device: str
    share_id: str
    counted_mib: int | None
    has_conditions: bool


@dataclass(frozen=True)
class Claim:
    """A ResourceClaim, read for one driver."""

    item: JsonObject
    driver: str

    @property
    def uid(self) -> str:
        """Its UID."""
        return str(self.item["metadata"]["uid"])

    @property
    def namespace(self) -> str:
        """Its namespace."""
        return str(self.item["metadata"]["namespace"])

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.item["metadata"]["name"])

    @property
    def annotations(self) -> Mapping[str, str]:
        """Its annotations."""
        annotations: Mapping[str, str] = self.item["metadata"].get("annotations") or {}
        return annotations

    @property
    def finalizers(self) -> tuple[str, ...]:
        """Its finalizers."""
        return tuple(self.item["metadata"].get("finalizers") or ())

    @property
    def deleted(self) -> bool:
        """Whether it waits for its finalizers."""
        return "deletionTimestamp" in self.item["metadata"]

    @property
    def consumers(self) -> tuple[str, ...]:
        """UIDs of the pods that it is reserved for."""
        reserved = self._status.get("reservedFor") or ()
        return tuple(r["uid"] for r in reserved if r.get("resource") == "pods")

    @property
    def wanted(self) -> tuple[AllocatedDevice, ...]:
        """Devices that it has from this driver and still needs."""
        if self.deleted and not self.consumers:
            return ()
        allocation = self._status.get("allocation") or {}
        results = allocation.get("devices", {}).get("results") or ()
        return tuple(self._device(r) for r in results if r.get("driver") == self.driver)

    @property
    def published(self) -> tuple[JsonObject, ...]:
        """What status.devices says of this driver's devices."""
        devices = self._status.get("devices") or ()
        return tuple(d for d in devices if d.get("driver") == self.driver)

    def wish(self, request: str) -> Wish:
        """What a request wants beside what the scheduler counted. Raises BadRequest."""
        annotated = _wish(
            {
                "capacityMiB": self.annotations.get(names.ANNOTATION_CAPACITY_MIB),
                "shareCount": self.annotations.get(names.ANNOTATION_SHARE_COUNT),
                "qos": self.annotations.get(names.ANNOTATION_QOS),
            },
            "annotation",
        )
        configured = Wish()
        for parameters in self._opaque(request):
            configured = _merged(configured, _wish(parameters, "opaque configuration"))
        return _merged(annotated, configured)

    @property
    def _status(self) -> JsonObject:
        status: JsonObject = self.item.get("status") or {}
        return status

    def _device(self, result: JsonObject) -> AllocatedDevice:
        share_id = result.get("shareID") or ""
        pool, device = result["pool"], result["device"]
        counted = (result.get("consumedCapacity") or {}).get(names.CAPACITY)
        return AllocatedDevice(
            key=RegionKey(self.uid, share_id or _stand_in(pool, device)),
            request=result["request"].partition("/")[0],
            pool=pool,
            device=device,
            share_id=share_id,
            counted_mib=None if counted is None else whole_quantity(counted),
            has_conditions=bool(result.get("bindingConditions")),
        )

    def _opaque(self, request: str) -> Iterable[Mapping[str, Any]]:
        """Parameters for a request, those that count less first: the class's, then the claim's."""
        allocation = self._status.get("allocation") or {}
        entries = allocation.get("devices", {}).get("config") or ()
        for source in ("FromClass", "FromClaim"):
            for entry in entries:
                opaque = entry.get("opaque") or {}
                if entry.get("source") != source or opaque.get("driver") != self.driver:
                    continue
                if entry.get("requests") and request not in entry["requests"]:
                    continue
                yield _checked(opaque.get("parameters") or {})


def _stand_in(pool: str, device: str) -> str:
    """A share where the API server gives none: a device then has one claim at a time."""
    return hashlib.sha256(f"{pool} {device}".encode()).hexdigest()[:16]


def _checked(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    version, kind = parameters.get("apiVersion"), parameters.get("kind")
    if (version, kind) != (names.CONFIG_API_VERSION, names.CONFIG_KIND):
        raise BadRequest(
            f"opaque configuration: {version} {kind}: write apiVersion "
            f"{names.CONFIG_API_VERSION}, kind {names.CONFIG_KIND}"
        )
    unknown = sorted(parameters.keys() - set(_PARAMETERS))
    if unknown:
        known = ", ".join(_PARAMETERS[2:])
        raise BadRequest(f"opaque configuration: {unknown[0]}: unknown; known are {known}")
    return parameters


def _wish(parameters: Mapping[str, Any], where: str) -> Wish:
    qos = _number(parameters.get("qos"), f"{where}: qos", 8)
    if qos is not None and qos not in _QOS:
        raise BadRequest(f"{where}: qos = {qos}: write 1, 2, 4 or 8")
    return Wish(
        size_mib=_number(parameters.get("capacityMiB"), f"{where}: capacity-mib", 1 << 40),
        share_count=_number(parameters.get("shareCount"), f"{where}: share-count", _SHARES_MAX),
        qos=qos,
        any_host_will_do=_switch(parameters.get("anyHostWillDo", False), where),
    )


def _switch(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise BadRequest(f"{where}: anyHostWillDo = {value}: write true or false, unquoted")
    return value


def _number(value: object, what: str, most: int) -> int | None:
    if value is None:
        return None
    try:
        number = whole_quantity(value)
    except ValueError as error:
        raise BadRequest(f"{what}: {error}") from error
    if not 1 <= number <= most:
        raise BadRequest(f"{what} = {value}: write a number from 1 to {most}")
    return number


def _merged(weaker: Wish, stronger: Wish) -> Wish:
    return Wish(
        size_mib=weaker.size_mib if stronger.size_mib is None else stronger.size_mib,
        share_count=weaker.share_count if stronger.share_count is None else stronger.share_count,
        qos=weaker.qos if stronger.qos is None else stronger.qos,
        any_host_will_do=weaker.any_host_will_do or stronger.any_host_will_do,
    )


def trim_claim(item: JsonObject, driver: str) -> JsonObject | None:
    """What of a claim the controller keeps; None for one that is none of this driver's."""
    metadata = item["metadata"]
    status = item.get("status") or {}
    results = (status.get("allocation") or {}).get("devices", {}).get("results") or ()
    ours = any(result.get("driver") == driver for result in results)
    marked = names.FINALIZER in (metadata.get("finalizers") or ())
    if not ours and not marked:
        return None
    kept = ("name", "namespace", "uid", "resourceVersion", "finalizers", "annotations")
    trimmed = {key: metadata[key] for key in (*kept, "deletionTimestamp") if key in metadata}
    return {"metadata": trimmed, "status": status}
