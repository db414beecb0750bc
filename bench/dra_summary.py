"""The numbers of a run of the Kubernetes driver, from its samples."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from hymcache.bench.samples import Sample, of_kind

_SIMULATED = "cluster and fabric are simulated"


def dra_numbers(samples: Sequence[Sample]) -> tuple[dict[str, float | None], dict[str, str]]:
    """Every number by name, and notes on them."""
    attaches = of_kind(samples, "attach")
    prepares = sorted(sample["ms"] for sample in of_kind(samples, "prepare"))
    many = of_kind(samples, "reconcile")
    numbers: dict[str, float | None] = {
        "attach_own_p50_ms": _median([sample["own_ms"] for sample in attaches]),
        "attach_own_p99_ms": _p99([sample["own_ms"] for sample in attaches]),
        "attach_total_p50_ms": _median([sample["total_ms"] for sample in attaches]),
        "prepare_p50_ms": _median(prepares),
        "prepare_p99_ms": _p99(prepares),
        "reconcile_s": many[-1]["seconds"] if many else None,
        "reconciled_claims": many[-1]["claims"] if many else None,
        "controller_peak_mib": many[-1]["controller_peak_mib"] if many else None,
    }
    return numbers, {"attach_total_p50_ms": f"with the fabric manager; {_SIMULATED}"}


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _p99(values: Sequence[float]) -> float | None:
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))] if values else None
