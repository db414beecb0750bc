"""Regions in containers: a real containerd, with the CDI specs that the host agent writes."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import pytest

from hymcache.dra.host_agent.allocations import HostAllocations, HostState
from hymcache.dra.host_agent.resources import DaxDevice, Holder
from hymcache.dra.host_agent.sysfs_backend import SysfsBackend
from hymcache.dra.state_file import StateFile
from tests.dra.host_agent.emulated_sysfs import GIB, MIB, EmulatedSysfs
from tests.dra.kubelet.node import Node
from tests.dra.kubelet.plugin_process import DRIVER
from tests.dra.runtime.containerd import Containerd, Pod, reason_not_to_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

_HOLD = ["sh", "-c", "exec 3<>$CXL_DAX_DEVICE; exec sleep 86400"]


class FullNodes(EmulatedSysfs):
    """Its device nodes are those of /dev/full, which no program has open: containers can."""

    def make_node(self, path: Path) -> Callable[[], None]:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 7))
        return lambda: None


class Host:
    """A host with containers, whose agent splits an emulated device-dax region."""

    def __init__(self, folder: Path, containerd: Containerd) -> None:
        self.kernel = FullNodes(folder / "dev")
        self.allocations = HostAllocations(
            SysfsBackend(self.kernel, folder / "dev"),
            StateFile(folder / "state.json", HostState),
            folder / "cdi",
        )
        self.containerd = containerd

    def materialize(self, name: str) -> DaxDevice:
        return asyncio.run(self.allocations.materialize(name, 4 * GIB, 2 * MIB))[0]

    def unmaterialize(self, name: str, *, fence: bool = False) -> tuple[Holder, ...]:
        return asyncio.run(self.allocations.unmaterialize(name, fence=fence, wait_s=0))


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """With a short path: sockets are in it."""
    reason = reason_not_to_run()
    if reason is not None:
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with TemporaryDirectory(prefix="containerd-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def containerd(folder: Path) -> Iterator[Containerd]:
    (folder / "cdi").mkdir()
    with Containerd(folder, folder / "cdi") as running:
        assert running.version().startswith("containerd 2.")
        yield running


@pytest.fixture
def host(folder: Path, containerd: Containerd) -> Iterator[Host]:
    with TemporaryDirectory(dir=folder) as name:
        made = Host(Path(name), containerd)
        # containerd watches one folder: the specs of all tests go there.
        made.allocations._cdi_root = folder / "cdi"
        yield made
        made.kernel.close()
        assert made.kernel.unbound_under == []


@pytest.fixture
def start_pod(containerd: Containerd) -> Iterator[Callable[[], Pod]]:
    with ExitStack() as stack:

        def start() -> Pod:
            pod = containerd.start_pod()
            stack.callback(pod.remove)
            return pod

        yield start


def test_a_container_has_the_device_and_is_told_of_it(
    host: Host, start_pod: Callable[[], Pod]
) -> None:
    device = host.materialize("region-1")
    pod = start_pod()
    container = pod.start_container([device.cdi_name])
    assert pod.run(container, "echo $CXL_DAX_DEVICE $CXL_DAX_SIZE") == f"/dev/dax0.1 {2 * MIB}\n"
    shown = pod.run(container, "stat -c '%F %t:%T %a' $CXL_DAX_DEVICE")
    assert shown == "character special file 1:7 666\n"
    assert pod.run(container, "dd if=$CXL_DAX_DEVICE bs=8 count=1 2>/dev/null | wc -c") == "8\n"
    # Others have nothing of it.
    other = pod.start_container([])
    assert pod.run(other, "echo .$CXL_DAX_DEVICE; ls /dev/dax* 2>/dev/null || true") == ".\n"


def test_users_that_are_not_root_may_open_it(host: Host, start_pod: Callable[[], Pod]) -> None:
    device = host.materialize("region-2")
    pod = start_pod()
    container = pod.start_container([device.cdi_name], user=1000)
    assert pod.run(container, "id -u; exec 3<>$CXL_DAX_DEVICE && echo open") == "1000\nopen\n"


def test_a_container_that_holds_it_is_told_with_its_pod(
    host: Host, start_pod: Callable[[], Pod]
) -> None:
    device = host.materialize("region-3")
    pod = start_pod()
    container = pod.start_container([device.cdi_name], _HOLD)
    pod.run(container, "while ! [ -e /proc/1/fd/3 ]; do sleep 0.1; done")
    (holder,) = host.unmaterialize("region-3")
    assert (holder.pod_uid, holder.command) == (pod.uid, "sleep 86400")
    # It runs on, and no new container gets the region.
    assert pod.run(container, "[ -c $CXL_DAX_DEVICE ] && echo there") == "there\n"
    with pytest.raises(grpc.RpcError) as refused:
        pod.start_container([device.cdi_name])
    assert "unresolvable CDI devices" in str(refused.value)
    pod.stop_container(container)
    assert host.unmaterialize("region-3") == ()


def test_a_fence_ends_the_container(host: Host, start_pod: Callable[[], Pod]) -> None:
    device = host.materialize("region-4")
    pod = start_pod()
    container = pod.start_container([device.cdi_name], _HOLD)
    pod.run(container, "while ! [ -e /proc/1/fd/3 ]; do sleep 0.1; done")
    assert host.unmaterialize("region-4", fence=True) == ()
    assert host.allocations.counts.fenced == 1


def test_the_names_of_the_plugin_are_those_of_the_runtime(
    folder: Path, containerd: Containerd, start_pod: Callable[[], Pod], tmp_path: Path
) -> None:
    with Node(tmp_path, folder / "cdi") as node:
        node.add_plugin().start()
        node.kubelet.wait_registered(DRIVER)
        claim, allocation_id = node.add_attached("kv")
        (device,) = node.kubelet.prepare(DRIVER, [claim])[claim.uid]
        first, second = start_pod(), start_pod()
        containers = [pod.start_container(device.cdi_device_ids) for pod in (first, second)]
        first.run(containers[0], "printf hello | dd of=$CXL_DAX_DEVICE conv=notrunc 2>/dev/null")
        read = "dd if=$CXL_DAX_DEVICE bs=5 count=1 2>/dev/null"
        assert second.run(containers[1], read) == "hello"
        assert second.run(containers[1], "stat -c %s $CXL_DAX_DEVICE") == f"{2 * MIB}\n"
        for pod, container in zip((first, second), containers, strict=True):
            pod.stop_container(container)
        node.kubelet.unprepare(DRIVER, [claim])
        node.unmaterialize(allocation_id)
