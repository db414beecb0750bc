"""`hymcache bench`: what HyMCache costs on this machine, beside plain copies and beside peers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from hymcache.bench.cache_folder import default_cache_dir
from hymcache.bench.child_process import ChildFailed, log_shown_on_failure, termination_unwinds
from hymcache.bench.micro import MicroOptions, run_micro
from hymcache.bench.micro_summary import micro_numbers
from hymcache.bench.picture import draw_micro, draw_ttft
from hymcache.bench.progress import StepProgress
from hymcache.bench.reference import Transport
from hymcache.bench.region_command import region
from hymcache.bench.region_reuse.command import region_reuse
from hymcache.bench.report import Numbers, verdict_table, write_summary
from hymcache.bench.requirements import require_packages
from hymcache.bench.samples import read_samples
from hymcache.bench.transport_choice import TransportChoice
from hymcache.bench.ttft import TtftOptions, run_ttft
from hymcache.bench.ttft_summary import SHORT_TOKENS, ttft_faults, ttft_numbers
from hymcache.bench.ttft_system import Peer
from hymcache.errors import ConfigError

app = typer.Typer(
    help="Measure this machine.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("region")(region)
app.command("region-reuse")(region_reuse)

OutOption = Annotated[
    Path,
    typer.Option("--out", metavar="DIR", help="Where raw samples, summary.json and logs go."),
]
_TRANSPORTS: Final[Mapping[TransportChoice, tuple[Transport, ...]]] = {
    TransportChoice.AUTO: ("shm", "tcp"),
    TransportChoice.SHM: ("shm",),
    TransportChoice.VERBS: ("verbs",),
    TransportChoice.TCP: ("tcp",),
}
_NO_ENGINE: Final = ({"hit_ttft_ratio": None}, {"hit_ttft_ratio": "left out by --no-engine"})
CacheOption = Annotated[
    Path,
    typer.Option("--cache-dir", metavar="DIR", help="Where models and peers are kept."),
]


@app.command("micro")
def micro(
    *,
    out: OutOption,
    rounds: Annotated[
        int, typer.Option(min=1, max=100, help="Rounds; the median over them counts.")
    ] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Two short rounds, for a look.")] = False,
    transport: Annotated[
        TransportChoice, typer.Option(help="Which copies to measure; auto: shm and tcp.")
    ] = TransportChoice.AUTO,
    engine: Annotated[
        bool, typer.Option(help="Time a hit inside of vLLM too, for hit_ttft_ratio.")
    ] = True,
    cache_dir: CacheOption = default_cache_dir(),  # noqa: B008 - shown in the help text
) -> None:
    """Copies, lookups and the index, beside plain copies made in the same run."""
    require_packages("matplotlib")
    console = Console()
    options = MicroOptions(
        out_dir=out.absolute(),
        rounds=2 if quick else rounds,
        quick=quick,
        transports=_TRANSPORTS[transport],
    )
    _make_folder(out)
    with _running(console):
        with StepProgress(console, "micro", options.steps) as progress:
            run_micro(options, progress.report, progress.advance)
        samples = read_samples(options.samples_path)
        numbers = micro_numbers(samples)
        ttft, notes = _hit_ttft(out / "ttft", cache_dir, quick, console) if engine else _NO_ENGINE
        numbers.update(ttft)
        draw_micro(samples, out / "micro.png")
    write_summary(out / "summary.json", numbers, notes)
    console.print(verdict_table("Copies, lookups and the index", numbers, notes))
    console.print(f"raw samples, summary.json, micro.png and logs: {out}")


def _hit_ttft(
    out: Path, cache_dir: Path, quick: bool, console: Console
) -> tuple[Numbers, dict[str, str]]:
    if find_spec("vllm") is None:
        return {"hit_ttft_ratio": None}, {"hit_ttft_ratio": "vLLM is not installed"}
    options = TtftOptions(
        cache_dir=cache_dir,
        out_dir=out,
        tokens=(SHORT_TOKENS,),
        repetitions=3 if quick else 7,
    )
    try:
        with log_shown_on_failure(console):
            numbers, notes = time_ttft(options, console)
    except ChildFailed as error:  # the copies are measured by now: keep their numbers
        return {"hit_ttft_ratio": None}, {"hit_ttft_ratio": str(error)}
    kept = {
        name: value
        for name, value in numbers.items()
        if name == "hit_ttft_ratio" or name.endswith(f"_{SHORT_TOKENS}_ms")
    }
    return kept, notes


@app.command("dra")
def dra(
    *,
    out: OutOption,
    claims: Annotated[
        int, typer.Option(min=1, max=10_000, help="Claims attached one after the other.")
    ] = 50,
    many: Annotated[
        int,
        typer.Option(min=1, max=10_000, help="Claims attached at once; the target is for 1000."),
    ] = 1000,
) -> None:
    """The Kubernetes driver: allocation to attached, Prepare, many claims at once."""
    from hymcache.bench.dra_bench import DraOptions, run_dra
    from hymcache.bench.dra_summary import dra_numbers

    console = Console()
    options = DraOptions(out_dir=out.absolute(), claims=claims, many=many)
    _make_folder(out)
    with _running(console), StepProgress(console, "dra", options.steps) as progress:
        run_dra(options, progress.report, progress.advance)
    numbers, notes = dra_numbers(read_samples(options.samples_path))
    write_summary(out / "summary.json", numbers, notes)
    console.print(verdict_table("The Kubernetes driver", numbers, notes))
    console.print(f"raw samples, summary.json and logs: {out}")


@app.command("ttft")
def ttft(
    *,
    out: OutOption,
    tokens: Annotated[
        str, typer.Option(help="Lengths of the prompts in tokens, separated by commas.")
    ] = "2000,8000",
    reps: Annotated[int, typer.Option(min=1, max=1000, help="Prompts of each length.")] = 5,
    peer: Annotated[list[Peer], typer.Option(help="Time this too, in turn; may be repeated.")] = [],  # noqa: B006 - Typer copies it
    transport: Annotated[
        TransportChoice, typer.Option(help="How HyMCache's bytes move.")
    ] = TransportChoice.AUTO,
    cache_dir: CacheOption = default_cache_dir(),  # noqa: B008 - shown in the help text
) -> None:
    """Time to first token when another engine has computed the prompt's KV."""
    require_packages("vllm", "matplotlib")
    console = Console()
    options = TtftOptions(
        cache_dir=cache_dir,
        out_dir=out,
        tokens=_lengths(tokens),
        repetitions=reps,
        peers=tuple(peer),
        transport=transport,
    )
    _make_folder(out)
    with _running(console):
        numbers, notes = time_ttft(options, console)
        draw_ttft(read_samples(options.samples_path), out / "ttft.png")
    write_summary(out / "summary.json", numbers, notes)
    console.print(verdict_table("Time to first token", numbers, notes))
    console.print(f"raw samples, summary.json, ttft.png and logs: {out}")


def time_ttft(options: TtftOptions, console: Console) -> tuple[Numbers, dict[str, str]]:
    """Runs it; the numbers by name, and notes by the names of those that could not be had."""
    with StepProgress(console, "TTFT", options.steps) as progress:
        missing = run_ttft(options, progress.report, progress.advance)
    samples = read_samples(options.samples_path)
    numbers = ttft_numbers(samples)
    return numbers, ttft_notes(numbers, missing | ttft_faults(samples))


def ttft_notes(numbers: Numbers, reasons: dict[str, str]) -> dict[str, str]:
    """Why numbers are missing: what happened to the system, else that nobody asked for it."""
    notes = {}
    for name, value in numbers.items():
        if value is not None:
            continue
        told = [reason for system, reason in reasons.items() if system in name]
        told += reasons.values()
        notes[name] = told[0] if told else "not measured in this run"
    return notes


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; name a folder") from error


def _lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if not lengths or not all(64 <= length <= 16_000 for length in lengths):
        raise ConfigError(f"--tokens {text}: write lengths from 64 to 16000, e.g. 2000,8000")
    return lengths


@contextmanager
def _running(console: Console) -> Iterator[None]:
    with termination_unwinds(), log_shown_on_failure(console):
        yield
