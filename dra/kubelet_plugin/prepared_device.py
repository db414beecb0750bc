"""What a claim's status says that a pod on this node gets, checked against what is on the node."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from hymcache.dra import names
from hymcache.dra.cdi import read_cdi_spec
from hymcache.dra.claim import AllocatedDevice, Claim
from hymcache.dra.cluster import JsonObject
from hymcache.errors import ConfigError, Corrupt, HymcacheError


class NotAttached(HymcacheError):
    """The region is not there yet; the next change of the claim may bring it."""


class AttachFailed(HymcacheError):
    """The driver's controller gave up on this device for now; the text says why."""


class PreparedDevice(BaseModel):
    """A device of a claim as the kubelet is told of it.

    `cdi_names` is empty for a pod that runs without the device, as its claim allows.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    request: str
    pool: str
    device: str
    share_id: str
    cdi_names: tuple[str, ...]


def read_devices(claim: Claim, node: str, cdi_root: Path) -> tuple[PreparedDevice, ...]:
    """The devices that a pod with this claim gets on the node.

    Raises NotAttached, AttachFailed, and Corrupt for a CDI spec that is not ours.
    """
    wanted = claim.wanted
    if not wanted:
        raise NotAttached(f"claim {claim.namespace}/{claim.name} is not allocated by this driver")
    return tuple(_read_device(claim, device, node, cdi_root) for device in wanted)


def missing_parts(cdi_names: Iterable[str], cdi_root: Path) -> str | None:
    """What of a prepared device is not there (any more), None if all is. Raises Corrupt."""
    for name in cdi_names:
        kind, _, allocation_id = name.partition("=")
        if kind != names.CDI_KIND or not allocation_id:
            raise Corrupt(f"{name}: not a CDI device of the kind {names.CDI_KIND}")
        try:
            spec = read_cdi_spec(cdi_root, allocation_id)
        except (ValueError, ConfigError) as error:
            raise Corrupt(str(error)) from error
        if spec is None:
            return f"no {cdi_root / allocation_id}.json: the host agent has not made {name}"
        # A plugin in a container has the host's /dev, but not the folder of simulated devices.
        if not spec.is_file and not Path(spec.host_path).is_char_device():
            return f"{spec.host_path} is gone: the host agent has to make {name} again"
    return None


def _read_device(
    claim: Claim, device: AllocatedDevice, node: str, cdi_root: Path
) -> PreparedDevice:
    entry = _published(claim, device)
    data = entry.get("data") or {}
    cdi_names = tuple(str(name) for name in data.get(names.DATA_CDI_DEVICES) or ())
    hosts = data.get(names.DATA_MAPPED_HOSTS) or ()
    if not cdi_names or node not in hosts:
        if cdi_names and hosts and claim.wish(device.request).any_host_will_do:
            return _prepared(device, ())
        _raise_unattached(entry, node)
    missing = missing_parts(cdi_names, cdi_root)
    if missing is not None:
        raise NotAttached(missing)
    return _prepared(device, cdi_names)


def _published(claim: Claim, device: AllocatedDevice) -> JsonObject:
    key = (device.pool, device.device, device.share_id)
    for entry in claim.published:
        if (entry.get("pool"), entry.get("device"), entry.get("shareID", "")) == key:
            return entry
    return {}


def _raise_unattached(entry: JsonObject, node: str) -> None:
    conditions = {c["type"]: c for c in entry.get("conditions") or ()}
    failed = conditions.get(names.CONDITION_ATTACH_FAILED) or {}
    if failed.get("status") == "True":
        raise AttachFailed(f"the region cannot be attached: {failed.get('message', '')}")
    attached = conditions.get(names.CONDITION_ATTACHED) or {}
    told = attached.get("message") or "the controller has not composed it"
    raise NotAttached(f"the region is not attached to node {node} yet: {told}")


def _prepared(device: AllocatedDevice, cdi_names: tuple[str, ...]) -> PreparedDevice:
    return PreparedDevice(
        request=device.request,
        pool=device.pool,
        device=device.device,
        share_id=device.share_id,
        cdi_names=cdi_names,
    )
