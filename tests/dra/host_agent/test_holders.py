"""Who holds a device, of real processes with real devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hymcache.dra.host_agent.holders import DeviceIdentity, find_holders
from hymcache.dra.host_agent.resources import HolderKind
from tests.dra.host_agent.conftest import Hold
from tests.dra.host_agent.emulated_sysfs import EmulatedSysfs


@pytest.fixture
def device_file(tmp_path: Path) -> Path:
    path = tmp_path / "hosts" / "a" / "region"
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(8192))
    return path


def test_who_has_a_device_node_open(kernel: EmulatedSysfs, tmp_path: Path, hold: Hold) -> None:
    node = tmp_path / "dev/dax0.0"
    identity = DeviceIdentity.of_node(node, "/dev/dax0.0")
    assert find_holders(identity) == ()
    holder = hold(node)
    (found,) = find_holders(identity)
    assert (found.pid, found.kinds, found.pod_uid) == (holder.pid, (HolderKind.OPEN,), None)
    assert "python" in found.command
    holder.close_device()
    assert find_holders(identity) == ()


def test_a_node_is_told_by_its_number_not_by_its_name(
    kernel: EmulatedSysfs, tmp_path: Path, hold: Hold
) -> None:
    node = tmp_path / "dev/dax0.0"
    other_name = tmp_path / "renamed"
    other_name.symlink_to(node.resolve())
    holder = hold(other_name)
    (found,) = find_holders(DeviceIdentity.of_node(node, "/dev/dax0.0"))
    assert found.pid == holder.pid


def test_who_has_it_mapped_but_not_open(device_file: Path, hold: Hold) -> None:
    identity = DeviceIdentity.of_file(device_file, "/dev/region")
    holder = hold(device_file, "map")
    (found,) = find_holders(identity)
    assert (found.pid, found.kinds) == (holder.pid, (HolderKind.MAPPED,))
    holder.end()
    assert find_holders(identity) == ()


def test_a_process_whose_main_thread_ended_still_holds(device_file: Path) -> None:
    program = """
import ctypes, sys, threading
file = open(sys.argv[1])
def wait():
    print("holding", flush=True)
    sys.stdin.readline()
threading.Thread(target=wait).start()
ctypes.CDLL(None).pthread_exit(None)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program, str(device_file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "holding\n"
            found = find_holders(DeviceIdentity.of_file(device_file, "/dev/region"))
            assert [holder.pid for holder in found] == [process.pid]
        finally:
            process.kill()


def test_holders_of_another_simulated_host_are_its_own(device_file: Path, hold: Hold) -> None:
    others = device_file.parent.parent / "b" / "region"
    others.parent.mkdir()
    others.hardlink_to(device_file)
    holder = hold(others)
    assert find_holders(DeviceIdentity.of_file(device_file, "/dev/region")) == ()
    (found,) = find_holders(DeviceIdentity.of_file(others, "/dev/region"))
    assert found.pid == holder.pid


def test_only_the_processes_asked_for_are_looked_at(device_file: Path, hold: Hold) -> None:
    identity = DeviceIdentity.of_file(device_file, "/dev/region")
    first, second = hold(device_file), hold(device_file)
    assert {holder.pid for holder in find_holders(identity)} == {first.pid, second.pid}
    assert [holder.pid for holder in find_holders(identity, pids=[second.pid])] == [second.pid]
    second.end()
    assert find_holders(identity, pids=[second.pid]) == ()


def test_the_pod_of_a_holder_is_told(tmp_path: Path) -> None:
    # A process as /proc shows it in a pod: systemd's names of cgroups have underscores.
    device = tmp_path / "hosts" / "a" / "region"
    device.parent.mkdir(parents=True)
    device.touch()
    uid = "0b2f6b7e-3d6c-4a55-9a43-1f6f8a0c9d10"
    slices = f"kubepods.slice/kubepods-burstable-pod{uid.replace('-', '_')}.slice/cri-1.scope"
    process = tmp_path / "proc" / "77"
    task = process / "task" / "77"
    (task / "fd").mkdir(parents=True)
    (task / "fd/3").symlink_to(device)
    (task / "stat").write_text("77 (vllm) S 1 77")
    (task / "maps").write_text("")
    (process / "cmdline").write_bytes(b"vllm\0serve\0")
    (process / "cgroup").write_text(f"0::/{slices}\n")
    (found,) = find_holders(DeviceIdentity.of_file(device, "/dev/r"), proc=tmp_path / "proc")
    assert (found.pod_uid, found.command) == (uid, "vllm serve")
    assert str(found) == f"vllm serve (pid 77 of pod {uid})"


@pytest.mark.skipif(os.geteuid() != 0, reason="making mount namespaces needs root")
def test_an_rdma_process_in_a_container_that_has_the_device_counts(
    kernel: EmulatedSysfs, tmp_path: Path
) -> None:
    node = tmp_path / "dev/dax0.0"
    # A container's view: a mount namespace with its own node of the device, and an RDMA device
    # that the process has open. What is registered with the latter, /proc does not tell.
    program = """
import os, subprocess, sys
subprocess.run(["mount", "-t", "tmpfs", "none", "/mnt"], check=True)
os.mkdir("/mnt/infiniband"); os.mkdir("/mnt/dev")
status = os.stat(sys.argv[1])
os.mknod("/mnt/dev/dax0.0", 0o20666, status.st_rdev)
os.mknod("/mnt/infiniband/uverbs0", 0o20666, os.makedev(1, 3))
os.makedirs("/mnt/root/dev/infiniband"); os.mkdir("/mnt/root/proc")
os.rename("/mnt/dev/dax0.0", "/mnt/root/dev/dax0.0")
os.rename("/mnt/infiniband/uverbs0", "/mnt/root/dev/infiniband/uverbs0")
os.chroot("/mnt/root")
os.chdir("/")
held = os.open("/dev/infiniband/uverbs0", os.O_RDWR)
print("holding", flush=True)
sys.stdin.readline()
"""
    with subprocess.Popen(
        ["unshare", "--mount", sys.executable, "-c", program, str(node)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "holding\n"
            (found,) = find_holders(DeviceIdentity.of_node(node, "/dev/dax0.0"))
            assert found.kinds == (HolderKind.RDMA,)
        finally:
            process.kill()
