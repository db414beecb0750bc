"""`hymcache bench region`: what a shared region costs beside a bare copy of the same memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from hymcache.bench.picture import draw_region
from hymcache.bench.progress import StepProgress
from hymcache.bench.region_bench import WORKING_SET_BYTES, RegionBenchOptions, run_region
from hymcache.bench.region_summary import region_numbers
from hymcache.bench.report import verdict_table, write_summary
from hymcache.bench.samples import read_samples
from hymcache.cli.region import require_idle
from hymcache.errors import ConfigError
from hymcache.limits import MIB

_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - its files are what is wanted


def region(
    *,
    out: Annotated[
        Path,
        typer.Option("--out", metavar="DIR", help="Where raw samples, summary.json and logs go."),
    ],
    rounds: Annotated[
        int, typer.Option(min=1, max=100, help="Rounds; the median over them counts.")
    ] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Two short rounds, for a look.")] = False,
    device: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Format and use this device-dax, not shared memory."),
    ] = None,
) -> None:
    """Lookups, loads and stores in a shared region, beside a bare copy of the same memory."""
    console = Console()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; name a folder") from error
    if device is not None:
        if not device.is_char_device():
            raise ConfigError(f"--device {device}: not a device-dax; leave it out to use memory")
        require_idle(device, 0)
    parent = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else out
    with tempfile.TemporaryDirectory(dir=parent, prefix="hymcache-bench-") as folder:
        options = RegionBenchOptions(
            out_dir=out,
            path=device or Path(folder) / "region",
            rounds=2 if quick else rounds,
            lookups=2_000 if quick else 20_000,
            working_set_bytes=128 * MIB if quick else WORKING_SET_BYTES,
        )
        with StepProgress(console, "region", options.steps) as progress:
            run_region(options, progress.report, progress.advance)
    samples = read_samples(options.samples_path)
    numbers = region_numbers(samples)
    draw_region(samples, out / "region.png")
    write_summary(out / "summary.json", numbers, {})
    console.print(verdict_table("A shared region", numbers, {}))
    console.print(f"raw samples, summary.json and region.png: {out}")
