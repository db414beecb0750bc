"""What a machine needs to run guests, and what this one lacks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

INSTALL = "deploy/install_system_packages.sh testbed"
QEMU = "qemu-system-x86_64"

# `-netdev stream` connects again by itself since then.
QEMU_VERSION_MIN = (9, 2)

# By the Debian package that has it. The tests' own commands run on the host's root, so what they
# call is looked for here too.
_PROGRAMS = {
    "kmod": ("modprobe", "depmod"),
    "cpio": ("cpio",),
    "dpkg": ("dpkg-deb",),
    "iproute2": ("ip", "rdma"),
    "iputils-ping": ("ping",),
    "util-linux": ("setpriv",),
    "daxctl": ("daxctl",),
    "ibverbs-utils": ("ibv_devinfo",),
    "perftest": ("ib_read_bw", "ib_write_bw"),
}

# Those of the administrator are not on everybody's PATH.
SEARCH_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))

BUSYBOX = Path("/bin/busybox")


def program(name: str) -> str:
    """The path of a program that missing_packages() has not named."""
    path = shutil.which(name, path=SEARCH_PATH)
    if path is None:
        raise FileNotFoundError(f"{name} is not installed: run {INSTALL}")
    return path


def kernel_packages(cache: Path) -> list[Path]:
    """The kernels that the install script has put into `cache`, the newest last."""
    return sorted(cache.glob("linux-image-*.deb"), key=lambda package: package.stat().st_mtime)


def reason_not_to_run(cache: Path) -> str | None:
    """One line on what is missing and how to get it, or None where guests can run."""
    missing = [
        package
        for package, names in _PROGRAMS.items()
        if any(shutil.which(name, path=SEARCH_PATH) is None for name in names)
    ]
    if not BUSYBOX.exists():
        missing.append("busybox-static")
    if not kernel_packages(cache):
        missing.append("a guest kernel")
    version = _qemu_version()
    if version is None:
        missing.append("qemu-system-x86")
    elif version < QEMU_VERSION_MIN:
        wanted, found = (".".join(map(str, v)) for v in (QEMU_VERSION_MIN, version))
        missing.append(f"QEMU {wanted} or later (this one is {found})")
    if not missing:
        return None
    return f"no guests without {', '.join(missing)}: run {INSTALL}"


def _qemu_version() -> tuple[int, int] | None:
    path = shutil.which(QEMU)
    if path is None:
        return None
    printed = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=30, check=True
    ).stdout
    match = re.search(r"version (\d+)\.(\d+)", printed)
    if match is None:
        return None
    return int(match[1]), int(match[2])
