"""The numbers, tables and figures of a run, from requests that are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hymcache.bench.region_reuse.command import write_results
from hymcache.bench.region_reuse.request_log import KIND, Arm, Cell, Request, Tier, requests_of
from hymcache.bench.region_reuse.stats import stats_of
from hymcache.bench.samples import Sample, SampleLog, read_samples
from hymcache.errors import ConfigError

PREFIXES = (1000, 2000, 4000)
# ms + us a token: what the region's cross arm follows exactly.
INTERCEPT_MS, SLOPE_US = 20.0, 5.0


def ttft_s(tier: Tier, arm: Arm, prefix: int, session: int) -> float:
    computed = prefix * 1e-3
    if tier is Tier.T0 or (tier is Tier.T1 and arm is Arm.CROSS):
        return computed
    line = (INTERCEPT_MS + SLOPE_US * (prefix + 24) / 1e3) / 1e3
    return (line * 0.5 if tier is Tier.T1 else line) * (1.0 + 0.01 * (session - 1))


def request(cell: Cell, order: int) -> Request:
    _, tier, arm, prefix, session = cell
    hits = tier is not Tier.T0 and order == 2 and not (tier is Tier.T1 and arm is Arm.CROSS)
    return Request(
        *cell,
        order=order,
        engine="b" if arm is Arm.CROSS and order == 2 else "a",
        prompt_tokens=prefix + 24,
        ttft_s=ttft_s(tier, arm, prefix, session) if order == 2 else prefix * 1e-3,
        cached_tokens=prefix if hits else 0,
        external_queries=prefix,
        external_hits=prefix if hits else 0,
        tokens=(order, session),
    )


def write_run(path: Path, **changes: Any) -> list[Sample]:
    log = SampleLog(path, {"cpu": "made up"})
    log.add("setup", model="mid", kv_bytes_per_token=16384, block_tokens=32, options={})
    log.add("skipped_tier", tier="T2", reason="no GPU")
    for rep in range(2):
        for tier in (Tier.T0, Tier.T1, Tier.T4):
            for prefix in PREFIXES:
                for session in range(3):
                    for arm in Arm:
                        for order in (1, 2):
                            made = request(Cell(rep, tier, arm, prefix, session), order)
                            log.add(KIND, **{**made.fields(), **changes.get("requests", {})})
        log.add("region_start", formatted=1, attached=changes.get("attached", 1))
        log.add(
            "never_stored",
            keys=changes.get("keys", 8192),
            hits=changes.get("hits", 0),
            stored_keys=100,
            stored_found=changes.get("found", 100),
        )
        log.add("copy_path", path="plain copy", bytes=10**9, seconds=0.1)
    return read_samples(path)


def stats(path: Path, **changes: Any) -> dict[str, Any]:
    samples = write_run(path, **changes)
    return stats_of(samples, requests_of(samples))


def test_a_line_is_found_again(tmp_path: Path) -> None:
    fit = stats(tmp_path / "r.jsonl")["fit"]
    assert fit["intercept_ms"] == pytest.approx(INTERCEPT_MS)
    assert fit["slope_us_per_token"] == pytest.approx(SLOPE_US)
    assert fit["residual_max_ms"] == pytest.approx(0.0, abs=1e-9)
    assert fit["residual_rms_of_requests_ms"] > 0


def test_ratios_between_arms_and_tiers(tmp_path: Path) -> None:
    found = stats(tmp_path / "r.jsonl")
    row = found["cross_reuse"][0]
    assert row["t4_speedup"] == pytest.approx(1000 / (20 + 5 * 1.024))
    assert row["t4_hit"] == pytest.approx(1000 / 1024)
    assert row["cross_over_same"]["T4"] == pytest.approx(1.0)
    assert found["sharing_gap"][0]["cross_over_same"]["T1"] == pytest.approx(
        1000 / ((20 + 5 * 1.024) / 2)
    )
    assert found["local_premium"][2]["t4_over_t1"] == pytest.approx(2.0)
    assert found["skipped"] == {"T2": "no GPU"}
    assert "T2" not in found["tiers"]
    rate = found["read_rate"][0]
    assert rate["effective_gb_s"] == pytest.approx(16.384e6 / (25.12e-3) / 1e9)
    assert rate["of_ceiling"] == pytest.approx(rate["effective_gb_s"] / 10)


def test_percentiles_and_spread(tmp_path: Path) -> None:
    found = stats(tmp_path / "r.jsonl")
    (cell,) = (
        c for c in found["cells"] if (c["tier"], c["arm"], c["prefix"]) == ("T4", "cross", 1000)
    )
    assert cell["n"] == 6
    assert cell["p99_over_p50"] == pytest.approx(1.01, abs=1e-3)
    assert all(row["spread"] == pytest.approx(0.0) for row in found["repetitions"])


def test_all_controls_pass_where_they_should(tmp_path: Path) -> None:
    controls = stats(tmp_path / "r.jsonl")["controls"]
    assert {name for name, control in controls.items() if control["passed"]} == set(controls)
    assert controls["no_false_hit"]["keys"] == 16384


@pytest.mark.parametrize(
    ("control", "changes"),
    [
        ("no_leakage", {"requests": {"cached_tokens": 500}}),
        ("no_false_hit", {"hits": 1}),
        ("no_false_hit", {"keys": 6000}),
        ("no_false_hit", {"found": 99}),
        ("fresh_region", {"attached": 2}),
    ],
)
def test_a_control_that_fails_says_so(
    tmp_path: Path, control: str, changes: dict[str, Any]
) -> None:
    controls = stats(tmp_path / "r.jsonl", **changes)["controls"]
    assert not controls[control]["passed"]


def test_another_answer_is_told(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    samples = write_run(path)
    for sample in samples:
        if sample["kind"] == KIND and sample["tier"] == "T4":
            sample["tokens"] = [9, 9]
    equal = stats_of(samples, requests_of(samples))["controls"]["equal_answers"]
    assert not equal["passed"]
    assert equal["compared"] == 2 * equal["equal"]


def test_tables_and_figures_come_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    write_run(path)
    write_results(path, tmp_path)
    tables = (tmp_path / "tables.md").read_text()
    assert "TTFT = 20.0 ms + 5.00 us/token" in tables
    for number in range(3, 9):
        assert f"Table {number}" in tables
    assert "| no false hit | 0 hits of 16384 keys that were never stored | yes |" in tables
    for number in range(6, 11):
        (figure,) = tmp_path.glob(f"figure{number}_*.png")
        assert figure.stat().st_size > 1000
    assert json.loads((tmp_path / "stats.json").read_text())["prefixes"] == list(PREFIXES)


def test_a_summary_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run without --summarise first"):
        write_results(tmp_path / "requests.jsonl", tmp_path)
