"""Who holds a device: processes that have it open, mapped, or perhaps registered for RDMA.

The kernel lets a device-dax device be unbound under all of them. A plain mapping then gets
SIGBUS; memory registered for RDMA stays in use by the adapter, and the host crashes when its
owner exits. So a device is only taken away when this module finds nobody.

A container's device node is another inode than the host's, so nodes are told by their device
number. An RDMA registration outlives both descriptor and mapping and does not show in /proc: in a
container that has the device's node, a process with an RDMA device open counts as a holder.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hymcache.dra.host_agent.resources import Holder, HolderKind

_PROC: Final = Path("/proc")
_COMMAND_CHARS_MAX: Final = 120
# Memory is registered through such a node, wherever a container has its /dev.
_RDMA_NODE: Final = re.compile(r"/infiniband/uverbs[0-9]+$", re.ASCII)
# kubepods-burstable-pod<uid with _>.slice (systemd) or kubepods/burstable/pod<uid> (cgroupfs).
_POD_UID: Final = re.compile(
    r"pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})", re.ASCII
)


@dataclass(frozen=True, slots=True)
class DeviceIdentity:
    """How a device is recognised among what a process has open.

    A device node by `device_number`; a file (simulations) by its file system and `inode`, unless
    it was opened by the name that another simulated host has for it: a path in the folder
    `hosts`, but not in `host`, which is ours.
    """

    container_path: str
    device_number: int | None = None
    file_system: int = 0
    inode: int = 0
    hosts: Path | None = None
    host: Path | None = None

    @classmethod
    def of_node(cls, node: Path, container_path: str) -> DeviceIdentity:
        """That of a device node. Raises FileNotFoundError."""
        return cls(container_path, device_number=node.stat().st_rdev)

    @classmethod
    def of_file(cls, file: Path, container_path: str) -> DeviceIdentity:
        """That of a file in the folder of a simulated host. Raises FileNotFoundError."""
        status = file.stat()
        return cls(
            container_path,
            file_system=status.st_dev,
            inode=status.st_ino,
            hosts=file.parent.parent,
            host=file.parent,
        )

    def matches(self, status: os.stat_result, link: os.PathLike[str] | str) -> bool:
        """Whether a file that a process has open is the device.

        `link` leads to the path by which it was opened, or is that path.
        """
        if self.device_number is not None:
            return stat.S_ISCHR(status.st_mode) and status.st_rdev == self.device_number
        if (status.st_dev, status.st_ino) != (self.file_system, self.inode):
            return False
        opened = Path(link)
        if opened.is_symlink():
            opened = opened.readlink()
        of_some_host = self.hosts is not None and opened.is_relative_to(self.hosts)
        return not of_some_host or (self.host is not None and opened.is_relative_to(self.host))


def sees_all_processes(proc: Path = _PROC) -> bool:
    """Whether this process is in the host's first PID namespace: else holders stay unseen."""
    # PROC_PID_INIT_INO of linux/proc_ns.h.
    return (proc / "self/ns/pid").readlink().name == "pid:[4026531836]"


def find_holders(
    identity: DeviceIdentity, *, pids: Collection[int] | None = None, proc: Path = _PROC
) -> tuple[Holder, ...]:
    """The processes that hold the device, in order of their ids; of `pids` only, if given."""
    search = _Search(identity, proc)
    found = (search.look_at(pid) for pid in sorted(_all_pids(proc) if pids is None else pids))
    return tuple(holder for holder in found if holder is not None)


def _all_pids(proc: Path) -> Iterator[int]:
    for folder in proc.iterdir():
        if folder.name.isdigit():
            yield int(folder.name)


@dataclass(slots=True)
class _Search:
    identity: DeviceIdentity
    proc: Path
    # Processes map the same libraries: (file system, inode, path) of a mapping -> the device?
    known_mappings: dict[tuple[str, str, str], bool] = field(default_factory=dict)

    def look_at(self, pid: int) -> Holder | None:
        """The process as a holder. It may end at any time, and then holds nothing."""
        folder = self.proc / str(pid)
        kinds = set(self._kinds(folder))
        if not kinds:
            return None
        return Holder(
            pid=pid,
            command=_command(folder),
            kinds=tuple(sorted(kinds)),
            pod_uid=_pod_uid(folder),
        )

    def _kinds(self, folder: Path) -> Iterator[HolderKind]:
        task = _living_task(folder)
        if task is None:
            return
        has_rdma = False
        for descriptor in _descriptors(task):
            if self._is_device(descriptor):
                yield HolderKind.OPEN
            has_rdma = has_rdma or _is_rdma(descriptor)
        if has_rdma and self._is_device_in_container(task):
            yield HolderKind.RDMA
        if self._is_mapped(task):
            yield HolderKind.MAPPED

    def _is_device(self, descriptor: os.DirEntry[str]) -> bool:
        try:
            return self.identity.matches(descriptor.stat(), descriptor)
        except OSError:
            return False

    def _is_mapped(self, task: Path) -> bool:
        for addresses, file_system, inode, path in _mappings(task):
            key = (file_system, inode, path)
            known = self.known_mappings.get(key)
            if known is None:
                known = self._stat_mapping(task, addresses, path)
                self.known_mappings[key] = known
            if known:
                return True
        return False

    def _stat_mapping(self, task: Path, addresses: str, path: str) -> bool:
        mapped = task.parent.parent / "map_files" / addresses
        # map_files needs root and the process's main thread; the path may have changed since.
        for link in (mapped, task / "root" / path.lstrip("/")):
            try:
                return self.identity.matches(link.stat(), link if link is mapped else path)
            except OSError:
                continue
        return False

    def _is_device_in_container(self, task: Path) -> bool:
        try:
            if (task / "ns/mnt").readlink() == (self.proc / "self/ns/mnt").readlink():
                return False
            node = task / "root" / self.identity.container_path.lstrip("/")
            return self.identity.matches(node.stat(), self.identity.container_path)
        except OSError:
            return False


def _living_task(folder: Path) -> Path | None:
    """The process's first thread that lives: of a main thread that ended, /proc shows nothing.

    Threads share descriptors and memory.
    """
    try:
        tasks = sorted((folder / "task").iterdir(), key=lambda task: int(task.name))
    except OSError:
        return None
    for task in tasks:
        try:
            state = (task / "stat").read_bytes().rpartition(b")")[2].split()[0]
        except (OSError, IndexError):
            continue
        if state not in {b"Z", b"X"}:
            return task
    return None


def _descriptors(task: Path) -> Iterator[os.DirEntry[str]]:
    """What a process has open: entries whose stat() is that of the open file."""
    try:
        with os.scandir(task / "fd") as entries:
            yield from entries
    except OSError:
        return


def _is_rdma(descriptor: os.DirEntry[str]) -> bool:
    try:
        if not stat.S_ISCHR(descriptor.stat().st_mode):
            return False
        return _RDMA_NODE.search(str(Path(descriptor).readlink())) is not None
    except OSError:
        return False


def _mappings(task: Path) -> Iterator[tuple[str, str, str, str]]:
    """Of each mapped file: its addresses as map_files calls them, file system, inode, path."""
    try:
        lines = (task / "maps").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[4] != "0":
            start, _, end = fields[0].partition("-")
            yield f"{int(start, 16):x}-{int(end, 16):x}", fields[3], fields[4], fields[5]


def _command(folder: Path) -> str:
    try:
        line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        text = line.strip() or (folder / "comm").read_text(errors="replace").strip()
    except OSError:
        return "a process that is ending"
    return "".join(c if c.isprintable() else "?" for c in text)[:_COMMAND_CHARS_MAX]


def _pod_uid(folder: Path) -> str | None:
    try:
        match = _POD_UID.search((folder / "cgroup").read_text(errors="replace"))
    except OSError:
        return None
    return match[1].replace("_", "-") if match else None
