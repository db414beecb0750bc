"""The ledger: which regions exist for whom. It is the truth; claims and slices follow it.

Kubernetes forgets a claim's allocation as soon as its last pod ends, whatever finalizers say, so
that its capacity can be sold again before the region is detached. The ledger does not forget: a
record goes when its region is free. Each record is a ConfigMap of its own in the driver's
namespace, written only over the version that was read: two who believe that they lead cannot both
succeed.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Final

from hymcache.dra import cluster, names
from hymcache.dra.claim import RegionKey
from hymcache.dra.cluster import (
    ClusterClient,
    ClusterUnavailable,
    JsonObject,
    ObjectConflict,
    ObjectMissing,
)
from hymcache.dra.controller.region_record import RecordState, RegionRecord
from hymcache.dra.fabric import BladeKey, MemoryId
from hymcache.errors import HymcacheError

LABEL: Final = names.ANNOTATION_PREFIX + "ledger"
_RECORD: Final = "record"
_NAME_CHARS_MAX: Final = 253
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NOT_IN_NAMES: Final = re.compile(r"[^a-z0-9-]+")


class LedgerConflict(HymcacheError):
    """Somebody else wrote the record: what this process knows of it is out of date."""


class Ledger:
    """All records, in memory and in the cluster. One task writes a record at a time."""

    def __init__(self, client: ClusterClient, namespace: str, driver: str) -> None:
        self._client = client
        self._namespace = namespace
        self._driver = driver
        self._records: dict[RegionKey, RegionRecord] = {}
        self._claims: dict[str, set[RegionKey]] = {}
        self._blades: defaultdict[BladeKey, dict[RegionKey, RegionRecord]] = defaultdict(dict)
        # Records whose last write got no answer: what is stored of them is not known.
        self._uncertain: set[RegionKey] = set()
        self._listeners: list[Callable[[RegionRecord], None]] = []

    def listen(self, listener: Callable[[RegionRecord], None]) -> None:
        """Calls `listener` with each record after it was written or removed."""
        self._listeners.append(listener)

    async def load(self) -> None:
        """Reads all records. Raises Corrupt for one that cannot be read: it is not passed over."""
        found = await self._client.list_all(
            cluster.CONFIG_MAP, self._namespace, label_selector=f"{LABEL}={self._driver}"
        )
        self._records.clear()
        self._claims.clear()
        self._blades.clear()
        self._uncertain.clear()
        for item in found.items:
            metadata = item["metadata"]
            text = (item.get("data") or {}).get(_RECORD, "")
            self._keep(RegionRecord.from_json(text, metadata["resourceVersion"]))

    # --- reading -----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[RegionRecord]:
        return iter(tuple(self._records.values()))

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: RegionKey) -> RegionRecord | None:
        """The record of a region."""
        return self._records.get(key)

    def of_claim(self, claim_uid: str) -> tuple[RegionRecord, ...]:
        """All regions of a claim, those that are being freed included."""
        keys = sorted(self._claims.get(claim_uid, ()))
        return tuple(self._records[key] for key in keys)

    def of_blade(self, blade: BladeKey) -> tuple[RegionRecord, ...]:
        """All regions on a blade."""
        return tuple(self._blades[blade].values())

    def claim_uids(self) -> frozenset[str]:
        """Claims that have records."""
        return frozenset(self._claims)

    def memory_ids(self, blade: BladeKey) -> dict[MemoryId, RegionRecord]:
        """Regions that are on a blade, or may be: of one that is being freed, the name may be in
        use again, and it is the other's then."""
        found: dict[MemoryId, RegionRecord] = {}
        for record in self.of_blade(blade):
            if record.memory_id is None or record.state is RecordState.FREED:
                continue
            if record.state is not RecordState.DETACHED or record.memory_id not in found:
                found[record.memory_id] = record
        return found

    def detached_ids(self, blade: BladeKey) -> frozenset[MemoryId]:
        """Of regions that are being freed and may be free already."""
        return frozenset(
            record.memory_id
            for record in self.of_blade(blade)
            if record.memory_id is not None and record.state is RecordState.DETACHED
        )

    async def settle(self, claim_uid: str) -> None:
        """Reads those records of a claim anew of which it is not known what is stored."""
        for key in [key for key in self._uncertain if key.claim_uid == claim_uid]:
            await self._reload(key)

    # --- writing -----------------------------------------------------------------------------

    async def add(self, record: RegionRecord) -> RegionRecord:
        """A new record. LedgerConflict where there is one of its key."""
        try:
            stored = await self._client.create(cluster.CONFIG_MAP, self._config_map(record))
        except ObjectConflict as error:
            raise await self._conflict(record.key) from error
        except ClusterUnavailable:
            self._uncertain.add(record.key)
            raise
        return self._note(record, stored)

    async def put(self, record: RegionRecord) -> RegionRecord:
        """The next version of a record."""
        try:
            stored = await self._client.replace(cluster.CONFIG_MAP, self._config_map(record))
        except (ObjectConflict, ObjectMissing) as error:
            raise await self._conflict(record.key) from error
        except ClusterUnavailable:
            self._uncertain.add(record.key)
            raise
        return self._note(record, stored)

    async def remove(self, record: RegionRecord) -> None:
        """Forgets a region. Only one that is free, or was never made."""
        if record.state is not RecordState.FREED and record.ref is not None:
            raise AssertionError(f"{record.key}: its region is not free")
        with suppress(ObjectMissing):
            await self._client.delete(cluster.CONFIG_MAP, _name_of(record.key), self._namespace)
        self._drop(record.key)
        self._tell(record)

    # --- inside ------------------------------------------------------------------------------

    async def _conflict(self, key: RegionKey) -> LedgerConflict:
        self._uncertain.add(key)
        await self._reload(key)
        return LedgerConflict(f"ledger: {key}: somebody else wrote it")

    async def _reload(self, key: RegionKey) -> None:
        try:
            item = await self._client.get(cluster.CONFIG_MAP, _name_of(key), self._namespace)
        except ObjectMissing:
            self._uncertain.discard(key)
            self._drop(key)
            return
        text = (item.get("data") or {}).get(_RECORD, "")
        self._keep(RegionRecord.from_json(text, item["metadata"]["resourceVersion"]))
        self._uncertain.discard(key)

    def _note(self, record: RegionRecord, stored: JsonObject) -> RegionRecord:
        kept = replace(record, resource_version=stored["metadata"]["resourceVersion"])
        self._keep(kept)
        self._tell(kept)
        return kept

    def _keep(self, record: RegionRecord) -> None:
        self._records[record.key] = record
        self._blades[record.blade][record.key] = record
        self._claims.setdefault(record.key.claim_uid, set()).add(record.key)

    def _drop(self, key: RegionKey) -> None:
        record = self._records.pop(key, None)
        if record is not None:
            self._blades[record.blade].pop(key, None)
        keys = self._claims.get(key.claim_uid, set())
        keys.discard(key)
        if not keys:
            self._claims.pop(key.claim_uid, None)

    def _tell(self, record: RegionRecord) -> None:
        for listener in self._listeners:
            listener(record)

    def _config_map(self, record: RegionRecord) -> JsonObject:
        metadata: JsonObject = {
            "name": _name_of(record.key),
            "namespace": self._namespace,
            "labels": {LABEL: self._driver},
        }
        if record.resource_version:
            metadata["resourceVersion"] = record.resource_version
        return {
            "apiVersion": cluster.CONFIG_MAP.api_version,
            "kind": cluster.CONFIG_MAP.kind,
            "metadata": metadata,
            "data": {_RECORD: record.to_json()},
        }


def _name_of(key: RegionKey) -> str:
    """A DNS subdomain; one that had to be changed ends in a hash of the key, so that two differ."""
    text = f"cxl-region-{key.claim_uid}-{key.share_id}".lower()
    if _SUBDOMAIN.fullmatch(text) and len(text) <= _NAME_CHARS_MAX:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    cleaned = _NOT_IN_NAMES.sub("-", text)[: _NAME_CHARS_MAX - len(digest) - 1]
    return f"{cleaned.rstrip('-')}-{digest}"
