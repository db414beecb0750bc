"""What the controller writes on claims: owner and finalizer, teardown data, status, events."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from hymcache.dra import cluster, names
from hymcache.dra.claim import AllocatedDevice, BadRequest, Claim
from hymcache.dra.cluster import ClusterClient, ClusterError, JsonObject, ObjectMissing
from hymcache.dra.controller.region_record import RecordState, RegionRecord
from hymcache.dra.controller.settings import ControllerSettings
from hymcache.dra.fabric import AllocationId, ApplianceId, BladeId, BladeKey, HostId, MemoryId
from hymcache.errors import Corrupt, Unavailable

_log = logging.getLogger(__name__)

_MESSAGE_CHARS_MAX: Final = 1024
# The same event of a claim is told again after this long.
_EVENT_AGAIN_S: Final = 300.0
_EVENTS_KNOWN_MAX: Final = 10_000


@dataclass(frozen=True)
class DeviceStatus:
    """What the claim's status says of one device.

    `failed` sends the pod elsewhere. `requeue_s`: when to look again; None: when something changes.
    """

    device: AllocatedDevice
    record: RegionRecord | None
    attached: bool
    failed: bool
    reason: str
    message: str
    requeue_s: float | None = None


class ClaimWriter:
    """Writes for one driver. Every write names the claim's UID, so that none hits a successor."""

    def __init__(
        self,
        client: ClusterClient,
        settings: ControllerSettings,
        *,
        remember: Callable[[JsonObject], None] = lambda _item: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._settings = settings
        self._remember = remember
        self._clock = clock
        self._noted: dict[str, str] = {}
        self._told: dict[tuple[str, str], float] = {}

    def is_anothers(self, claim: Claim) -> bool:
        """Whether another driver (the paper's, say) has taken the claim."""
        owner = claim.annotations.get(names.ANNOTATION_OWNER)
        return owner is not None and owner != self._settings.owner

    async def take(self, claim: Claim) -> bool:
        """Puts owner and finalizer on the claim; whether there was anything to write.

        Compare-and-set: ObjectConflict where the claim is not what it was.
        """
        has_owner = claim.annotations.get(names.ANNOTATION_OWNER) == self._settings.owner
        # A claim that is being deleted takes no finalizer: the ledger alone holds its region.
        if (names.FINALIZER in claim.finalizers or claim.deleted) and has_owner:
            return False
        metadata: JsonObject = {
            "uid": claim.uid,
            "resourceVersion": claim.item["metadata"]["resourceVersion"],
            "annotations": {names.ANNOTATION_OWNER: self._settings.owner},
        }
        if names.FINALIZER not in claim.finalizers and not claim.deleted:
            metadata["finalizers"] = [*claim.finalizers, names.FINALIZER]
        await self._patch(claim, metadata)
        return True

    async def note_teardown(self, claim: Claim, records: Iterable[RegionRecord]) -> None:
        """Keeps what is needed to free the claim's regions on the claim itself."""
        text = teardown_text(records)
        noted = self._noted.get(claim.uid) or claim.annotations.get(names.ANNOTATION_TEARDOWN)
        if noted != text:
            annotations = {names.ANNOTATION_TEARDOWN: text}
            await self._patch(claim, {"uid": claim.uid, "annotations": annotations})
            self._noted[claim.uid] = text

    async def release(self, claim: Claim) -> None:
        """Takes the driver's marks off the claim. Compare-and-set; a claim that is gone is done."""
        self._noted.pop(claim.uid, None)
        finalizers = [f for f in claim.finalizers if f != names.FINALIZER]
        marks = (names.ANNOTATION_OWNER, names.ANNOTATION_TEARDOWN)
        metadata: JsonObject = {
            "uid": claim.uid,
            "resourceVersion": claim.item["metadata"]["resourceVersion"],
            "annotations": dict.fromkeys(marks),
            "finalizers": finalizers or None,
        }
        try:
            await self._patch(claim, metadata)
        except ObjectMissing:
            return

    def forget(self, claim_uid: str) -> None:
        """The claim is no more."""
        self._noted.pop(claim_uid, None)

    async def publish(self, claim: Claim, statuses: Iterable[DeviceStatus]) -> bool:
        """Makes status.devices say this of the driver's devices; whether it did not before."""
        entries = [self._entry(claim, status) for status in statuses]
        if _essence(entries) == _essence(self._own_parts(claim)):
            return False
        body = {
            "apiVersion": cluster.RESOURCE_CLAIM.api_version,
            "kind": cluster.RESOURCE_CLAIM.kind,
            "metadata": {"name": claim.name, "namespace": claim.namespace, "uid": claim.uid},
            "status": {"devices": entries},
        }
        stored = await self._client.apply(
            cluster.RESOURCE_CLAIM, body, self._settings.field_manager, part="status"
        )
        self._remember(stored)
        return True

    async def tell(self, claim: Claim, reason: str, note: str, *, warning: bool = True) -> None:
        """An event on the claim; not the same again within five minutes, and best effort."""
        now = self._clock()
        key = (claim.uid, reason)
        if now - self._told.get(key, -_EVENT_AGAIN_S) < _EVENT_AGAIN_S:
            return
        if len(self._told) >= _EVENTS_KNOWN_MAX:
            self._told.clear()
        self._told[key] = now
        body = {
            "apiVersion": cluster.EVENT.api_version,
            "kind": cluster.EVENT.kind,
            "metadata": {"name": f"{claim.name}.{uuid.uuid4().hex}", "namespace": claim.namespace},
            "eventTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "reportingController": self._settings.driver,
            "reportingInstance": self._settings.identity,
            "action": "Reconcile",
            "reason": reason,
            "note": note[:_MESSAGE_CHARS_MAX],
            "type": "Warning" if warning else "Normal",
            "regarding": {
                "apiVersion": cluster.RESOURCE_CLAIM.api_version,
                "kind": cluster.RESOURCE_CLAIM.kind,
                "namespace": claim.namespace,
                "name": claim.name,
                "uid": claim.uid,
            },
        }
        try:
            await self._client.create(cluster.EVENT, body)
        except (ClusterError, Unavailable) as error:
            _log.warning("event %s on %s/%s: %s", reason, claim.namespace, claim.name, error)

    async def _patch(self, claim: Claim, metadata: JsonObject) -> None:
        stored = await self._client.merge_patch(
            cluster.RESOURCE_CLAIM, claim.name, {"metadata": metadata}, claim.namespace
        )
        self._remember(stored)

    def _own_parts(self, claim: Claim) -> list[JsonObject]:
        """Of what is published, what the controller says; the kubelet plugin says more."""
        own = (names.CONDITION_ATTACHED, names.CONDITION_ATTACH_FAILED)
        parts = []
        for device in claim.published:
            conditions = [c for c in device.get("conditions") or () if c["type"] in own]
            kept = {k: v for k, v in device.items() if k != "networkData"}
            parts.append({**kept, "conditions": conditions})
        return parts

    def _entry(self, claim: Claim, status: DeviceStatus) -> JsonObject:
        entry: JsonObject = {
            "driver": self._settings.driver,
            "pool": status.device.pool,
            "device": status.device.device,
            "conditions": [
                _condition(claim, status, names.CONDITION_ATTACHED, status.attached),
                _condition(claim, status, names.CONDITION_ATTACH_FAILED, status.failed),
            ],
        }
        if status.device.share_id:
            entry["shareID"] = status.device.share_id
        record = status.record
        if record is not None and record.allocation_id is not None:
            entry["data"] = {
                names.DATA_ALLOCATION_ID: record.allocation_id,
                names.DATA_CDI_DEVICES: [names.cdi_device_name(record.allocation_id)],
                names.DATA_MAPPED_HOSTS: list(record.ready_hosts),
                "applianceId": record.blade.appliance_id,
                "bladeId": record.blade.blade_id,
                "memoryId": record.memory_id,
                "sizeMiB": record.size_mib,
                "attached": {host: host in record.ready_hosts for host in record.hosts},
            }
        return entry


def teardown_text(records: Iterable[RegionRecord]) -> str:
    """The teardown annotation: those records that name a region, without what changes often."""
    kept = [
        replace(
            record,
            state=RecordState.PUBLISHED,
            since=0.0,
            taken=frozenset(),
            ready_hosts=(),
            resource_version="",
        )
        for record in records
        if record.ref is not None
    ]
    return json.dumps([json.loads(record.to_json()) for record in kept])


def read_teardown(claim: Claim) -> tuple[RegionRecord, ...]:
    """Records in the claim's annotation; none where it has none that can be read."""
    text = claim.annotations.get(names.ANNOTATION_TEARDOWN)
    if not text:
        return ()
    try:
        entries = json.loads(text)
        return tuple(RegionRecord.from_json(json.dumps(entry), "") for entry in entries)
    except (ValueError, TypeError, Corrupt) as error:
        _log.warning("claim %s/%s: teardown annotation: %s", claim.namespace, claim.name, error)
        return ()


def read_regions(claim: Claim) -> tuple[RegionRecord, ...]:
    """Records of the claim's annotation, and of its status those that the annotation has not."""
    records = {record.key: record for record in read_teardown(claim)}
    for record in _read_published(claim):
        records.setdefault(record.key, record)
    return tuple(records.values())


def _read_published(claim: Claim) -> Iterator[RegionRecord]:
    """Of status.devices: what `publish` wrote there."""
    for device in claim.wanted:
        data = (_published_entry(claim, device) or {}).get("data") or {}
        try:
            blade = BladeKey(ApplianceId(data["applianceId"]), BladeId(data["bladeId"]))
            record = RegionRecord.intended(
                claim,
                device,
                blade,
                size_mib=int(data["sizeMiB"]),
                qos=1,
                share_count=claim.wish(device.request).share_count,
                hosts=tuple(HostId(host) for host in sorted(data["attached"])),
            )
            yield replace(
                record,
                state=RecordState.PUBLISHED,
                memory_id=MemoryId(data["memoryId"]),
                allocation_id=AllocationId(data[names.DATA_ALLOCATION_ID]),
            )
        except (KeyError, TypeError, ValueError, BadRequest) as error:
            _log.debug("claim %s/%s: status: %s", claim.namespace, claim.name, error)


def _condition(claim: Claim, status: DeviceStatus, kind: str, true: bool) -> JsonObject:
    text = "True" if true else "False"
    before = _published_condition(claim, status.device, kind)
    since = before["lastTransitionTime"] if before and before["status"] == text else _now()
    return {
        "type": kind,
        "status": text,
        "reason": status.reason,
        "message": status.message[:_MESSAGE_CHARS_MAX],
        "lastTransitionTime": since,
    }


def _published_entry(claim: Claim, device: AllocatedDevice) -> JsonObject | None:
    for entry in claim.published:
        key = (entry["pool"], entry["device"], entry.get("shareID", ""))
        if key == (device.pool, device.device, device.share_id):
            return entry
    return None


def _published_condition(claim: Claim, device: AllocatedDevice, kind: str) -> JsonObject | None:
    for condition in (_published_entry(claim, device) or {}).get("conditions") or ():
        if condition["type"] == kind:
            found: JsonObject = condition
            return found
    return None


def _essence(entries: Iterable[JsonObject]) -> list[str]:
    """What of entries matters, whatever their order."""
    parts = []
    for entry in entries:
        conditions = sorted(
            (
                {k: v for k, v in c.items() if k != "lastTransitionTime"}
                for c in entry["conditions"]
            ),
            key=lambda condition: str(condition["type"]),
        )
        parts.append(json.dumps({**entry, "conditions": conditions}, sort_keys=True))
    return sorted(parts)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
