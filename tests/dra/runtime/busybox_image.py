"""An image for containers of tests: this machine's static busybox, as an OCI archive."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

NAME = "localhost/busybox:test"
BUSYBOX = Path("/bin/busybox")
_PROGRAMS = ("sh", "cat", "dd", "sleep", "stat", "env", "id", "ls", "wc", "printf")


def write_image(path: Path) -> None:
    """Writes the archive. Its containers sleep unless they are told what to do."""
    layer = _layer()
    packed = gzip.compress(layer, mtime=0)
    configuration = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": ["/bin/sleep", "86400"], "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
    }
    with tarfile.open(path, "w") as archive:
        config = _add_blob(archive, json.dumps(configuration).encode(), "config.v1+json")
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": config,
            "layers": [_add_blob(archive, packed, "layer.v1.tar+gzip")],
        }
        described = _add_blob(archive, json.dumps(manifest).encode(), "manifest.v1+json")
        described["annotations"] = {"io.containerd.image.name": NAME}
        index = {"schemaVersion": 2, "manifests": [described]}
        _add(archive, "index.json", json.dumps(index).encode())
        _add(archive, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')


def _layer() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as layer:
        for folder in ("bin", "dev", "etc", "proc", "sys", "tmp"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            layer.addfile(entry)
        _add(layer, "bin/busybox", BUSYBOX.read_bytes(), 0o755)
        for program in _PROGRAMS:
            entry = tarfile.TarInfo(f"bin/{program}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            layer.addfile(entry)
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    archive.addfile(entry, io.BytesIO(content))


def _add_blob(archive: tarfile.TarFile, content: bytes, kind: str) -> dict[str, Any]:
    digest = _digest(content)
    _add(archive, f"blobs/{digest.replace(':', '/')}", content)
    return {
        "mediaType": f"application/vnd.oci.image.{kind}",
        "digest": digest,
        "size": len(content),
    }


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
