"""The kernel, its modules and the initramfs of a guest: made once, and kept."""

from __future__ import annotations

import fcntl
import hashlib
import lzma
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.testbed.host_packages import BUSYBOX, INSTALL, kernel_packages, program

# Loaded by the initramfs, to reach the host's files.
_BOOT_MODULES = ("9pnet_virtio", "9p", "overlay", "virtio_net")

# What a test may load. What they need comes along.
_TEST_MODULES = (
    # soft-RoCE asks the crypto API for its checksum, which no symbol shows.
    *("rdma_rxe", "ib_uverbs", "rdma_ucm", "crc32_generic", "crc32_pclmul"),
    *("cxl_acpi", "cxl_pci", "cxl_mem", "dax_cxl"),
    *("device_dax", "dax_hmem", "kmem"),
    # To drop packets of one kind, and to slow all.
    *("sch_ingress", "cls_u32", "act_gact", "sch_tbf"),
)

_APPLETS = ("sh", "mount", "insmod", "mkdir", "cp", "switch_root")
_FOLDERS = ("bin", "modules", "proc", "sys", "dev", "host", "layer", "root")
_SCRIPTS = Path(__file__).parent / "guest"

_UNPACK_TIMEOUT_S = 300


def cache_folder() -> Path:
    """Where the install script leaves the kernel's package, and images are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hymcache" / "testbed"


@dataclass(frozen=True)
class GuestImage:
    """What QEMU starts a guest from; `modules` becomes the guest's /lib/modules."""

    kernel: Path
    initramfs: Path
    modules: Path

    @classmethod
    def cached(cls, cache: Path) -> GuestImage:
        """The image for the newest kernel in `cache`; takes some 15 s the first time.

        It is found again under the kernel's version and a digest of all that goes into it.
        """
        packages = kernel_packages(cache)
        if not packages:
            raise FileNotFoundError(f"no guest kernel in {cache}: run {INSTALL}")
        package = packages[-1]
        version = package.name.removeprefix("linux-image-").split("_", 1)[0]
        folder = cache / f"{version}-{_digest(package)}"
        image = cls(folder / "vmlinuz", folder / "initramfs.cpio", folder / "modules")
        with (cache / "making.lock").open("w") as lock:
            # Whoever is second waits, and finds it there.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                with tempfile.TemporaryDirectory(dir=cache, prefix="making-") as making:
                    made = Path(making) / "image"
                    made.mkdir()
                    _make(package, version, made)
                    made.rename(folder)
        return image


def _digest(package: Path) -> str:
    digest = hashlib.sha256()
    for part in (package.name, package.stat().st_size, _BOOT_MODULES, _TEST_MODULES, _APPLETS):
        digest.update(f"{part}\n".encode())
    for path in (Path(__file__), BUSYBOX, *sorted(_SCRIPTS.iterdir())):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _make(package: Path, version: str, folder: Path) -> None:
    unpacked = folder / "unpacked"
    unpacked.mkdir()
    archive = folder / "package.tar"
    with archive.open("wb") as tar:
        subprocess.run(
            ["dpkg-deb", "--fsys-tarfile", package],
            stdout=tar,
            timeout=_UNPACK_TIMEOUT_S,
            check=True,
        )
    _run("tar", "-xf", archive, "-C", unpacked, f"./boot/vmlinuz-{version}", "./lib/modules")
    archive.unlink()
    _run(program("depmod"), "-b", unpacked, version)
    (unpacked / "boot" / f"vmlinuz-{version}").rename(folder / "vmlinuz")

    # Only these modules, decompressed: a guest takes seconds for what takes the host none.
    root = folder / "root"
    modules = root / "lib" / "modules" / version
    wanted = _needed_by(unpacked, version, (*_BOOT_MODULES, *_TEST_MODULES))
    for path in wanted:
        plain = modules / path.relative_to(unpacked / "lib" / "modules" / version)
        plain = plain.with_name(_plain_name(path))
        plain.parent.mkdir(parents=True, exist_ok=True)
        plain.write_bytes(_decompressed(path))
    for index in (unpacked / "lib" / "modules" / version).glob("modules.builtin*"):
        if not index.name.endswith(".bin"):
            shutil.copy(index, modules)
    (modules / "modules.order").touch()
    _run(program("depmod"), "-b", root, version)
    _write_initramfs(
        folder / "initramfs.cpio", _needed_by(unpacked, version, _BOOT_MODULES), folder
    )
    (root / "lib" / "modules").rename(folder / "modules")
    shutil.rmtree(root)
    shutil.rmtree(unpacked)


def _needed_by(root: Path, version: str, names: tuple[str, ...]) -> list[Path]:
    """The files of these modules and of what they need, in the order in which to load them."""
    files: dict[Path, None] = {}
    for name in names:
        printed = subprocess.run(
            [program("modprobe"), "-d", root, "-S", version, "--show-depends", name],
            capture_output=True,
            text=True,
            timeout=_UNPACK_TIMEOUT_S,
            check=True,
        ).stdout
        files.update((Path(path), None) for path in re.findall(r"^insmod (\S+)", printed, re.M))
    return list(files)


def _plain_name(path: Path) -> str:
    return path.name.removesuffix(".xz")


def _decompressed(path: Path) -> bytes:
    return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()


def _write_initramfs(into: Path, modules: list[Path], folder: Path) -> None:
    root = folder / "initramfs"
    for name in _FOLDERS:
        (root / name).mkdir(parents=True)
    shutil.copy(BUSYBOX, root / "bin" / "busybox")
    for applet in _APPLETS:
        (root / "bin" / applet).symlink_to("busybox")
    for path in modules:
        (root / "modules" / _plain_name(path)).write_bytes(_decompressed(path))
    order = "".join(f"{_plain_name(path)}\n" for path in modules)
    (root / "modules" / "order").write_text(order)
    for script in ("stage2.sh", "agent.sh"):
        shutil.copy(_SCRIPTS / script, root)
    shutil.copy(_SCRIPTS / "init.sh", root / "init")
    (root / "init").chmod(0o755)
    names = "".join(f"{path.relative_to(root)}\n" for path in sorted(root.rglob("*")))
    with into.open("wb") as archive:
        subprocess.run(
            ["cpio", "--create", "--format=newc", "--quiet"],
            input=names.encode(),
            stdout=archive,
            cwd=root,
            timeout=_UNPACK_TIMEOUT_S,
            check=True,
        )
    shutil.rmtree(root)


def _run(*command: str | Path) -> None:
    subprocess.run(command, timeout=_UNPACK_TIMEOUT_S, check=True)
