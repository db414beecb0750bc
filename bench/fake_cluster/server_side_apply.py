"""Server-side apply: who manages which fields, and what becomes of an object when one applies."""

from __future__ import annotations

import copy
from typing import Any, Final

from hymcache.bench.fake_cluster.field_paths import Path, leaves, put, remove

_NOT_MANAGED: Final = ("apiVersion", "kind")
_IDENTITY: Final = frozenset(
    {"name", "namespace", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp"}
)
Owners = dict[str, set[Path]]


class FieldConflict(Exception):
    """Another manager has the field with another value."""


def apply(
    live: dict[str, Any], body: dict[str, Any], manager: str, owners: Owners, *, force: bool
) -> dict[str, Any]:
    """The object after `manager` applied `body`; `owners` is brought up to date.

    Raises FieldConflict unless `force`.
    """
    wanted = dict(_managed_leaves(body))
    current = dict(_managed_leaves(live))
    changed = {p for p, value in wanted.items() if p not in current or current[p] != value}
    for other, paths in owners.items():
        if other == manager:
            continue
        lost = paths & changed
        if lost and not force:
            raise FieldConflict(f'conflict with "{other}": {sorted(map(str, lost))[0]}')
        paths.difference_update(lost)
    result = copy.deepcopy(live)
    kept_by_others = set().union(*(paths for name, paths in owners.items() if name != manager))
    for path in owners.get(manager, set()) - wanted.keys() - kept_by_others:
        remove(result, path)
    for path, value in wanted.items():
        put(result, path, copy.deepcopy(value))
    owners[manager] = set(wanted)
    return result


def owned(body: dict[str, Any]) -> set[Path]:
    """The fields that an applied body manages."""
    return {path for path, _ in _managed_leaves(body)}


def written(before: dict[str, Any], after: dict[str, Any], owners: Owners) -> None:
    """Notes a plain update: what it changed or removed is nobody's any more."""
    old = dict(_managed_leaves(before))
    new = dict(_managed_leaves(after))
    touched = {path for path in old if path not in new or new[path] != old[path]}
    for paths in owners.values():
        paths.difference_update(touched)


def _managed_leaves(value: dict[str, Any]) -> list[tuple[Path, Any]]:
    found = []
    for path, leaf in leaves(value):
        if path[0] in _NOT_MANAGED:
            continue
        if path[0] == "metadata" and (len(path) < 2 or path[1] in _IDENTITY):
            continue
        found.append((path, leaf))
    return found
