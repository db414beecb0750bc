from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from hymcache.bench.report import verdict_table, write_summary
from hymcache.bench.targets import METADATA_OBJECTS, TARGETS, Verdict, verdict

NAMES_OF_THE_SPECIFICATION = (
    "shm_get_16m",
    "shm_put_16m",
    "shm_get_1m",
    "tcp_get_16m",
    "tcp_put_16m",
    "lookup32_server_us",
    "lookup32_p50_ratio",
    "metadata_bytes_per_object",
    "hit_ttft_ratio",
)


@pytest.mark.parametrize("name", NAMES_OF_THE_SPECIFICATION)
def test_every_promised_number_has_a_target(name: str) -> None:
    limit = TARGETS[name].limit
    assert verdict(name, limit) is Verdict.MET
    assert verdict(name, limit * 1.01) is Verdict.MISSED
    assert verdict(name, None) is Verdict.SKIPPED


def test_metadata_target_is_64_mib_for_10_tb() -> None:
    assert TARGETS["metadata_bytes_per_object"].limit * METADATA_OBJECTS == 64 << 20


def test_a_number_without_a_target_has_no_verdict() -> None:
    assert verdict("echo_p50_us", 5.0) is None


def test_summary_has_the_numbers_at_its_top(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, {"shm_get_16m": 0.5, "hit_ttft_ratio": None}, {"hit_ttft_ratio": "no vLLM"})
    summary = json.loads(path.read_text())
    assert summary["shm_get_16m"] == 0.5
    assert summary["hit_ttft_ratio"] is None
    assert summary["verdicts"] == {"shm_get_16m": "met", "hit_ttft_ratio": "skipped"}
    assert summary["notes"] == {"hit_ttft_ratio": "no vLLM"}
    assert summary["context"]["kernel"]


def test_line_rates_are_percentages_that_say_where_they_are_from() -> None:
    text = io.StringIO()
    Console(file=text, width=160).print(
        verdict_table("micro", {"verbs_get_16m_of_line_rate": 0.4321}, {})
    )
    assert "43.2 %" in text.getvalue()
    assert "of the port's speed; both ends are on this host" in text.getvalue()


def test_the_table_says_why_a_number_is_missing() -> None:
    text = io.StringIO()
    table = verdict_table("micro", {"hit_ttft_ratio": None}, {"hit_ttft_ratio": "no vLLM"})
    Console(file=text, width=120).print(table)
    assert "no vLLM" in text.getvalue()
    assert "skipped" in text.getvalue()
