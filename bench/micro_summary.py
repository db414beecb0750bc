"""The numbers of a micro run, from its samples."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from hymcache.bench.samples import Sample, of_kind

REFERENCE: Final = "reference"
LINE_RATE_SUFFIX: Final = "_of_line_rate"
# How ours was measured, and what that adds to the name of the number.
SUFFIXES: Final[Mapping[str, str]] = {
    "copy_alone": "_copy_alone",
    "plain": "",
    "crc": "_crc",
    "device": "_device",
    "flushed": "_flushed",
}


def micro_numbers(samples: Sequence[Sample]) -> dict[str, float | None]:
    """Every number of the run by name; None where nothing was measured.

    Copies are ratios of CPU seconds per GB to the reference in the same round; the median over
    the rounds counts.
    """
    numbers: dict[str, float | None] = dict(_copy_ratios(samples))
    numbers.update(_line_rates(samples))
    numbers.update(_lookup_numbers(samples))
    numbers["metadata_bytes_per_object"] = _metadata_bytes(samples)
    return numbers


def copy_costs(samples: Sequence[Sample]) -> dict[str, dict[str, list[float]]]:
    """CPU seconds per GB of all rounds: {case: {side: [...]}}, sides as in `SUFFIXES`."""
    costs: dict[str, dict[str, list[float]]] = {}
    for sample in of_kind(samples, "copy"):
        sides = costs.setdefault(sample["case"], {})
        sides.setdefault(sample["side"], []).append(sample["cpu_s_per_gb"])
    return costs


def _copy_ratios(samples: Sequence[Sample]) -> dict[str, float]:
    rounds: dict[tuple[str, int], dict[str, float]] = {}
    for sample in of_kind(samples, "copy"):
        sides = rounds.setdefault((sample["case"], sample["round"]), {})
        sides[sample["side"]] = sample["cpu_s_per_gb"]
    ratios: dict[str, list[float]] = {}
    for (case, _), sides in rounds.items():
        reference = sides.pop(REFERENCE)
        if reference <= 0:
            continue  # a NIC may move so little at no CPU time that could be measured
        for side, cost in sides.items():
            ratios.setdefault(case + SUFFIXES[side], []).append(cost / reference)
    return {name: statistics.median(values) for name, values in ratios.items()}


def _line_rates(samples: Sequence[Sample]) -> dict[str, float]:
    """What part of the port's speed RDMA reached, where the kernel knows that speed."""
    speeds = [sample["bits_per_second"] for sample in of_kind(samples, "port")]
    if not speeds or speeds[-1] <= 0:
        return {}
    parts: dict[str, list[float]] = {}
    for sample in of_kind(samples, "copy"):
        if sample["side"] == "plain" and sample["case"].startswith("verbs_"):
            rate = sample["moved_bytes"] * 8 / sample["wall_s"]
            name = sample["case"] + LINE_RATE_SUFFIX
            parts.setdefault(name, []).append(rate / speeds[-1])
    return {name: statistics.median(values) for name, values in parts.items()}


def _lookup_numbers(samples: Sequence[Sample]) -> dict[str, float | None]:
    lookups = of_kind(samples, "lookup")
    ours = {sample["round"]: sample for sample in lookups if sample["side"] == "ours"}
    echoes = {sample["round"]: sample for sample in lookups if sample["side"] == "echo"}
    rounds = sorted(ours.keys() & echoes.keys())
    if not rounds:
        return {"lookup32_server_us": None, "lookup32_p50_ratio": None}
    return {
        "lookup32_server_us": statistics.median(ours[r]["server_cpu_us"] for r in rounds),
        "lookup32_p50_ratio": statistics.median(
            ours[r]["p50_us"] / echoes[r]["p50_us"] for r in rounds
        ),
        "lookup32_p50_us": statistics.median(ours[r]["p50_us"] for r in rounds),
        "echo_server_us": statistics.median(echoes[r]["server_cpu_us"] for r in rounds),
        "echo_p50_us": statistics.median(echoes[r]["p50_us"] for r in rounds),
    }


def _metadata_bytes(samples: Sequence[Sample]) -> float | None:
    grown = [
        (sample["resident_after_bytes"] - sample["resident_before_bytes"]) / sample["objects"]
        for sample in of_kind(samples, "metadata")
    ]
    return statistics.median(grown) if grown else None
