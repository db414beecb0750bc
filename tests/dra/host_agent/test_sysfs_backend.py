"""Splitting device-dax regions, on a kernel that is emulated to its error codes."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from hymcache.dra.cdi import ContainerDevice
from hymcache.dra.host_agent.backend import PhysicalRange
from hymcache.dra.host_agent.resources import DaxConflict
from hymcache.dra.host_agent.sysfs_backend import SysfsBackend
from hymcache.errors import ConfigError, DeviceError
from tests.dra.host_agent.conftest import Hold
from tests.dra.host_agent.emulated_sysfs import GIB, MIB, EmulatedSysfs

_A = PhysicalRange(4 * GIB + 256 * MIB, 256 * MIB)
_B = PhysicalRange(4 * GIB + 512 * MIB, 2 * MIB)
_REGION = "devices/platform/hmem.0/dax_region"


def test_a_range_becomes_a_device_in_the_kernels_steps(
    backend: SysfsBackend, kernel: EmulatedSysfs, tmp_path: Path
) -> None:
    device = backend.create("a", _A)
    node = tmp_path / "dev/dax0.1"
    assert device == ContainerDevice("a", "/dev/dax0.1", str(node), 256 * MIB)
    assert node.is_char_device()
    assert kernel.writes == [
        ("bus/dax/drivers/device_dax/unbind", "dax0.0"),
        ("bus/dax/devices/dax0.0/size", "0"),
        (f"{_REGION}/create", "1"),
        ("bus/dax/devices/dax0.1/mapping", "110000000-11fffffff"),
        ("bus/dax/drivers/device_dax/new_id", "dax0.1"),
    ]


def test_a_device_goes_in_the_kernels_steps(backend: SysfsBackend, kernel: EmulatedSysfs) -> None:
    backend.create("a", _A)
    kernel.writes.clear()
    backend.remove("a", _A)
    assert kernel.writes == [
        ("bus/dax/drivers/device_dax/unbind", "dax0.1"),
        ("bus/dax/devices/dax0.1/size", "0"),
        (f"{_REGION}/delete", "dax0.1"),
        ("bus/dax/drivers/device_dax/remove_id", "dax0.1"),
    ]
    assert list(kernel.devices) == ["dax0.0"]
    assert backend.regions()[0].available_bytes == GIB


def test_both_may_be_repeated(backend: SysfsBackend, kernel: EmulatedSysfs) -> None:
    assert backend.create("a", _A) == backend.create("a", _A)
    assert len(kernel.devices) == 2
    backend.remove("a", _A)
    backend.remove("a", _A)
    assert backend.identify("a", _A) is None


def test_ranges_are_exact_and_independent(backend: SysfsBackend, kernel: EmulatedSysfs) -> None:
    backend.create("a", _A)
    backend.create("b", _B)
    assert kernel.devices["dax0.1"].ranges == [(_A.start, _A.end - 1)]
    assert kernel.devices["dax0.2"].ranges == [(_B.start, _B.end - 1)]
    backend.remove("a", _A)
    assert backend.create("b", _B).container_path == "/dev/dax0.2"
    # The number is free again, the range as well.
    assert backend.create("c", _A).container_path == "/dev/dax0.1"


def test_the_first_device_of_the_kernel_may_be_the_allocation(
    backend: SysfsBackend, kernel: EmulatedSysfs
) -> None:
    whole = PhysicalRange(4 * GIB, GIB)
    assert backend.create("a", whole).container_path == "/dev/dax0.0"
    assert kernel.writes == []
    backend.remove("a", whole)
    assert kernel.devices["dax0.0"].size == 0
    assert backend.create("a", whole).container_path == "/dev/dax0.1"


@pytest.mark.parametrize("cxl", [False, True])
def test_the_region_tells_where_it_is(tmp_path: Path, cxl: bool) -> None:
    kernel = EmulatedSysfs(tmp_path / "dev", cxl=cxl)
    backend = SysfsBackend(kernel, tmp_path / "dev")
    (region,) = backend.regions()
    assert (region.range, region.available_bytes) == (PhysicalRange(4 * GIB, GIB), 0)
    backend.create("a", _A)
    (region,) = backend.regions()
    assert (region.range, region.available_bytes) == (PhysicalRange(4 * GIB, GIB), 768 * MIB)
    kernel.close()


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (PhysicalRange(4 * GIB + MIB, 2 * MIB), "multiples of 2 MiB"),
        (PhysicalRange(4 * GIB, 3 * MIB), "multiples of 2 MiB"),
        (PhysicalRange(5 * GIB, 2 * MIB), "no device-dax region of this host has the range"),
        (PhysicalRange(4 * GIB, 2 * GIB), "there are 0x100000000-0x13fffffff"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_changed(
    backend: SysfsBackend, kernel: EmulatedSysfs, wanted: PhysicalRange, told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        backend.create("a", wanted)
    assert told in str(caught.value)
    assert kernel.writes == []


def test_the_regions_own_alignment_counts(tmp_path: Path) -> None:
    kernel = EmulatedSysfs(tmp_path / "dev", align=GIB, size=4 * GIB)
    with pytest.raises(ConfigError, match="multiples of 1024 MiB"):
        SysfsBackend(kernel, tmp_path / "dev").create("a", _A)
    kernel.close()


def test_bytes_of_another_device_are_refused(backend: SysfsBackend, kernel: EmulatedSysfs) -> None:
    backend.create("a", _A)
    before = list(kernel.writes)
    with pytest.raises(DaxConflict, match=r"dax0\.1 has 0x110000000-0x11fffffff"):
        backend.create("b", PhysicalRange(_A.end - 2 * MIB, 4 * MIB))
    assert kernel.writes == before


def test_the_kernels_device_is_not_taken_from_who_holds_it(
    backend: SysfsBackend, kernel: EmulatedSysfs, hold: Hold, tmp_path: Path
) -> None:
    holder = hold(tmp_path / "dev/dax0.0")
    with pytest.raises(DaxConflict) as caught:
        backend.create("a", _A)
    assert "dax0.0 has the whole region and is held by" in str(caught.value)
    assert f"pid {holder.pid}" in str(caught.value)
    assert kernel.writes == []
    holder.end()
    backend.create("a", _A)


def test_system_memory_is_not_taken(tmp_path: Path) -> None:
    kernel = EmulatedSysfs(tmp_path / "dev", driver="kmem")
    with pytest.raises(DaxConflict, match="reconfigure-device --mode=devdax"):
        SysfsBackend(kernel, tmp_path / "dev").create("a", _A)
    assert kernel.writes == []


def test_a_device_that_another_driver_got_is_told(
    backend: SysfsBackend, kernel: EmulatedSysfs
) -> None:
    def grab(path: str, value: str) -> None:
        if path.endswith("new_id"):
            kernel._bind(value, "kmem")

    kernel.before_write = grab
    with pytest.raises(DeviceError, match="the driver kmem has it") as caught:
        backend.create("a", _A)
    assert caught.value.errno == errno.EBUSY


def test_an_error_of_new_id_that_did_no_harm_is_passed_over(
    backend: SysfsBackend, kernel: EmulatedSysfs
) -> None:
    def fail_after_binding(path: str, value: str) -> None:
        if path.endswith("new_id"):
            kernel._ids["device_dax"].add(value)
            assert kernel._bind(value, "device_dax")
            raise DeviceError("/sys/...: Input/output error", errno.EIO)

    kernel.before_write = fail_after_binding
    assert backend.create("a", _A).container_path == "/dev/dax0.1"


def test_a_failed_split_leaves_nothing_behind(backend: SysfsBackend, kernel: EmulatedSysfs) -> None:
    def refuse_binding(path: str, _value: str) -> None:
        if path.endswith(("new_id", "/bind")):
            raise DeviceError(f"/sys/{path}: Cannot allocate memory", errno.ENOMEM)

    kernel.before_write = refuse_binding
    with pytest.raises(DeviceError, match="Cannot allocate memory"):
        backend.create("a", _A)
    assert list(kernel.devices) == ["dax0.0"]
    kernel.before_write = lambda _path, _value: None
    backend.create("a", _A)


def test_the_device_of_a_creation_that_was_broken_off_is_used(
    backend: SysfsBackend, kernel: EmulatedSysfs
) -> None:
    backend.create("a", _A)
    kernel.write(f"{_REGION}/create", "1")
    assert backend.create("b", _B).container_path == "/dev/dax0.2"
    assert len(kernel.devices) == 3


def test_without_the_driver_or_a_region_it_is_told(tmp_path: Path) -> None:
    class Empty(EmulatedSysfs):
        def names(self, path: str) -> tuple[str, ...]:
            return () if path.endswith("devices") else super().names(path)

    class NoModule(EmulatedSysfs):
        def names(self, path: str) -> tuple[str, ...]:
            return ()

    for number, (kind, told) in enumerate(
        ((Empty, "no device-dax region"), (NoModule, "modprobe device_dax"))
    ):
        nodes = tmp_path / str(number)
        backend = SysfsBackend(kind(nodes), nodes, is_root=True)
        with pytest.raises(ConfigError, match=told):
            backend.check()
