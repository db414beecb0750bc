"""Pictures of results, drawn from the samples alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hymcache.bench.micro_summary import REFERENCE, copy_costs
from hymcache.bench.samples import Sample, of_kind
from hymcache.bench.ttft_summary import PHASES, median_ms
from hymcache.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours: told apart by every kind of colour vision.
_GREY: Final = "#9a9a9a"
_BLUE: Final = "#0072b2"
_SKY: Final = "#56b4e9"
_ORANGE: Final = "#e69f00"
_SIDES: Final = {
    REFERENCE: ("plain copy", _GREY),
    "plain": ("HyMCache", _BLUE),
    "crc": ("HyMCache, crc32c checked", _SKY),
}
_PHASE_COLOURS: Final = dict(zip(PHASES, (_GREY, _BLUE, _ORANGE), strict=True))
_BAR: Final = 0.26


def draw_micro(samples: Sequence[Sample], path: Path) -> None:
    """CPU seconds per GB of every copy beside its reference: medians, and the range of rounds."""
    costs = copy_costs(samples)
    figure, axes = _new_figure(width=9.0, height=4.2)
    names = list(costs)
    for index, (side, (label, colour)) in enumerate(_SIDES.items()):
        places = [i + (index - 1) * _BAR for i, name in enumerate(names) if side in costs[name]]
        rounds = [costs[name][side] for name in names if side in costs[name]]
        _bars(axes, places, rounds, label, colour)
    axes.set_xticks(range(len(names)), [name.replace("_", "\n") for name in names])
    axes.set_ylabel("CPU seconds per GB, client and server")
    axes.set_title("Copies of blocks: median of rounds, whiskers from least to most", loc="left")
    _save(figure, axes, path)


def draw_ttft(samples: Sequence[Sample], path: Path) -> None:
    """TTFT by system and length: computed, from another engine, from the engine's own cache."""
    timed = of_kind(samples, "ttft")
    groups = list(dict.fromkeys((sample["tokens"], sample["system"]) for sample in timed))
    groups.sort()
    figure, axes = _new_figure(width=max(6.0, 1.8 * len(groups) + 1.5), height=4.2)
    for index, phase in enumerate(PHASES):
        places, rounds = [], []
        for i, (tokens, system) in enumerate(groups):
            if median_ms(samples, system, phase, tokens) is None:
                continue
            places.append(i + (index - 1) * _BAR)
            rounds.append(
                [
                    sample["ttft_s"] * 1e3
                    for sample in timed
                    if (sample["tokens"], sample["system"], sample["phase"])
                    == (tokens, system, phase)
                ]
            )
        _bars(axes, places, rounds, phase, _PHASE_COLOURS[phase], labelled=True)
    axes.set_yscale("log")
    axes.set_xticks(range(len(groups)), [f"{system}\n{tokens} tokens" for tokens, system in groups])
    axes.set_ylabel("TTFT, ms")
    axes.set_title("Time to first token: median, whiskers from least to most", loc="left")
    _save(figure, axes, path)


def _new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("pictures need matplotlib: pip install 'hymcache[bench]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _bars(
    axes: Axes,
    places: Sequence[float],
    rounds: Sequence[Sequence[float]],
    label: str,
    colour: str,
    *,
    labelled: bool = False,
) -> None:
    middles = [statistics.median(values) for values in rounds]
    below = [middle - min(values) for middle, values in zip(middles, rounds, strict=True)]
    above = [max(values) - middle for middle, values in zip(middles, rounds, strict=True)]
    bars = axes.bar(places, middles, width=_BAR, color=colour, label=label)
    axes.errorbar(
        places, middles, yerr=[below, above], fmt="none", ecolor="#333333", elinewidth=0.8
    )
    if labelled:
        axes.bar_label(bars, [f"{middle:.0f}" for middle in middles], padding=2, fontsize=8)


def _save(figure: Figure, axes: Axes, path: Path) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
