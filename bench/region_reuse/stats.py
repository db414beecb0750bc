"""stats.json: every number of the tables and figures, from the raw requests.

cells          Table 6: a tier, an arm and a prefix, over all sessions and repetitions
cross_reuse    Table 3: medians of the cross arm, speed-ups, hit rates, cross/same
sharing_gap    Table 4: cross over same, of each tier
gap            the same for the region over all prefixes: the geometric mean, with its target
read_rate      Table 5: KV volume over the whole median TTFT
local_premium  Table 7: what the region costs beside the engine's own cache
repetitions    Table 8: medians of each repetition, and their spread
fit            equation 1: TTFT of the region's cross arm as a line over tokens
first_touch    Figure 10: TTFT by session, in the order of the run
hit_bound      Figure 8(a): the most that whole blocks allow
controls       no leakage, no false hit, fresh region; passed is null where the run had none of it
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from hymcache.bench.region_reuse.request_log import Arm, Request, Tier
from hymcache.bench.samples import Sample, of_kind
from hymcache.bench.targets import TARGETS, verdict

Json = dict[str, Any]
_LEAKAGE_MAX: Final = 0.05  # the paper's threshold for hits of a session's first request
FALSE_HIT_KEYS_MIN: Final = 12_298  # and its number of queries for keys that were never stored
_REUSING: Final = 2
_SETUP: Final = ("model", "kv_bytes_per_token", "block_tokens", "options")
_GAP_NAME: Final = "region_cross_over_same"

Groups = Mapping[tuple[Tier, Arm, int], Sequence[Request]]


def stats_of(samples: Sequence[Sample], requests: Sequence[Request]) -> Json:
    """All statistics; seconds become milliseconds."""
    groups = _groups(requests)
    tiers = [tier for tier in Tier if any(key[0] is tier for key in groups)]
    prefixes = sorted({key[2] for key in groups})
    medians = {key: _median_ms(found) for key, found in groups.items()}
    (setup,) = of_kind(samples, "setup")
    return {
        "setup": {name: setup[name] for name in _SETUP},
        "tiers": tiers,
        "prefixes": prefixes,
        "skipped": {s["tier"]: s["reason"] for s in of_kind(samples, "skipped_tier")},
        "cells": [_cell(key, groups[key]) for key in sorted(groups)],
        "cross_reuse": [_cross_reuse(prefix, tiers, medians, groups) for prefix in prefixes],
        "sharing_gap": [_gaps(prefix, tiers, medians) for prefix in prefixes],
        "gap": _gap(prefixes, medians),
        "hit_bound": _hit_bounds(setup, groups),
        "read_rate": _read_rates(prefixes, medians, setup, samples),
        "local_premium": [_premium(prefix, medians) for prefix in prefixes],
        "repetitions": [_repetitions(key, groups[key]) for key in sorted(groups)],
        "fit": _fit(prefixes, groups),
        "first_touch": _first_touch(groups),
        "copy_paths": _copy_paths(samples),
        "controls": _controls(samples, requests),
    }


def _groups(requests: Iterable[Request]) -> Groups:
    groups: dict[tuple[Tier, Arm, int], list[Request]] = {}
    for request in requests:
        if request.order == _REUSING:
            groups.setdefault((request.tier, request.arm, request.prefix_tokens), []).append(
                request
            )
    return groups


def _median_ms(requests: Iterable[Request]) -> float:
    return statistics.median(request.ttft_s for request in requests) * 1e3


def _cell(key: tuple[Tier, Arm, int], requests: Sequence[Request]) -> Json:
    times_ms = np.array([request.ttft_s for request in requests]) * 1e3
    p50, p90, p99 = (float(value) for value in np.percentile(times_ms, (50, 90, 99)))
    return {
        "tier": key[0],
        "arm": key[1],
        "prefix": key[2],
        "n": len(requests),
        "p50_ms": p50,
        "p90_ms": p90,
        "p99_ms": p99,
        "p99_over_p50": p99 / p50,
        "hit": statistics.median(request.hit_fraction for request in requests),
        "ttft_ms": [float(value) for value in np.sort(times_ms)],
    }


def _cross_reuse(
    prefix: int, tiers: Sequence[Tier], medians: Mapping[Any, float], groups: Groups
) -> Json:
    cross = {tier: medians.get((tier, Arm.CROSS, prefix)) for tier in tiers}
    shared = groups.get((Tier.T4, Arm.CROSS, prefix), ())
    return {
        "prefix": prefix,
        "median_ms": cross,
        "t4_speedup": _ratio(cross.get(Tier.T0), cross.get(Tier.T4)),
        "t4_hit": statistics.median(r.hit_fraction for r in shared) if shared else None,
        "cross_over_same": _gaps(prefix, tiers, medians)["cross_over_same"],
    }


def _gaps(prefix: int, tiers: Sequence[Tier], medians: Mapping[Any, float]) -> Json:
    return {
        "prefix": prefix,
        "cross_over_same": {
            tier: _ratio(
                medians.get((tier, Arm.CROSS, prefix)), medians.get((tier, Arm.SAME, prefix))
            )
            for tier in tiers
        },
    }


def _gap(prefixes: Sequence[int], medians: Mapping[Any, float]) -> Json:
    ratios = [
        medians[cross] / medians[same]
        for prefix in prefixes
        if (cross := (Tier.T4, Arm.CROSS, prefix)) in medians
        and (same := (Tier.T4, Arm.SAME, prefix)) in medians
    ]
    mean = statistics.geometric_mean(ratios) if ratios else None
    found = verdict(_GAP_NAME, mean)
    return {
        "name": _GAP_NAME,
        "value": mean,
        "limit": TARGETS[_GAP_NAME].limit,
        "verdict": found.value if found else None,
    }


def _hit_bounds(setup: Sample, groups: Groups) -> list[Json]:
    """The most that can be hit of each prompt: the whole blocks of its prefix."""
    block = setup["block_tokens"]
    prompts = {key[2]: found[0].prompt_tokens for key, found in sorted(groups.items())}
    return [
        {"prefix": prefix, "hit": prefix // block * block / tokens}
        for prefix, tokens in sorted(prompts.items())
    ]


def _read_rates(
    prefixes: Sequence[int],
    medians: Mapping[Any, float],
    setup: Sample,
    samples: Sequence[Sample],
) -> list[Json]:
    paths = _copy_paths(samples)
    ceiling = paths.get("plain copy", {}).get("median_gb_s")
    rates = []
    for prefix in prefixes:
        median_ms = medians.get((Tier.T4, Arm.CROSS, prefix))
        kv_bytes = prefix * setup["kv_bytes_per_token"]
        rate = None if median_ms is None else kv_bytes / (median_ms / 1e3) / 1e9
        rates.append(
            {
                "prefix": prefix,
                "kv_mib": kv_bytes / (1 << 20),
                "t4_p50_ms": median_ms,
                "effective_gb_s": rate,
                "ceiling_gb_s": ceiling,
                "of_ceiling": _ratio(rate, ceiling),
            }
        )
    return rates


def _premium(prefix: int, medians: Mapping[Any, float]) -> Json:
    own, shared = (medians.get((tier, Arm.SAME, prefix)) for tier in (Tier.T1, Tier.T4))
    return {"prefix": prefix, "t1_ms": own, "t4_ms": shared, "t4_over_t1": _ratio(shared, own)}


def _repetitions(key: tuple[Tier, Arm, int], requests: Sequence[Request]) -> Json:
    by_repetition: dict[int, list[Request]] = {}
    for request in requests:
        by_repetition.setdefault(request.repetition, []).append(request)
    medians_ms = [_median_ms(by_repetition[number]) for number in sorted(by_repetition)]
    spread = (max(medians_ms) - min(medians_ms)) / statistics.median(medians_ms)
    return {
        "tier": key[0],
        "arm": key[1],
        "prefix": key[2],
        "median_ms": medians_ms,
        "spread": spread,
    }


def _fit(prefixes: Sequence[int], groups: Groups) -> Json | None:
    """A least-squares line through the medians of the region's cross arm."""
    cells = [found for p in prefixes if (found := groups.get((Tier.T4, Arm.CROSS, p)))]
    if len(cells) < 2:
        return None
    tokens = np.array([statistics.median(r.prompt_tokens for r in cell) for cell in cells])
    times_ms = np.array([_median_ms(cell) for cell in cells])
    slope_ms, intercept_ms = (float(value) for value in np.polyfit(tokens, times_ms, 1))
    residuals_ms = times_ms - (intercept_ms + slope_ms * tokens)
    each_ms = [
        request.ttft_s * 1e3 - (intercept_ms + slope_ms * request.prompt_tokens)
        for cell in cells
        for request in cell
    ]
    return {
        "intercept_ms": intercept_ms,
        "slope_us_per_token": slope_ms * 1e3,
        "tokens": [float(value) for value in tokens],
        "residuals_ms": [float(value) for value in residuals_ms],
        "residual_max_ms": float(np.abs(residuals_ms).max()),
        "residual_rms_of_requests_ms": float(np.sqrt(np.mean(np.square(each_ms)))),
    }


def _first_touch(groups: Groups) -> list[Json]:
    return [
        {
            "prefix": key[2],
            "repetition": request.repetition,
            "session": request.session,
            "ttft_ms": request.ttft_s * 1e3,
        }
        for key, requests in sorted(groups.items())
        if key[:2] == (Tier.T4, Arm.CROSS)
        for request in requests
    ]


def _copy_paths(samples: Sequence[Sample]) -> Json:
    rates: dict[str, list[float]] = {}
    for sample in of_kind(samples, "copy_path"):
        rates.setdefault(sample["path"], []).append(sample["bytes"] / sample["seconds"] / 1e9)
    return {
        path: {"median_gb_s": statistics.median(found), "gb_s": found}
        for path, found in rates.items()
    }


def _controls(samples: Sequence[Sample], requests: Sequence[Request]) -> Json:
    first = [request for request in requests if request.order == 1]
    leakage = max((request.hit_fraction for request in first), default=None)
    probes = of_kind(samples, "never_stored")
    probed = sum(sample["keys"] for sample in probes)
    false_hits = sum(sample["hits"] for sample in probes)
    regions = of_kind(samples, "region_start")
    return {
        "no_leakage": {
            "hit_fraction_max": leakage,
            "requests": len(first),
            "passed": leakage is not None and leakage <= _LEAKAGE_MAX,
        },
        "no_false_hit": {
            "keys": probed,
            "hits": false_hits,
            "stored_keys": sum(sample["stored_keys"] for sample in probes),
            "stored_keys_found": sum(sample["stored_found"] for sample in probes),
            "passed": None
            if not probes
            else probed >= FALSE_HIT_KEYS_MIN
            and false_hits == 0
            and all(s["stored_found"] == s["stored_keys"] > 0 for s in probes),
        },
        "fresh_region": {
            "starts": [[sample["formatted"], sample["attached"]] for sample in regions],
            "passed": None
            if not regions
            else all((s["formatted"], s["attached"]) == (1, 1) for s in regions),
        },
        "equal_answers": _equal_answers(requests),
    }


def _equal_answers(requests: Sequence[Request]) -> Json:
    """Whether every tier's greedy answers are those of the tier without reuse."""
    by_prompt: dict[tuple[Any, ...], dict[Tier, tuple[int, ...]]] = {}
    for r in requests:
        key = (r.repetition, r.arm, r.prefix_tokens, r.session, r.order)
        by_prompt.setdefault(key, {})[r.tier] = r.tokens
    compared = equal = 0
    for answers in by_prompt.values():
        right = answers.pop(Tier.T0, None)
        if right is not None:
            compared += len(answers)
            equal += sum(tokens == right for tokens in answers.values())
    passed = compared == equal if compared else None
    return {"compared": compared, "equal": equal, "passed": passed}


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None or below == 0 else above / below
