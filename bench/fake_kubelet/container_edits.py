"""What a container runtime makes of CDI device names: the edits of all specs that describe them."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_KIND: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?/[A-Za-z0-9_.-]+", re.ASCII)
_DEVICE: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?", re.ASCII)
# What containerd 1.7 knows (CDI library 0.6).
_VERSIONS: Final = frozenset({"0.3.0", "0.4.0", "0.5.0", "0.6.0"})


@dataclass(frozen=True)
class ContainerEdits:
    """What a container gets: environment, device nodes and mounts, the last two by host path."""

    env: dict[str, str]
    device_nodes: dict[str, Path]
    mounts: dict[str, Path]


def resolve_cdi(root: Path, names: Iterable[str]) -> ContainerEdits:
    """The edits of all devices. Raises LookupError and ValueError where a container would fail."""
    known = dict(_devices(root))
    edits = ContainerEdits({}, {}, {})
    for name in names:
        if name not in known:
            raise LookupError(f"unresolvable CDI devices {name}")
        _add(edits, known[name])
    return edits


def _devices(root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(root.glob("*.json")):
        spec = json.loads(path.read_text())
        if spec["cdiVersion"] not in _VERSIONS or not _KIND.fullmatch(spec["kind"]):
            raise ValueError(f"{path}: invalid CDI spec")
        for device in spec["devices"]:
            if not _DEVICE.fullmatch(device["name"]):
                raise ValueError(f"{path}: invalid device name {device['name']}")
            yield f"{spec['kind']}={device['name']}", device["containerEdits"]


def _add(edits: ContainerEdits, found: dict[str, Any]) -> None:
    for entry in found.get("env", ()):
        name, _, value = entry.partition("=")
        edits.env[name] = value
    for node in found.get("deviceNodes", ()):
        host_path = Path(node.get("hostPath", node["path"]))
        if not stat.S_ISCHR(host_path.stat().st_mode):
            raise ValueError(f"{host_path}: not a device node")
        edits.device_nodes[node["path"]] = host_path
    for mount in found.get("mounts", ()):
        host_path = Path(mount["hostPath"])
        if not host_path.exists():
            raise ValueError(f"{host_path}: no such file to mount")
        edits.mounts[mount["containerPath"]] = host_path
