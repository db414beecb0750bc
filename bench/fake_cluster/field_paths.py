"""Fields of an object by path, with the keys of lists that are maps or sets.

A path is a tuple of strings (keys of objects) and of tuples (keys of list items):
("status", "devices", (("device", "a"), ...), "conditions", (("type", "Ready"),), "status").
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

Step = str | tuple[tuple[str, str], ...]
Path = tuple[Step, ...]

# Lists that server-side apply merges by key; every other list is one value (atomic).
_MAP_LISTS: Final[dict[tuple[str, ...], tuple[str, ...]]] = {
    ("status", "devices"): ("driver", "device", "pool", "shareID"),
    ("status", "devices", "conditions"): ("type",),
    ("status", "conditions"): ("type",),
    ("status", "reservedFor"): ("uid",),
    ("metadata", "ownerReferences"): ("uid",),
}
_SET_LISTS: Final = {("metadata", "finalizers")}
# Free-form values that belong to one manager as a whole.
_ATOMIC: Final = {("status", "devices", "data"), ("status", "allocation"), ("spec", "devices")}
_SET_KEY: Final = "="


def item_key(names: tuple[str, ...], item: Any) -> Step | None:
    """The key of a list's item, None where the list is one value."""
    if names in _SET_LISTS:
        return ((_SET_KEY, str(item)),)
    keys = _MAP_LISTS.get(names)
    if keys is None:
        return None
    return tuple((key, str(item.get(key, ""))) for key in keys)


def leaves(value: Any, path: Path = (), names: tuple[str, ...] = ()) -> Iterator[tuple[Path, Any]]:
    """Every leaf below `value` with its path. Empty objects are leaves."""
    if isinstance(value, dict) and value and names not in _ATOMIC:
        for key, child in value.items():
            yield from leaves(child, (*path, key), (*names, key))
    elif isinstance(value, list) and value and item_key(names, value[0]) is not None:
        for item in value:
            step = item_key(names, item)
            if step is None:
                raise AssertionError(f"{names}: items without keys")
            if step[0][0] == _SET_KEY:
                yield (*path, step), item
            else:
                yield from leaves(item, (*path, step), names)
    else:
        yield path, value


def put(target: dict[str, Any], path: Path, value: Any) -> None:
    """Sets a leaf; what leads to it is made."""
    here: Any = target
    for step, following in zip(path, (*path[1:], None), strict=True):
        if isinstance(step, str):
            if following is None:
                here[step] = value
            else:
                empty: Any = {} if isinstance(following, str) else []
                if not isinstance(here.get(step), type(empty)):
                    here[step] = empty
                here = here[step]
        else:
            here = _list_item(here, step, value)


def remove(target: dict[str, Any], path: Path) -> None:
    """Removes a leaf, and list items and objects that are empty without it."""
    trail: list[tuple[Any, Step]] = []
    here: Any = target
    for step in path:
        trail.append((here, step))
        here = here.get(step) if isinstance(step, str) else _found(here, step)
        if here is None:
            return
    for index, (parent, step) in enumerate(reversed(trail)):
        child = parent.get(step) if isinstance(step, str) else _found(parent, step)
        if index > 0 and not _is_empty(child, step):
            return
        if isinstance(step, str):
            del parent[step]
        else:
            parent.remove(child)


def _is_empty(child: Any, step: Step) -> bool:
    if isinstance(step, str) or not isinstance(child, dict):
        return not child
    # Nothing left but the keys that told it apart.
    return set(child) <= {key for key, _ in step}


def _list_item(items: list[Any], step: tuple[tuple[str, str], ...], value: Any) -> Any:
    found = _found(items, step)
    if found is None:
        found = value if step[0][0] == _SET_KEY else {k: v for k, v in step if v}
        items.append(found)
    return found


def _found(items: Any, step: tuple[tuple[str, str], ...]) -> Any:
    for item in items or ():
        if step[0][0] == _SET_KEY:
            if str(item) == step[0][1]:
                return item
        elif all(str(item.get(key, "")) == text for key, text in step):
            return item
    return None
