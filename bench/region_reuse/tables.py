"""The tables, as Markdown, from stats.json alone; their numbers are the paper's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

Json = Mapping[str, Any]
_PASSED: Final = {True: "yes", False: "NO", None: "not in this run"}


def tables_of(stats: Json) -> str:
    """Tables 3 to 8, equation 1 and the controls."""
    sections = (
        ("Table 3: reuse on the other engine", _cross_reuse(stats)),
        ("Table 4: the sharing gap, cross over same", f"{_gaps(stats)}\n\n{_gap(stats)}"),
        ("Table 5: effective KV read rate of the region", _read_rates(stats)),
        ("Table 6: TTFT of the reusing request, ms", _cells(stats)),
        ("Table 7: the region beside the engine's own cache, same engine", _premium(stats)),
        ("Table 8: medians of the repetitions, cross arm", _repetitions(stats)),
        ("Equation 1", _equation(stats)),
        ("Copies into and out of the region", _copy_paths(stats)),
        ("Controls", _controls(stats)),
    )
    return "\n\n".join(f"## {title}\n\n{body}" for title, body in sections) + "\n"


def _cross_reuse(stats: Json) -> str:
    tiers = stats["tiers"]
    rows = [
        [
            row["prefix"],
            *(_ms(row["median_ms"][tier]) for tier in tiers),
            _times(row["t4_speedup"]),
            _percent(row["t4_hit"]),
            *(_times(row["cross_over_same"].get(tier)) for tier in ("T1", "T4")),
        ]
        for row in stats["cross_reuse"]
    ]
    return _table(
        [
            *("prefix", *(f"{tier}, ms" for tier in tiers)),
            *("T4 vs T0", "T4 hit", "T1 cross/same", "T4 cross/same"),
        ],
        rows,
    )


def _gaps(stats: Json) -> str:
    tiers = stats["tiers"]
    return _table(
        ["prefix", *tiers],
        [
            [row["prefix"], *(_times(row["cross_over_same"][tier]) for tier in tiers)]
            for row in stats["sharing_gap"]
        ],
    )


def _gap(stats: Json) -> str:
    gap = stats["gap"]
    if gap["value"] is None:
        return "Not measured: it takes the tier T4 with both arms."
    return (
        f"T4 over all prefixes (geometric mean): {gap['value']:.3f}, target at most "
        f"{gap['limit']:.2f}: {gap['verdict']}."
    )


def _read_rates(stats: Json) -> str:
    return _table(
        ["prefix", "KV, MiB", "T4 p50, ms", "effective, GB/s", "of a plain copy"],
        [
            [
                row["prefix"],
                f"{row['kv_mib']:.0f}",
                _ms(row["t4_p50_ms"]),
                _number(row["effective_gb_s"], 2),
                _percent(row["of_ceiling"]),
            ]
            for row in stats["read_rate"]
        ],
    )


def _cells(stats: Json) -> str:
    return _table(
        ["tier", "arm", "prefix", "n", "p50", "p90", "p99", "p99/p50", "hit"],
        [
            [
                *(cell[name] for name in ("tier", "arm", "prefix", "n")),
                *(_ms(cell[name]) for name in ("p50_ms", "p90_ms", "p99_ms")),
                _number(cell["p99_over_p50"], 2),
                _percent(cell["hit"]),
            ]
            for cell in stats["cells"]
        ],
    )


def _premium(stats: Json) -> str:
    return _table(
        ["prefix", "T1 p50, ms", "T4 p50, ms", "T4/T1"],
        [
            [row["prefix"], _ms(row["t1_ms"]), _ms(row["t4_ms"]), _times(row["t4_over_t1"])]
            for row in stats["local_premium"]
        ],
    )


def _repetitions(stats: Json) -> str:
    rows = [row for row in stats["repetitions"] if row["arm"] == "cross"]
    count = max((len(row["median_ms"]) for row in rows), default=0)
    return _table(
        ["tier", "prefix", *(f"rep {number + 1}" for number in range(count)), "spread"],
        [
            [
                row["tier"],
                row["prefix"],
                *(_ms(value) for value in row["median_ms"]),
                _percent(row["spread"]),
            ]
            for row in rows
        ],
    )


def _equation(stats: Json) -> str:
    fit = stats["fit"]
    if fit is None:
        return "Not fitted: it takes two prefixes of the tier T4."
    residuals = ", ".join(
        f"{residual:+.1f} ms at {tokens:.0f}"
        for tokens, residual in zip(fit["tokens"], fit["residuals_ms"], strict=True)
    )
    return (
        f"TTFT = {fit['intercept_ms']:.1f} ms + {fit['slope_us_per_token']:.2f} us/token, a "
        f"least-squares line through the medians of T4's cross arm. Residuals: {residuals}. Root "
        f"mean square over all requests: {fit['residual_rms_of_requests_ms']:.1f} ms."
    )


def _copy_paths(stats: Json) -> str:
    return _table(
        ["path", "median, GB/s"],
        [[path, _number(row["median_gb_s"], 2)] for path, row in stats["copy_paths"].items()],
    )


def _controls(stats: Json) -> str:
    controls = stats["controls"]
    leakage, hits = controls["no_leakage"], controls["no_false_hit"]
    equal, fresh = controls["equal_answers"], controls["fresh_region"]
    rows = [
        ["no leakage", f"first requests hit at most {_percent(leakage['hit_fraction_max'])}"],
        ["no false hit", f"{hits['hits']} hits of {hits['keys']} keys that were never stored"],
        ["fresh region", f"[formatted, attached] at each start: {fresh['starts']}"],
        ["equal answers", f"{equal['equal']} of {equal['compared']} as without reuse"],
    ]
    names = ("no_leakage", "no_false_hit", "fresh_region", "equal_answers")
    return _table(
        ["control", "found", "passed"],
        [[*row, _PASSED[controls[name]["passed"]]] for row, name in zip(rows, names, strict=True)],
    )


def _table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _ms(value: float | None) -> str:
    return _number(value, 1)


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
