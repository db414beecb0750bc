"""A kubeconfig file for the fake cluster."""

from __future__ import annotations

import json
from pathlib import Path


def write_kubeconfig(path: Path, server: str) -> None:
    """Writes a file that names the server; anybody may use it."""
    name = "fake"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": name,
        "clusters": [{"name": name, "cluster": {"server": server}}],
        "users": [{"name": name, "user": {}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document), encoding="utf-8")
