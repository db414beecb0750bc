"""The figures, from stats.json alone; their numbers are the paper's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hymcache.bench.region_reuse.request_log import TIER_MEANINGS, Tier
from hymcache.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Json = Mapping[str, Any]
# Okabe and Ito's colours: told apart by every kind of colour vision.
_COLOURS: Final = {
    Tier.T0: "#7a7a7a",
    Tier.T1: "#e69f00",
    Tier.T2: "#cc79a7",
    Tier.T3: "#56b4e9",
    Tier.T4: "#0072b2",
}
_MARKS: Final = ("o", "s", "^", "D", "v", "P", "X", "*")
_BAR: Final = 0.38


def draw_figures(stats: Json, out: Path) -> list[Path]:
    """Figures 6 to 10 as PNG files; those without data are left out."""
    drawers = {
        "figure6_cross_reuse.png": _cross_reuse,
        "figure7_sharing_gap.png": _sharing_gap,
        "figure8_hits_and_rate.png": _hits_and_rate,
        "figure9_distribution.png": _distribution,
        "figure10_first_touch.png": _first_touch,
    }
    paths = []
    for name, draw in drawers.items():
        figure = draw(stats)
        if figure is not None:
            figure.savefig(out / name, dpi=150)
            paths.append(out / name)
    return paths


def _label(tier: str) -> str:
    return f"{tier} {TIER_MEANINGS[Tier(tier)]}"


def _cells(stats: Json, tier: str, arm: str) -> dict[int, Json]:
    return {
        cell["prefix"]: cell
        for cell in stats["cells"]
        if (cell["tier"], cell["arm"]) == (tier, arm)
    }


def _p50_ms(stats: Json, tier: str, arm: str, prefix: int) -> float:
    """Not a number where a run that was cut short has none: nothing is drawn then."""
    cell = _cells(stats, tier, arm).get(prefix)
    return math.nan if cell is None else cell["p50_ms"]


def _cross_reuse(stats: Json) -> Figure:
    figure, (axes,) = _new_figure(7.0, 4.4)
    spans = {
        (row["tier"], row["prefix"]): row["median_ms"]
        for row in stats["repetitions"]
        if row["arm"] == "cross"
    }
    for tier, mark in zip(stats["tiers"], _MARKS, strict=False):
        cells = _cells(stats, tier, "cross")
        middles = [cell["p50_ms"] for cell in cells.values()]
        ranges = [spans[tier, prefix] for prefix in cells]
        axes.errorbar(
            list(cells),
            middles,
            yerr=[
                [max(0.0, m - min(r)) for m, r in zip(middles, ranges, strict=True)],
                [max(0.0, max(r) - m) for m, r in zip(middles, ranges, strict=True)],
            ],
            color=_COLOURS[Tier(tier)],
            marker=mark,
            capsize=3,
            label=_label(tier),
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(stats["prefixes"], [str(prefix) for prefix in stats["prefixes"]])
    axes.set_xlabel("shared prefix, tokens")
    axes.set_ylabel("TTFT of the reusing request, p50, ms")
    axes.set_title("Reuse on the other engine; bars span the repetitions", loc="left")
    return _finish(figure, [axes])


def _sharing_gap(stats: Json) -> Figure:
    prefixes = sorted({stats["prefixes"][0], stats["prefixes"][-1]})
    figure, panels = _new_figure(4.8 * len(prefixes), 4.2, len(prefixes))
    for axes, prefix in zip(panels, prefixes, strict=True):
        for index, (arm, colour) in enumerate((("same", "#56b4e9"), ("cross", "#d55e00"))):
            heights = [_p50_ms(stats, tier, arm, prefix) for tier in stats["tiers"]]
            places = [place + (index - 0.5) * _BAR for place in range(len(heights))]
            bars = axes.bar(places, heights, width=_BAR, color=colour, label=f"{arm} engine")
            if arm == "cross":
                (gaps,) = (g for g in stats["sharing_gap"] if g["prefix"] == prefix)
                ratios = [gaps["cross_over_same"][tier] for tier in stats["tiers"]]
                labels = ["" if ratio is None else f"{ratio:.2f}x" for ratio in ratios]
                axes.bar_label(bars, labels, fontsize=8)
        axes.set_yscale("log")
        axes.set_xticks(range(len(stats["tiers"])), stats["tiers"])
        axes.set_title(f"{prefix} tokens; labels: cross / same", loc="left")
    panels[0].set_ylabel("TTFT of the reusing request, p50, ms")
    return _finish(figure, panels)


def _hits_and_rate(stats: Json) -> Figure | None:
    rates = [row for row in stats["read_rate"] if row["effective_gb_s"] is not None]
    if not rates:
        return None
    figure, (left, right) = _new_figure(9.6, 4.0, 2)
    cells = _cells(stats, Tier.T4, "cross")
    left.plot(
        [str(prefix) for prefix in cells],
        [cell["hit"] * 100 for cell in cells.values()],
        color=_COLOURS[Tier.T4],
        marker="o",
        label="T4, cross",
    )
    left.plot(
        [str(row["prefix"]) for row in stats["hit_bound"]],
        [row["hit"] * 100 for row in stats["hit_bound"]],
        color="#7a7a7a",
        ls="--",
        label="all whole blocks",
    )
    left.set_ylabel("prompt tokens that were not computed, %")
    left.set_title("(a) hits", loc="left")
    names = [str(row["prefix"]) for row in rates]
    right.plot(
        names,
        [row["effective_gb_s"] for row in rates],
        color=_COLOURS[Tier.T4],
        marker="o",
        label="KV volume over the whole TTFT",
    )
    if rates[0]["ceiling_gb_s"] is not None:
        right.axhline(rates[0]["ceiling_gb_s"], color="#7a7a7a", ls="--", label="plain copy")
    right.set_yscale("log")
    right.set_ylabel("GB/s")
    right.set_title("(b) effective read rate", loc="left")
    for axes in (left, right):
        axes.set_xlabel("shared prefix, tokens")
    return _finish(figure, [left, right])


def _distribution(stats: Json) -> Figure:
    prefixes = sorted({stats["prefixes"][0], stats["prefixes"][-1]})
    figure, panels = _new_figure(4.8 * len(prefixes), 4.0, len(prefixes))
    for axes, prefix in zip(panels, prefixes, strict=True):
        for tier in stats["tiers"]:
            times = _cells(stats, tier, "cross").get(prefix, {"ttft_ms": []})["ttft_ms"]
            shares = [(index + 1) / len(times) for index in range(len(times))]
            axes.step(times, shares, where="post", color=_COLOURS[Tier(tier)], label=_label(tier))
        axes.set_xscale("log")
        axes.set_xlabel("TTFT of the reusing request, ms")
        axes.set_title(f"{prefix} tokens, other engine", loc="left")
    panels[0].set_ylabel("fraction of requests")
    return _finish(figure, panels)


def _first_touch(stats: Json) -> Figure | None:
    if not stats["first_touch"]:
        return None
    figure, (axes,) = _new_figure(7.0, 4.2)
    for prefix, mark in zip(stats["prefixes"], _MARKS, strict=False):
        rows = [row for row in stats["first_touch"] if row["prefix"] == prefix]
        axes.plot(
            [row["session"] for row in rows],
            [row["ttft_ms"] for row in rows],
            ls="none",
            marker=mark,
            label=f"{prefix} tokens",
        )
    axes.set_xlabel("session; the shortest prefix runs first")
    axes.set_ylabel("TTFT of the reusing request, ms")
    mapped = (
        "all pages mapped before" if stats["setup"]["options"].get("prefault") else "no prefault"
    )
    axes.set_title(f"First touch by the reading engine, {mapped}", loc="left")
    return _finish(figure, [axes])


def _new_figure(width: float, height: float, panels: int = 1) -> tuple[Figure, list[Axes]]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("figures need matplotlib: pip install 'hymcache[bench]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def _finish(figure: Figure, panels: list[Axes]) -> Figure:
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, fontsize=8)
    return figure
