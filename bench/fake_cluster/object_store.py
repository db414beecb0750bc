"""Objects with versions, finalizers and a history that watches follow."""

from __future__ import annotations

import asyncio
import copy
import json
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from hymcache.bench.fake_cluster import server_side_apply
from hymcache.bench.fake_cluster.feature_gates import FeatureGates, drop_disabled
from hymcache.bench.fake_cluster.status_error import StatusError
from hymcache.bench.fake_cluster.validation import validate

Item = dict[str, Any]
Name = tuple[str, str]  # namespace ("" for cluster-wide kinds) and name

HISTORY_EVENTS_MAX: Final = 20_000
# A watch that is this far behind is ended, as the API server does.
_WATCH_BACKLOG_MAX: Final = 50_000
_STATUS_KINDS: Final = frozenset({"ResourceClaim", "Pod", "Node"})


@dataclass(frozen=True)
class Change:
    """One event of the history. `line` is what a watch sends: one JSON object and a newline."""

    version: int
    kind: str
    event: str
    item: Item
    line: bytes


Watch = asyncio.Queue[Change | None]


class ObjectStore:
    """All objects of all kinds. Every write gets the next version, as in etcd."""

    def __init__(self, gates: FeatureGates) -> None:
        self.gates = gates
        self.version = 100
        self.compacted = 0
        self._items: dict[str, dict[Name, Item]] = {}
        self._owners: dict[tuple[str, Name, str], server_side_apply.Owners] = {}
        self._history: deque[Change] = deque()
        self._watches: dict[Watch, str] = {}
        self._listeners: list[Callable[[Change], None]] = []

    # --- reading -----------------------------------------------------------------------------

    def get(self, kind: str, name: Name) -> Item:
        """The stored object, not to be changed. StatusError 404."""
        try:
            return self._items[kind][name]
        except KeyError:
            raise StatusError(404, "NotFound", f'{kind} "{name[1]}" not found') from None

    def find(self, kind: str, name: Name) -> Item | None:
        """The stored object, None where there is none."""
        return self._items.get(kind, {}).get(name)

    def items(self, kind: str) -> Iterator[Item]:
        """All objects of a kind, in order of name."""
        held = self._items.get(kind, {})
        for name in sorted(held):
            yield held[name]

    # --- writing -----------------------------------------------------------------------------

    def create(self, kind: str, item: Item) -> Item:
        """Stores a new object."""
        item = copy.deepcopy(item)
        metadata = item["metadata"]
        if "name" not in metadata:
            metadata["name"] = metadata.pop("generateName") + uuid.uuid4().hex[:5]
        name = (metadata.get("namespace", ""), metadata["name"])
        if name in self._items.get(kind, {}):
            raise StatusError(409, "AlreadyExists", f'{kind} "{name[1]}" already exists')
        metadata["uid"] = str(uuid.uuid4())
        metadata["creationTimestamp"] = now_text()
        metadata.pop("resourceVersion", None)
        if kind == "ResourceClaim":
            item["status"] = {}
        drop_disabled(kind, item, self.gates)
        validate(kind, None, item)
        return self._store(kind, name, item, "ADDED")

    def update(self, kind: str, name: Name, item: Item, part: str = "") -> Item:
        """Writes an object, or its status; 409 where its version is not the newest."""
        before = self.get(kind, name)
        after = self._next(kind, before, item, part)
        owners = self._owners_of(kind, name, part)
        if after != before:
            server_side_apply.written(before, after, owners)
        return self._change(kind, name, before, after)

    def merge(self, kind: str, name: Name, patch: Item, part: str = "") -> Item:
        """A JSON merge patch (RFC 7386)."""
        before = self.get(kind, name)
        return self.update(kind, name, merged(before, patch), part)

    def apply(
        self, kind: str, name: Name, body: Item, manager: str, *, force: bool, part: str = ""
    ) -> Item:
        """Server-side apply; creates the object where there is none."""
        before = self.find(kind, name)
        if before is None:
            if part or body["metadata"].get("uid"):
                raise StatusError(404, "NotFound", f'{kind} "{name[1]}" not found')
            created = self.create(kind, body)
            self._owners_of(kind, name, part)[manager] = server_side_apply.owned(body)
            return created
        uid = body["metadata"].get("uid")
        if uid and uid != before["metadata"]["uid"]:
            raise StatusError(409, "Conflict", f'{kind} "{name[1]}": the UID is another')
        version = body["metadata"].get("resourceVersion")
        if version and version != before["metadata"]["resourceVersion"]:
            raise StatusError(409, "Conflict", f'{kind} "{name[1]}" has been modified')
        owners = self._owners_of(kind, name, part)
        trial = {manager: set(paths) for manager, paths in owners.items()}
        try:
            wanted = server_side_apply.apply(
                before, _scoped(kind, body, part), manager, trial, force=force
            )
        except server_side_apply.FieldConflict as error:
            raise StatusError(409, "Conflict", str(error)) from error
        after = self._next(kind, before, wanted, part)
        owners.clear()
        owners.update(trial)
        return self._change(kind, name, before, after)

    def delete(self, kind: str, name: Name, uid: str = "") -> Item:
        """Removes an object, or marks it where finalizers hold it."""
        item = self.get(kind, name)
        if uid and uid != item["metadata"]["uid"]:
            raise StatusError(409, "Conflict", f'{kind} "{name[1]}": the UID is another')
        if item["metadata"].get("finalizers"):
            if "deletionTimestamp" in item["metadata"]:
                return item
            marked = copy.deepcopy(item)
            marked["metadata"]["deletionTimestamp"] = now_text()
            return self._store(kind, name, marked, "MODIFIED")
        return self._remove(kind, name, item)

    # --- watching ----------------------------------------------------------------------------

    def listen(self, listener: Callable[[Change], None]) -> None:
        """Calls `listener` with every change, within the write."""
        self._listeners.append(listener)

    def open_watch(self, kind: str, version: int) -> tuple[Watch, list[Change]]:
        """A queue of what comes, and what came after `version`. StatusError 410."""
        if version < self.compacted:
            raise StatusError(410, "Expired", f"too old resource version: {version}")
        missed = [c for c in self._history if c.version > version and c.kind == kind]
        watch: Watch = asyncio.Queue(_WATCH_BACKLOG_MAX)
        self._watches[watch] = kind
        return watch, missed

    def close_watch(self, watch: Watch) -> None:
        """The queue gets nothing more."""
        self._watches.pop(watch, None)

    def end_watches(self) -> int:
        """Ends all watches, as a server that goes away does; says how many there were."""
        watches = list(self._watches)
        for watch in watches:
            self._watches.pop(watch)
            while watch.full():
                watch.get_nowait()
            watch.put_nowait(None)
        return len(watches)

    def compact(self) -> None:
        """Forgets the history: watches from older versions get 410."""
        self._history.clear()
        self.version += 1
        self.compacted = self.version

    # --- inside ------------------------------------------------------------------------------

    def _next(self, kind: str, before: Item, item: Item, part: str) -> Item:
        version = item["metadata"].get("resourceVersion")
        if version and version != before["metadata"]["resourceVersion"]:
            raise StatusError(
                409, "Conflict", f'{kind} "{before["metadata"]["name"]}" has been modified'
            )
        if part == "status":
            after = copy.deepcopy(before)
            after["status"] = copy.deepcopy(item.get("status", {}))
        else:
            after = copy.deepcopy(item)
            if kind in _STATUS_KINDS:
                after["status"] = copy.deepcopy(before.get("status", {}))
            for key in ("uid", "creationTimestamp", "deletionTimestamp"):
                after["metadata"].pop(key, None)
                if key in before["metadata"]:
                    after["metadata"][key] = before["metadata"][key]
        drop_disabled(kind, after, self.gates)
        validate(kind, before, after)
        after["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
        return after

    def _change(self, kind: str, name: Name, before: Item, after: Item) -> Item:
        if after == before:
            return before
        if "deletionTimestamp" in after["metadata"] and not after["metadata"].get("finalizers"):
            return self._remove(kind, name, after)
        return self._store(kind, name, after, "MODIFIED")

    def _store(self, kind: str, name: Name, item: Item, event: str) -> Item:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self._items.setdefault(kind, {})[name] = item
        self._record(kind, event, item)
        return item

    def _remove(self, kind: str, name: Name, item: Item) -> Item:
        self.version += 1
        gone = copy.deepcopy(item)
        gone["metadata"]["resourceVersion"] = str(self.version)
        del self._items[kind][name]
        for key in [key for key in self._owners if key[:2] == (kind, name)]:
            del self._owners[key]
        self._record(kind, "DELETED", gone)
        return gone

    def _record(self, kind: str, event: str, item: Item) -> None:
        line = json.dumps({"type": event, "object": item}).encode() + b"\n"
        change = Change(self.version, kind, event, item, line)
        self._history.append(change)
        while len(self._history) > HISTORY_EVENTS_MAX:
            self.compacted = self._history.popleft().version
        for watch, wanted in list(self._watches.items()):
            if wanted != kind:
                continue
            if watch.qsize() >= _WATCH_BACKLOG_MAX - 1:
                self.close_watch(watch)
                watch.put_nowait(None)
            else:
                watch.put_nowait(change)
        for listener in self._listeners:
            listener(change)

    def _owners_of(self, kind: str, name: Name, part: str) -> server_side_apply.Owners:
        return self._owners.setdefault((kind, name, part), {})


def merged(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = copy.deepcopy(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def now_text() -> str:
    """The time as Kubernetes writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _scoped(kind: str, body: Item, part: str) -> Item:
    """What of an applied body counts: the status, or all but the status."""
    if part == "status":
        return {"metadata": {}, "status": body.get("status", {})}
    if kind in _STATUS_KINDS:
        return {key: value for key, value in body.items() if key != "status"}
    return body
