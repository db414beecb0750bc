from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import hymcache

ROOT = Path(__file__).parents[2]
FOLDERS = {"transport", "chm_device", "kv_manager", "master", "lookup", "connector", "dra", "bench"}


def python(*args: str, cwd: Path, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_version_stands_in_one_place() -> None:
    assert importlib.metadata.version("hymcache") == hymcache.__version__


def test_importing_the_package_loads_neither_the_core_nor_its_dependencies(tmp_path: Path) -> None:
    loaded = python("-c", "import hymcache, sys; print(*sys.modules)", cwd=tmp_path).split()
    assert not {"hymcache._core", "numpy", "pydantic", "grpc", "typer"} & set(loaded)


def test_vllm_finds_the_plugin() -> None:
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="hymcache")
    assert entry.value == "hymcache.connector.plugin:register"


def test_type_checkers_see_every_module() -> None:
    # typings/hymcache holds links: to each file of the root package, and to each other folder.
    links = ROOT / "typings" / "hymcache"
    root_names = {
        path.name
        for path in (ROOT / "hymcache").iterdir()
        if path.suffix in {".py", ".pyi", ".typed"} or (path / "__init__.py").exists()
    }
    assert {path.name for path in links.iterdir()} == root_names | FOLDERS
    for path in links.iterdir():
        assert path.is_symlink()
        assert not path.readlink().is_absolute()
        assert path.resolve().is_relative_to(ROOT)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_of_the_sdist_works_away_from_the_sources(tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    # How fast the code is does not matter here; compiling it does.
    unoptimized = ("--config-setting", "cmake.build-type=None")
    build = ("-m", "build", "--no-isolation", *unoptimized, "--outdir", str(dist), str(ROOT))
    python(*build, cwd=tmp_path)
    (sdist,) = dist.glob("*.tar.gz")
    (wheel,) = dist.glob("*.whl")

    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CMakeLists.txt", "LICENSE", "hymcache/csrc/module.cc"} <= packed
    assert not [name for name in packed if name.startswith(("typings/", ".venv/", "build/"))]

    with zipfile.ZipFile(wheel) as archive:
        installed = archive.namelist()
    assert not [name for name in installed if name.endswith((".cc", ".h", ".proto"))]
    assert {"hymcache/py.typed", "hymcache/_core.pyi"} <= set(installed)
    assert {name.split("/")[0] for name in installed} == {
        "hymcache",
        f"hymcache-{hymcache.__version__}.dist-info",
    }

    # Without `site` the editable install beside it is not seen.
    target = tmp_path / "target"
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel))
    python(*pip, cwd=tmp_path)
    path = os.pathsep.join((str(target), sysconfig.get_path("purelib")))
    rooms = [room for room in sorted(FOLDERS) if (ROOT / room / "__init__.py").exists()]
    modules = ", ".join(f"hymcache.{room}" for room in ("_core", *rooms))
    origin = python(
        "-S",
        "-c",
        f"import {modules}; print(hymcache._core.__file__)",
        cwd=tmp_path,
        PYTHONPATH=path,
    )
    assert Path(origin.strip()).is_relative_to(target)
    version = python("-S", "-m", "hymcache", "--version", cwd=tmp_path, PYTHONPATH=path)
    assert version == f"hymcache {hymcache.__version__}\n"
