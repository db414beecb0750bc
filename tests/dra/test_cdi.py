"""The CDI spec of an allocation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hymcache.dra.cdi import ContainerDevice, read_cdi_spec, remove_cdi_spec, write_cdi_spec
from hymcache.errors import Corrupt

_ID = "3fa85f64-5717-4562-b3fc-2c963f66afa6"
_NODE = ContainerDevice(_ID, "/dev/dax0.1", "/dev/dax0.1", 512 << 30)
_FILE = ContainerDevice(_ID, f"/dev/cxl-{_ID}", f"/sim/hosts/a/{_ID}", 2 << 20, is_file=True)


def test_the_spec_of_a_device_node(tmp_path: Path) -> None:
    path = write_cdi_spec(tmp_path, _NODE)
    assert path == tmp_path / f"{_ID}.json"
    assert path.stat().st_mode & 0o777 == 0o644
    assert json.loads(path.read_text()) == {
        "cdiVersion": "0.5.0",
        "kind": "cxl.seagate.com/dax",
        "devices": [
            {
                "name": _ID,
                "containerEdits": {
                    "deviceNodes": [
                        {"path": "/dev/dax0.1", "type": "c", "permissions": "rw", "fileMode": 438}
                    ],
                    "env": ["CXL_DAX_DEVICE=/dev/dax0.1", f"CXL_DAX_SIZE={512 << 30}"],
                },
            }
        ],
    }


def test_the_spec_of_a_simulated_device_mounts_a_file(tmp_path: Path) -> None:
    edits = json.loads(write_cdi_spec(tmp_path, _FILE).read_text())["devices"][0]["containerEdits"]
    assert edits["mounts"] == [
        {
            "hostPath": _FILE.host_path,
            "containerPath": f"/dev/cxl-{_ID}",
            "options": ["rw", "bind"],
        }
    ]
    assert "deviceNodes" not in edits


@pytest.mark.parametrize("device", [_NODE, _FILE])
def test_what_is_written_is_read(tmp_path: Path, device: ContainerDevice) -> None:
    write_cdi_spec(tmp_path / "cdi", device)
    assert read_cdi_spec(tmp_path / "cdi", _ID) == device
    assert device.cdi_name == f"cxl.seagate.com/dax={_ID}"


def test_a_removed_spec_is_gone(tmp_path: Path) -> None:
    assert not remove_cdi_spec(tmp_path, _ID)
    write_cdi_spec(tmp_path, _NODE)
    assert remove_cdi_spec(tmp_path, _ID)
    assert read_cdi_spec(tmp_path, _ID) is None


@pytest.mark.parametrize("version", ["0.5.0", "0.6.0", "0.8.0", "1.0.0", "1.1.0"])
def test_versions_of_cdi_that_have_the_same_fields_are_read(tmp_path: Path, version: str) -> None:
    _change(tmp_path, lambda spec: spec.update(cdiVersion=version))
    assert read_cdi_spec(tmp_path, _ID) == _NODE


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda spec: spec.update(cdiVersion="0.4.0"), "cdiVersion '0.4.0' is not one of 0.5.0"),
        (lambda spec: spec.update(cdiVersion="2.0.0"), "cdiVersion '2.0.0'"),
        (lambda spec: spec.update(kind="nvidia.com/gpu"), "describes nvidia.com/gpu="),
        (lambda spec: spec["devices"][0].update(name="other"), "=other, not"),
        (lambda spec: spec.update(devices=[]), "devices"),
        (lambda spec: _edits(spec).update(deviceNodes=[]), "not one device"),
        (lambda spec: _edits(spec).update(env=[]), "CXL_DAX_SIZE"),
        (lambda spec: _edits(spec)["deviceNodes"][0].update(path="/dev/x"), "CXL_DAX_DEVICE"),
    ],
)
def test_a_spec_that_is_not_this_allocations_is_refused(
    tmp_path: Path, change: Any, told: str
) -> None:
    _change(tmp_path, change)
    with pytest.raises(Corrupt) as caught:
        read_cdi_spec(tmp_path, _ID)
    assert told in str(caught.value)


def test_half_a_spec_is_refused(tmp_path: Path) -> None:
    path = write_cdi_spec(tmp_path, _NODE)
    path.write_text(path.read_text()[:100])
    with pytest.raises(Corrupt, match="have the host agent write it"):
        read_cdi_spec(tmp_path, _ID)


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden"])
def test_an_id_that_is_a_path_is_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not an allocation id"):
        read_cdi_spec(tmp_path, name)


def _change(root: Path, change: Any) -> None:
    path = write_cdi_spec(root, _NODE)
    spec = json.loads(path.read_text())
    change(spec)
    path.write_text(json.dumps(spec))


def _edits(spec: dict[str, Any]) -> dict[str, Any]:
    edits: dict[str, Any] = spec["devices"][0]["containerEdits"]
    return edits
