"""The CDI spec of an allocation: what a container runtime gives to a container that has it.

One file for each allocation, `<CDI root>/<allocation id>.json`, with one device that is called as
the allocation (arXiv 2609.10790, sections 2.4 and 2.5). The host agent writes it when the device
is there and removes it first when the device is to go; the kubelet plugin reads it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from hymcache.dra.names import CDI_KIND, ENV_DEVICE, ENV_SIZE, cdi_device_name
from hymcache.dra.state_file import remove_durably, write_atomically
from hymcache.errors import ConfigError, Corrupt

# The oldest version in which a device's name may begin with a digit, as a UUID's may: containerd
# 1.7 and CRI-O 1.28 know it. Versions up to 1.x keep its fields.
CDI_VERSION: Final = "0.5.0"
_VERSION: Final = re.compile(r"(?:v?)(0|1)\.([0-9]{1,3})\.([0-9]{1,3})", re.ASCII)
_OLDEST: Final = (0, 5, 0)
_FILE_BYTES_MAX: Final = 64 << 10
# The claim decides which pods get the device; within them no user is shut out.
_NODE_MODE: Final = 0o666


@dataclass(frozen=True, slots=True)
class ContainerDevice:
    """An allocation as a container gets it.

    A device node has the same path on the host. In simulations it is a file (`is_file`), and is
    mounted.
    """

    allocation_id: str
    container_path: str
    host_path: str
    size_bytes: int
    is_file: bool = False

    @property
    def cdi_name(self) -> str:
        """Fully qualified, the same on all hosts of the allocation."""
        return cdi_device_name(self.allocation_id)


class _Model(BaseModel):
    # What a newer agent adds does not keep a plugin from reading it: it passes on only the name.
    model_config = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True)


class _DeviceNode(_Model):
    path: str
    host_path: str | None = None
    type: str | None = None
    permissions: str | None = None
    file_mode: int | None = None


class _Mount(_Model):
    host_path: str
    container_path: str
    options: list[str] | None = None


class _Edits(_Model):
    device_nodes: list[_DeviceNode] | None = None
    mounts: list[_Mount] | None = None
    env: list[str] | None = None


class _Device(_Model):
    name: str
    container_edits: _Edits


class _Spec(_Model):
    cdi_version: str
    kind: str
    devices: list[_Device] = Field(min_length=1, max_length=1)


def write_cdi_spec(root: Path, device: ContainerDevice) -> Path:
    """Writes the spec of an allocation, or replaces it as a whole."""
    path = _spec_path(root, device.allocation_id)
    content = _build_spec(device).model_dump_json(by_alias=True, exclude_none=True, indent=1)
    # Runtimes that do not run as root read it too.
    write_atomically(path, content.encode() + b"\n", mode=0o644)
    return path


def remove_cdi_spec(root: Path, allocation_id: str) -> bool:
    """No new container gets the allocation. Whether there was a spec."""
    return remove_durably(_spec_path(root, allocation_id))


def read_cdi_spec(root: Path, allocation_id: str) -> ContainerDevice | None:
    """What a container would get, None where there is no spec.

    Raises Corrupt for a file that is not the spec of this allocation, or of a version of CDI
    that this program does not know.
    """
    path = _spec_path(root, allocation_id)
    try:
        with path.open("rb") as file:
            raw = file.read(_FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot read it ({error.strerror}); check --cdi-root") from error
    if len(raw) > _FILE_BYTES_MAX:
        raise Corrupt(f"{path}: larger than {_FILE_BYTES_MAX} bytes; not a CDI spec of ours")
    try:
        spec = _Spec.model_validate_json(raw)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in fault["loc"]) or "the file"
        raise Corrupt(f"{path}: {where}: {fault['msg']}; have the host agent write it") from error
    _check_version(path, spec.cdi_version)
    device = spec.devices[0]
    if spec.kind != CDI_KIND or device.name != allocation_id:
        raise Corrupt(
            f"{path}: describes {spec.kind}={device.name}, not {cdi_device_name(allocation_id)}"
        )
    return _container_device(path, device)


def _spec_path(root: Path, allocation_id: str) -> Path:
    if not allocation_id or "/" in allocation_id or allocation_id.startswith("."):
        raise ValueError(f"{allocation_id!r}: not an allocation id")
    return root / f"{allocation_id}.json"


def _build_spec(device: ContainerDevice) -> _Spec:
    env = [f"{ENV_DEVICE}={device.container_path}", f"{ENV_SIZE}={device.size_bytes}"]
    if device.is_file:
        mount = _Mount(
            host_path=device.host_path,
            container_path=device.container_path,
            options=["rw", "bind"],
        )
        edits = _Edits(mounts=[mount], env=env)
    else:
        # Major and minor are left to the runtime: it looks at the node when a container starts,
        # and they change with a restart of the host.
        host_path = device.host_path if device.host_path != device.container_path else None
        node = _DeviceNode(
            path=device.container_path,
            host_path=host_path,
            type="c",
            permissions="rw",
            file_mode=_NODE_MODE,
        )
        edits = _Edits(device_nodes=[node], env=env)
    named = _Device(name=device.allocation_id, container_edits=edits)
    return _Spec(cdi_version=CDI_VERSION, kind=CDI_KIND, devices=[named])


def _check_version(path: Path, version: str) -> None:
    match = _VERSION.fullmatch(version)
    if match is None or tuple(map(int, match.groups())) < _OLDEST:
        raise Corrupt(
            f"{path}: cdiVersion {version!r} is not one of {CDI_VERSION} to 1.x; "
            "the host agent is of another version"
        )


def _container_device(path: Path, device: _Device) -> ContainerDevice:
    env = dict(entry.split("=", 1) for entry in device.container_edits.env or () if "=" in entry)
    size = env.get(ENV_SIZE, "")
    nodes, mounts = device.container_edits.device_nodes or [], device.container_edits.mounts or []
    if len(nodes) + len(mounts) != 1 or not (size.isascii() and size.isdigit()):
        raise Corrupt(f"{path}: not one device with {ENV_SIZE}; have the host agent write it")
    if mounts:
        container_path, host_path = mounts[0].container_path, mounts[0].host_path
    else:
        container_path, host_path = nodes[0].path, nodes[0].host_path or nodes[0].path
    if env.get(ENV_DEVICE) != container_path:
        raise Corrupt(f"{path}: {ENV_DEVICE} is not {container_path}; have the agent write it")
    return ContainerDevice(device.name, container_path, host_path, int(size), bool(mounts))
