from __future__ import annotations

import pytest

from hymcache.bench.samples import Sample
from hymcache.bench.ttft_summary import median_ms, ttft_faults, ttft_numbers


def sample(system: str, phase: str, tokens: int, repetition: int, ttft_ms: float) -> Sample:
    return {
        "kind": "ttft",
        "system": system,
        "phase": phase,
        "tokens": tokens,
        "repetition": repetition,
        "ttft_s": ttft_ms / 1e3,
        "cached_tokens": 0 if phase == "cold" else tokens // 32 * 32,
        "tokens_equal": True,
    }


def run(system: str, tokens: int, times_ms: list[tuple[float, float, float]]) -> list[Sample]:
    return [
        sample(system, phase, tokens, repetition, ttft_ms)
        for repetition, times in enumerate(times_ms)
        for phase, ttft_ms in zip(("cold", "remote", "local"), times, strict=True)
    ]


def test_numbers_of_a_full_run() -> None:
    samples = [
        *run("hymcache", 2000, [(900.0, 30.0, 20.0), (800.0, 24.0, 20.0), (900.0, 26.0, 20.0)]),
        *run("hymcache", 8000, [(9e3, 100.0, 60.0), (9e3, 110.0, 60.0), (9e3, 120.0, 90.0)]),
        *run("mooncake", 8000, [(9e3, 400.0, 60.0), (9e3, 400.0, 60.0), (9e3, 400.0, 60.0)]),
    ]
    numbers = ttft_numbers(samples)
    assert numbers["hit_ttft_ratio"] == pytest.approx(1.3)
    assert numbers["remote_minus_local_8k_ms"] == pytest.approx(40.0)
    assert numbers["remote_of_mooncake_8k"] == pytest.approx(0.275)
    assert numbers["hymcache_cold_2000_ms"] == pytest.approx(900.0)


def test_a_peer_that_was_skipped_leaves_its_number_out() -> None:
    numbers = ttft_numbers(run("hymcache", 2000, [(900.0, 30.0, 20.0)]))
    assert numbers["remote_of_mooncake_8k"] is None
    assert numbers["remote_minus_local_8k_ms"] is None


def test_a_hit_that_loaded_too_little_does_not_count() -> None:
    samples = run("hymcache", 2000, [(900.0, 30.0, 20.0)])
    samples[1]["cached_tokens"] = 1000
    assert ttft_numbers(samples)["hit_ttft_ratio"] is None
    assert ttft_faults(samples) == {"hymcache": "a remote hit of 2000 tokens loaded 1000"}


def test_other_tokens_do_not_count_and_are_told() -> None:
    samples = run("mooncake", 8000, [(9e3, 400.0, 60.0)])
    samples[1]["tokens_equal"] = False
    assert median_ms(samples, "mooncake", "remote", 8000) is None
    assert ttft_faults(samples) == {"mooncake": "tokens differ at 8000 tokens"}


def test_one_block_computed_anew_is_still_a_hit() -> None:
    samples = run("mooncake", 8000, [(9e3, 400.0, 60.0)])
    samples[1]["cached_tokens"] = 8000 - 32
    assert ttft_faults(samples) == {}
