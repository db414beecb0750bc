"""Preparing without processes: the claim's versions come from a script, the devices from files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from hymcache.dra import names
from hymcache.dra.cdi import ContainerDevice, write_cdi_spec
from hymcache.dra.cluster import JsonObject, ObjectMissing
from hymcache.dra.kubelet_plugin.checkpoint import Checkpoint
from hymcache.dra.kubelet_plugin.device_health import DeviceHealth
from hymcache.dra.kubelet_plugin.prepared_device import AttachFailed, NotAttached, PreparedDevice
from hymcache.dra.kubelet_plugin.preparer import (
    ClaimName,
    ClaimPreparer,
    ClaimReplaced,
    PrepareOptions,
)
from hymcache.dra.state_file import StateFile

_DRIVER, _NODE = "cxl.example.com", "node-1"
_NAME = ClaimName("default", "kv", "uid-1")


class ScriptedClaims:
    """Tells the versions of one claim in order, then nothing more."""

    def __init__(self, *versions: JsonObject | Exception) -> None:
        self.versions = versions
        self.reads = 0

    async def follow(self, namespace: str, name: str) -> AsyncGenerator[JsonObject, None]:
        assert (namespace, name) == (_NAME.namespace, _NAME.name)
        self.reads += 1
        for version in self.versions:
            if isinstance(version, Exception):
                raise version
            yield version
        await asyncio.Event().wait()


class Rig:
    """A preparer with its files."""

    def __init__(self, folder: Path, *versions: JsonObject | Exception) -> None:
        self.claims = ScriptedClaims(*versions)
        self.cdi_root = folder / "cdi"
        self.state = StateFile(folder / "checkpoint.json", Checkpoint)
        self.health = DeviceHealth(self.state, self.cdi_root, now_s=lambda: 1000.5)
        self.preparer = ClaimPreparer(
            PrepareOptions(_DRIVER, _NODE, self.cdi_root), self.state, self.claims
        )
        self.device = folder / "device"
        self.device.touch()

    def make_device(self, allocation_id: str) -> None:
        device = ContainerDevice(allocation_id, "/dev/x", str(self.device), 4096, is_file=True)
        write_cdi_spec(self.cdi_root, device)

    def prepare(self, left_s: float | None = 5.2) -> tuple[PreparedDevice, ...]:
        return asyncio.run(self.preparer.prepare(_NAME, left_s))


def _claim(*entries: JsonObject, uid: str = "uid-1", results: int = 1) -> JsonObject:
    allocated = [
        {"driver": _DRIVER, "request": f"r{i}", "pool": "p", "device": "d", "shareID": f"s{i}"}
        for i in range(results)
    ]
    other = {"driver": "gpu.example.com", "request": "gpu", "pool": "p", "device": "d"}
    return {
        "metadata": {"namespace": "default", "name": "kv", "uid": uid, "resourceVersion": "1"},
        "spec": {"devices": {"requests": []}},
        "status": {
            "allocation": {"devices": {"results": [*allocated, other]}},
            "devices": list(entries),
        },
    }


def _entry(number: int, **data: Any) -> JsonObject:
    told = {names.DATA_CDI_DEVICES: [names.cdi_device_name(f"a{number}")]}
    return {
        "driver": _DRIVER,
        "pool": "p",
        "device": "d",
        "shareID": f"s{number}",
        "data": {**told, names.DATA_MAPPED_HOSTS: [_NODE], **data},
    }


def test_each_request_gets_the_device_of_its_share(tmp_path: Path) -> None:
    rig = Rig(tmp_path, _claim(_entry(1), _entry(0), results=2))
    rig.make_device("a0")
    rig.make_device("a1")
    assert [(d.request, d.share_id, d.cdi_names) for d in rig.prepare()] == [
        ("r0", "s0", ("cxl.seagate.com/dax=a0",)),
        ("r1", "s1", ("cxl.seagate.com/dax=a1",)),
    ]


def test_half_a_claim_is_not_prepared(tmp_path: Path) -> None:
    rig = Rig(tmp_path, _claim(_entry(0), results=2))
    rig.make_device("a0")
    with pytest.raises(NotAttached, match="not attached to node node-1 yet"):
        rig.prepare()
    assert rig.state.load().claims == {}
    assert rig.preparer.counts.failed == 1


def test_the_version_that_has_it_counts(tmp_path: Path) -> None:
    elsewhere = _entry(0, **{names.DATA_MAPPED_HOSTS: ["node-2"]})
    rig = Rig(tmp_path, _claim(), _claim(elsewhere), _claim(_entry(0)))
    rig.make_device("a0")
    assert rig.prepare(None)[0].cdi_names == ("cxl.seagate.com/dax=a0",)


def test_what_was_told_before_is_told_without_a_request(tmp_path: Path) -> None:
    rig = Rig(tmp_path, _claim(_entry(0)))
    rig.make_device("a0")
    first = rig.prepare()
    assert (rig.prepare(), rig.claims.reads) == (first, 1)
    # A device that is gone is asked for anew, and not given out.
    (rig.cdi_root / "a0.json").unlink()
    with pytest.raises(NotAttached, match="has not made cxl"):
        rig.prepare()
    assert rig.claims.reads == 2
    asyncio.run(rig.preparer.unprepare(_NAME))
    assert rig.state.load().claims == {}


@pytest.mark.parametrize(
    ("versions", "error", "told"),
    [
        ((_claim(uid="uid-2"),), ClaimReplaced, "has the UID uid-2"),
        ((ObjectMissing("no", 404),), ClaimReplaced, "default/kv is gone"),
        ((_claim(results=0),), NotAttached, "is not allocated by this driver"),
        (
            (
                _claim(
                    {
                        **_entry(0, mappedHosts=[]),
                        "conditions": [
                            {
                                "type": names.CONDITION_ATTACH_FAILED,
                                "status": "True",
                                "message": "no port",
                            }
                        ],
                    }
                ),
            ),
            AttachFailed,
            "no port",
        ),
    ],
)
def test_why_a_claim_is_not_prepared_is_told(
    tmp_path: Path, versions: tuple[Any, ...], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        Rig(tmp_path, *versions).prepare()


def test_one_fault_of_a_device_that_several_claims_use_is_its_health(tmp_path: Path) -> None:
    rig = Rig(tmp_path, _claim(_entry(0), _entry(1), results=2))
    rig.make_device("a0")
    rig.make_device("a1")
    rig.prepare()
    (report,) = rig.health.look()
    assert (report.pool, report.device, report.fault, report.updated_s) == ("p", "d", None, 1000)
    (rig.cdi_root / "a1.json").unlink()
    (report,) = rig.health.look()
    assert report.fault is not None
    assert "cxl.seagate.com/dax=a1" in report.fault
