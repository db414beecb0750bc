from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from hymcache.connector.shared_region.metrics import METRICS, metric_definitions
from hymcache.connector.shared_region.settings import RegionSettings

pytestmark = pytest.mark.vllm

DOCS = Path(__file__).parents[2] / "docs" / "shared-region.md"


def test_the_docs_have_every_metric() -> None:
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `vllm:")]
    gauges = {"region_slots"}
    assert rows == [
        "| `{}` | {} | {} |".format(
            f"vllm:hymcache_{m.name}" if m.name in gauges else m.exported_name,
            ", ".join(f"`{label}`" for label in m.labels),
            m.documentation,
        )
        for m in METRICS
    ]
    assert len(metric_definitions()) == len(METRICS)


def test_the_docs_have_every_setting() -> None:
    section = DOCS.read_text().partition("## Settings")[2].partition("## ")[0]
    keys = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    assert keys == list(RegionSettings.model_fields)
