"""The numbers of a run of `hymcache bench region`, from its samples."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from hymcache.bench.samples import Sample, of_kind
from hymcache.limits import GIB, MIB


def region_numbers(samples: Sequence[Sample]) -> dict[str, float | None]:
    """Every number by name: medians over the rounds.

    `region_load_*` is CPU time a byte, of the bare copy's in the same round; `*_gb_per_cpu_s` is
    10^9 bytes a CPU second. `region_first_touch` is CPU time of the first load through a new
    mapping, of the next one's.
    """
    numbers: dict[str, float | None] = {}
    for sample in of_kind(samples, "region_lookup"):
        numbers[f"region_lookup32_{sample['case']}_us"] = sample["p50_us"]
    for sample in of_kind(samples, "region_first_touch"):
        name = "region_first_touch" + ("_prefaulted" if sample["prefault"] else "")
        numbers[name] = sample["first_cpu_s"] / sample["next_cpu_s"]
        if sample["prefault"]:
            gib = sample["moved_bytes"] / GIB
            numbers["region_prefault_ms_per_gib"] = sample["prefault_cpu_s"] * 1e3 / gib
    costs = region_costs(samples)
    for (operation, block_bytes, side), rounds in costs.items():
        name = f"region_{operation}_{block_bytes // MIB}m"
        suffix = "" if side == "plain" else f"_{side}"
        reference = costs.get((operation, block_bytes, "reference"))
        if reference is not None and side != "reference":
            numbers[name + suffix] = statistics.median(
                cost / base for cost, base in zip(rounds, reference, strict=True)
            )
        numbers[f"{name}{suffix}_gb_per_cpu_s"] = 1 / statistics.median(rounds)
    return numbers


def region_costs(samples: Sequence[Sample]) -> dict[tuple[str, int, str], list[float]]:
    """CPU seconds a GB of all rounds, in their order, by operation, block size and side."""
    costs: dict[tuple[str, int, str], dict[int, float]] = {}
    for sample in of_kind(samples, "region_copy"):
        case = (sample["operation"], sample["block_bytes"], sample["side"])
        costs.setdefault(case, {})[sample["round"]] = sample["cpu_s"] / sample["moved_bytes"] * 1e9
    return {case: [rounds[i] for i in sorted(rounds)] for case, rounds in costs.items()}
