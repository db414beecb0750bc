"""`hymcache bench region-reuse`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markdown import Markdown

from hymcache.bench.cache_folder import default_cache_dir
from hymcache.bench.child_process import log_shown_on_failure, termination_unwinds
from hymcache.bench.progress import StepProgress
from hymcache.bench.region_reuse.figures import draw_figures
from hymcache.bench.region_reuse.request_log import Tier, requests_of
from hymcache.bench.region_reuse.runner import ReuseOptions, run_region_reuse
from hymcache.bench.region_reuse.stats import stats_of
from hymcache.bench.region_reuse.tables import tables_of
from hymcache.bench.samples import read_samples
from hymcache.cli.region import require_idle
from hymcache.errors import ConfigError
from hymcache.quantity import parse_size

_PREFIXES_MAX: Final = 8
_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - a file there is memory, and its name is our own
_QUICK_PREFIXES: Final = "512,1024"


def region_reuse(
    *,
    out: Annotated[
        Path,
        typer.Option("--out", metavar="DIR", help="Where requests, stats, tables, figures go."),
    ],
    prefixes: Annotated[
        str, typer.Option(help="Lengths of the shared prefix in tokens, separated by commas.")
    ] = "512,1024,2048,4096",
    sessions: Annotated[int, typer.Option(min=1, max=1000, help="Sessions of each cell.")] = 5,
    reps: Annotated[int, typer.Option(min=1, max=100, help="Repetitions, all anew.")] = 3,
    tiers: Annotated[
        str, typer.Option(help="Which of the tiers, separated by commas.")
    ] = "T0,T1,T2,T3,T4",
    region: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="A file to be made, or a device-dax to format; default: a file on /dev/shm.",
        ),
    ] = None,
    region_size: Annotated[str, typer.Option(help="Bytes of the region.")] = "2GiB",
    prefault: Annotated[
        bool,
        typer.Option(
            "--prefault/--no-prefault",
            help="Map all pages of the region at the start, or each at its first use.",
        ),
    ] = True,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A model's folder; default: one with random weights."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="What the engines compute in.")] = "float32",
    gpus: Annotated[
        str,
        typer.Option(metavar="A,B", help="CUDA_VISIBLE_DEVICES of the engines; none on a CPU."),
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="A short run, for a look.")] = False,
    summarise: Annotated[
        bool, typer.Option("--summarise", help="Only compute again from DIR/requests.jsonl.")
    ] = False,
    cache_dir: Annotated[
        Path, typer.Option("--cache-dir", metavar="DIR", help="Where the model is kept.")
    ] = default_cache_dir(),  # noqa: B008 - shown in the help text
) -> None:
    """TTFT when a prefix is reused on the engine that computed it, and on another one."""
    console = Console()
    options = ReuseOptions(
        cache_dir=cache_dir,
        out_dir=out.absolute(),
        region=_region_path(region),
        tiers=_tiers(tiers),
        prefixes=_prefixes(_QUICK_PREFIXES if quick else prefixes),
        sessions=2 if quick else sessions,
        repetitions=1 if quick else reps,
        region_bytes=_size(region_size),
        prefault=prefault,
        model=model.absolute() if model else None,
        dtype=dtype,
        devices=tuple(part.strip() for part in gpus.split(",") if part.strip()),
    )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; name a folder") from error
    if not summarise:
        with (
            termination_unwinds(),
            log_shown_on_failure(console),
            StepProgress(console, "region-reuse", options.steps) as progress,
        ):
            run_region_reuse(options, progress.report, progress.advance)
    failed = write_results(options.samples_path, out)
    console.print(Markdown((out / "tables.md").read_text(encoding="utf-8")))
    console.print(f"requests.jsonl, stats.json, tables.md, figures and logs: {out}")
    if failed:
        console.print(f"[bold red]controls that failed: {', '.join(failed)}[/]; see tables.md")
        raise typer.Exit(1)


def write_results(samples_path: Path, out: Path) -> list[str]:
    """stats.json from the raw requests; tables.md and the figures from stats.json.

    Returns the names of controls that the run had and that failed.
    """
    if not samples_path.is_file():
        raise ConfigError(f"{samples_path}: no such file; run without --summarise first")
    samples = read_samples(samples_path)
    stats_path = out / "stats.json"
    stats_path.write_text(
        json.dumps(stats_of(samples, requests_of(samples)), indent=1) + "\n", encoding="utf-8"
    )
    stats = json.loads(stats_path.read_text(encoding="utf-8"))
    (out / "tables.md").write_text(tables_of(stats), encoding="utf-8")
    draw_figures(stats, out)
    controls: dict[str, dict[str, object]] = stats["controls"]
    return [name for name, control in controls.items() if control["passed"] is False]


def _region_path(path: Path | None) -> Path:
    if path is None:
        return _MEMORY / f"hymcache-bench-{os.getpid()}"
    if path.exists() and not path.is_char_device():
        raise ConfigError(f"--region {path}: exists; name a file to be made, or a device-dax")
    if path.exists():
        require_idle(path, 0)
    return path.absolute()


def _tiers(text: str) -> tuple[Tier, ...]:
    try:
        return tuple(dict.fromkeys(Tier(part.strip()) for part in text.split(",")))
    except ValueError as error:
        raise ConfigError(f"--tiers {text}: write some of {','.join(Tier)}") from error


def _prefixes(text: str) -> tuple[int, ...]:
    try:
        prefixes = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        prefixes = ()
    if not 1 <= len(prefixes) <= _PREFIXES_MAX or not all(64 <= p <= 15_000 for p in prefixes):
        raise ConfigError(
            f"--prefixes {text}: write up to {_PREFIXES_MAX} lengths from 64 to 15000"
        )
    return prefixes


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--region-size {text}: {error}") from error
