"""`hymcache dra` without what it needs, as its user sees it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hymcache.dra

pytestmark = pytest.mark.timeout(180)


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = f"import sys; {code}; from hymcache.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-P", "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


@pytest.mark.parametrize("missing", ["httpx", "kubernetes"])
def test_a_missing_extra_is_told_with_the_way_to_install_it(missing: str) -> None:
    # Python takes None for a module that is not there.
    result = run(f"sys.modules[{missing!r}] = None", "dra", "controller", "--help")
    assert result.returncode == 2
    assert "pip install 'hymcache[kubernetes]'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_parts_are_listed() -> None:
    result = run("pass", "dra", "--help")
    assert result.returncode == 0
    for part in ("controller", "host-agent", "kubelet-plugin", "simulate"):
        assert part in result.stdout


def test_the_driver_imports_nothing_of_the_data_path() -> None:
    room = Path(hymcache.dra.__path__[0])
    allowed = re.compile(
        r"hymcache\.(dra|errors|limits|address|quantity|metric_table|http_endpoint|version|cli"
        r"\.output)(\.|$)"
    )
    imported = {
        name
        for path in room.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in _modules(node)
        if name.startswith("hymcache")
    }
    assert "hymcache.errors" in imported
    assert {name for name in imported if not allowed.match(name)} == set()


def _modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []
