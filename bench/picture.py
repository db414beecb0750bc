"""Pictures of results, drawn from the samples alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hymcache.bench.micro_summary import REFERENCE, copy_costs
from hymcache.bench.region_summary import region_costs
from hymcache.bench.samples import Sample, of_kind
from hymcache.bench.ttft_summary import PHASES, median_ms
from hymcache.limits import MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours: told apart by every kind of colour vision.
_GREY: Final = "#7a7a7a"
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
    transports = list(dict.fromkeys(name.partition("_")[0] for name in costs))
    figure, panels = _new_figure(1.0 + 5.0 * len(transports), 4.2, panels=len(transports))
    for axes, transport in zip(panels, transports, strict=True):
        names = [name for name in costs if name.startswith(f"{transport}_")]
        sides = {side: look for side, look in _SIDES.items() if side in costs[names[0]]}
        for index, (side, (label, colour)) in enumerate(sides.items()):
            shift = (index - (len(sides) - 1) / 2) * _BAR
            places = [i + shift for i in range(len(names))]
            _bars(axes, places, [costs[name][side] for name in names], label, colour)
        labels = [name.removeprefix(f"{transport}_").replace("_", " ") for name in names]
        axes.set_xticks(range(len(names)), labels)
        axes.set_title(f"{transport}: median of rounds, least to most", loc="left")
    panels[0].set_ylabel("CPU seconds per GB, client and server")
    _save(figure, panels, path)


def draw_region(samples: Sequence[Sample], path: Path) -> None:
    """CPU seconds per GB of loads and stores in a region, beside the bare copy."""
    costs = region_costs(samples)
    cases = list(dict.fromkeys((operation, size) for operation, size, _ in costs))
    figure, (axes,) = _new_figure(6.5, 4.2)
    for index, (side, (label, colour)) in enumerate(_SIDES.items()):
        known = [i for i, case in enumerate(cases) if (*case, side) in costs]
        places = [i + (index - 1) * _BAR for i in known]
        _bars(axes, places, [costs[(*cases[i], side)] for i in known], label, colour)
    axes.set_xticks(range(len(cases)), [f"{name} {size // MIB}m" for name, size in cases])
    axes.set_ylabel("CPU seconds per GB")
    axes.set_title("A shared region: median of rounds, least to most", loc="left")
    _save(figure, [axes], path)


def draw_ttft(samples: Sequence[Sample], path: Path) -> None:
    """TTFT by system and length: computed, from another engine, from the engine's own cache."""
    timed = of_kind(samples, "ttft")
    groups = list(dict.fromkeys((sample["tokens"], sample["system"]) for sample in timed))
    groups.sort()
    figure, (axes,) = _new_figure(max(6.0, 1.8 * len(groups) + 1.5), 4.2)
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
    _save(figure, [axes], path)


def _new_figure(width: float, height: float, panels: int = 1) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


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
        labels = [f"{middle:.0f}" for middle in middles]
        axes.bar_label(bars, labels, label_type="center", fontsize=8, color="white")


def _save(figure: Figure, panels: Sequence[Axes], path: Path) -> None:
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.margins(y=0.3)  # room for the legend
        axes.legend(frameon=False, loc="upper left", ncols=3, fontsize=8)
    figure.savefig(path, dpi=150)
