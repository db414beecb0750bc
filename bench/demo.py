"""`hymcache demo`: two vLLM engines on this machine share a prompt's KV."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Final

import typer
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from hymcache.bench.cache_folder import default_cache_dir
from hymcache.bench.child_process import log_shown_on_failure, termination_unwinds
from hymcache.bench.requirements import require_packages
from hymcache.bench.service import ServiceOptions, running_service
from hymcache.bench.shared_prompt import SharedPrompt, share_prompt
from hymcache.bench.tiny_model import TINY, make_model
from hymcache.bench.transport_choice import TransportChoice
from hymcache.bench.ttft_system import hymcache_transfer_config
from hymcache.limits import GIB, MIB

_ROWS: Final = ("service", "model", "engine A", "engine B")

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def demo(
    prompt_tokens: Annotated[
        int, typer.Option(min=256, max=12_000, help="Length of the prompt, in tokens.")
    ] = 6000,
    transport: Annotated[
        TransportChoice, typer.Option(help="How bytes move.")
    ] = TransportChoice.AUTO,
    cache_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the model is kept between runs.")
    ] = default_cache_dir(),  # noqa: B008 - shown in the help text
) -> None:
    """Start the service and two engines; B answers with the KV that A computed.

    Exits with 0 only if B loaded A's blocks and its tokens are those of an engine without
    HyMCache.
    """
    console = Console()
    require_packages("vllm")
    log_dir = cache_dir / "demo-logs"  # of the last run only
    shutil.rmtree(log_dir, ignore_errors=True)
    with termination_unwinds(), log_shown_on_failure(console):
        outcome = _run(console, prompt_tokens, transport, cache_dir, log_dir)
        console.print(_table(outcome))
        outcome.check()
    console.print("[green]B took A's KV, and its tokens are those of an engine without HyMCache.")


def _run(
    console: Console, prompt_tokens: int, transport: TransportChoice, cache_dir: Path, log_dir: Path
) -> SharedPrompt:
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.fields[who]:<9}"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        refresh_per_second=4,
    )
    tasks = {who: progress.add_task("waiting", who=who, total=1, start=False) for who in _ROWS}

    def report(who: str, text: str) -> None:
        progress.start_task(tasks[who])
        done = text.startswith("done")
        progress.update(tasks[who], description=text, completed=int(done))

    sizes = ServiceOptions(
        capacity_bytes=GIB, staging_bytes=256 * MIB, write_buffer_bytes=256 * MIB
    )
    with progress, tempfile.TemporaryDirectory(prefix="hymcache-demo-") as folder:
        report("model", "making it")
        model = make_model(TINY, cache_dir)
        report("model", f"done: {model}")
        report("service", "starting")
        with running_service(Path(folder), log_dir, embedded=True, options=sizes) as service:
            report("service", f"done: listening on {service.master}")
            config = hymcache_transfer_config(service.master, transport=transport.value)
            return share_prompt(
                model,
                config,
                log_dir,
                prompt_tokens=prompt_tokens,
                report=lambda engine, text: report(f"engine {engine}", text),
            )


def _table(outcome: SharedPrompt) -> Table:
    stored = outcome.stored
    table = Table(
        title="Two engines, one prompt",
        box=box.SIMPLE_HEAD,
        padding=0,
        caption=f"A computed the prompt in {_ms(outcome.storing.ttft_s)} and stored "
        f"{stored.blocks_saved} blocks ({decimal(stored.bytes_saved)}).",
    )
    # Nothing may be cut off in a terminal of 80 columns.
    table.add_column("prompt\nto B", no_wrap=True)
    for column in (
        *("tokens", "TTFT\ncomputed", "TTFT\nremote"),
        *("blocks\nasked", "\nhit", "\nloaded", "bytes\nmoved"),
    ):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("by", no_wrap=True)
    table.add_column("same\ntokens", no_wrap=True)
    for turn in outcome.turns:
        counts = turn.counts
        table.add_row(
            turn.name,
            str(turn.prompt_tokens),
            _ms(turn.computed.ttft_s),
            _ms(turn.remote.ttft_s),
            str(counts.blocks_asked),
            str(counts.blocks_hit),
            str(counts.blocks_loaded),
            decimal(counts.bytes_loaded),
            ", ".join(counts.transports) or "-",
            "[green]yes" if turn.tokens_agree else "[bold red]no",
        )
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
