"""What a person sees at the end of a run: the table of numbers, targets and verdicts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rich.table import Table

from hymcache.bench.micro_summary import LINE_RATE_SUFFIX
from hymcache.bench.samples import machine_context
from hymcache.bench.targets import TARGETS, Verdict, verdict

Numbers = Mapping[str, float | None]
_STYLES: Final = {Verdict.MET: "green", Verdict.MISSED: "bold red", Verdict.SKIPPED: "yellow"}


def write_summary(path: Path, numbers: Numbers, notes: Mapping[str, str]) -> None:
    """Writes the numbers by name (null: not measured, `notes` says why), and beside them the
    verdicts and the machine."""
    verdicts = {name: found.value for name in numbers if (found := verdict(name, numbers[name]))}
    document = {
        **numbers,
        "verdicts": verdicts,
        "notes": dict(notes),
        "context": machine_context(),
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def verdict_table(title: str, numbers: Numbers, notes: Mapping[str, str]) -> Table:
    """One row a number: value, target, verdict, and what it is."""
    table = Table(title=title)
    table.add_column("number")
    table.add_column("value", justify="right")
    table.add_column("target", justify="right")
    table.add_column("verdict")
    table.add_column("what it is", overflow="fold")
    for name, value in numbers.items():
        target, judged = TARGETS.get(name), verdict(name, value)
        table.add_row(
            name,
            _shown(name, value),
            f"<= {target.limit:.4g} {target.unit}" if target else "",
            f"[{_STYLES[judged]}]{judged.value}[/]" if judged else "",
            notes.get(name) or (target.meaning if target else _meaning(name)),
        )
    return table


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 100:.3g} %" if name.endswith(LINE_RATE_SUFFIX) else f"{value:.4g}"


def _meaning(name: str) -> str:
    if not name.endswith(LINE_RATE_SUFFIX):
        return ""
    return "of the port's speed; both ends are on this host, so no switch and no cable took part"
