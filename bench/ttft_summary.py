"""The numbers of a TTFT run, from its samples."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from hymcache.bench.samples import Sample, of_kind

PHASES: Final = ("cold", "remote", "local")
SHORT_TOKENS: Final = 2000
LONG_TOKENS: Final = 8000
_OURS: Final = "hymcache"
_MOONCAKE: Final = "mooncake"


def median_ms(samples: Sequence[Sample], system: str, phase: str, tokens: int) -> float | None:
    """Median TTFT in ms; None when the system was not measured at this length."""
    values = [value for _, value in _by_repetition(samples, system, phase, tokens).items()]
    return statistics.median(values) * 1e3 if values else None


def ttft_numbers(samples: Sequence[Sample]) -> dict[str, float | None]:
    """All medians in ms by `SYSTEM_PHASE_TOKENS_ms`, then the numbers that have targets.

    Ratios are medians over repetitions of the ratio within one repetition. A remote "hit" that
    was none (fewer cached tokens than a local hit has), or whose tokens differ, counts as no
    measurement at all: the number is None.
    """
    numbers: dict[str, float | None] = {}
    samples = of_kind(samples, "ttft")
    systems = list(dict.fromkeys(sample["system"] for sample in samples))
    lengths = sorted({sample["tokens"] for sample in samples})
    for system in systems:
        for tokens in lengths:
            for phase in PHASES:
                name = f"{system}_{phase}_{tokens}_ms"
                numbers[name] = median_ms(samples, system, phase, tokens)
    numbers["hit_ttft_ratio"] = _ratio(samples, (_OURS, "remote"), (_OURS, "local"), SHORT_TOKENS)
    numbers["remote_minus_local_8k_ms"] = _difference_ms(samples, LONG_TOKENS)
    numbers["remote_of_mooncake_8k"] = _ratio(
        samples, (_OURS, "remote"), (_MOONCAKE, "remote"), LONG_TOKENS
    )
    return numbers


def ttft_faults(samples: Sequence[Sample]) -> dict[str, str]:
    """What went wrong, by system: hits that were none, tokens that differ."""
    found: dict[str, str] = {}
    for sample in of_kind(samples, "ttft"):
        if not sample["tokens_equal"]:
            found[sample["system"]] = f"tokens differ at {sample['tokens']} tokens"
        elif sample["phase"] == "remote" and not _is_hit(sample):
            found[sample["system"]] = (
                f"a remote hit of {sample['tokens']} tokens loaded {sample['cached_tokens']}"
            )
    return found


def _is_hit(sample: Sample) -> bool:
    # One block may be computed anew: an engine needs the logits of the last token.
    return bool(sample["cached_tokens"] >= sample["tokens"] - 2 * 32)


def _by_repetition(
    samples: Sequence[Sample], system: str, phase: str, tokens: int
) -> Mapping[int, float]:
    return {
        sample["repetition"]: sample["ttft_s"]
        for sample in samples
        if (sample["system"], sample["phase"], sample["tokens"]) == (system, phase, tokens)
        and sample["tokens_equal"]
        and (phase == "cold" or _is_hit(sample))
    }


def _ratio(
    samples: Sequence[Sample], top: tuple[str, str], bottom: tuple[str, str], tokens: int
) -> float | None:
    above = _by_repetition(samples, *top, tokens)
    below = _by_repetition(samples, *bottom, tokens)
    ratios = [
        value / below[repetition] for repetition, value in above.items() if repetition in below
    ]
    return statistics.median(ratios) if ratios else None


def _difference_ms(samples: Sequence[Sample], tokens: int) -> float | None:
    remote = _by_repetition(samples, _OURS, "remote", tokens)
    local = _by_repetition(samples, _OURS, "local", tokens)
    differences = [
        value - local[repetition] for repetition, value in remote.items() if repetition in local
    ]
    return statistics.median(differences) * 1e3 if differences else None
