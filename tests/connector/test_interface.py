"""What vLLM sees of the connector before any request."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from hymcache.connector.metadata import ALL_BLOCKS, SaveReport, StepReport
from hymcache.connector.metrics import METRICS, StorePromMetrics, StoreStats
from hymcache.connector.plugin import CONNECTOR_NAME, register
from hymcache.connector.shard_namespaces import Rank, Shards, WorkerLayout
from hymcache.connector.vllm import HyMCacheConnector
from hymcache.connector.vllm_version import TESTED_VERSIONS, check_version
from hymcache.errors import ConfigError

pytestmark = pytest.mark.vllm

DOCS = Path(__file__).parents[2] / "docs" / "vllm.md"


def test_the_plugin_registers_once_however_often_it_is_called() -> None:
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name(CONNECTOR_NAME) is HyMCacheConnector


@pytest.mark.parametrize("version", [*TESTED_VERSIONS, "0.32.0+cpu"])
def test_a_tested_version_passes_without_a_word(version: str) -> None:
    assert check_version(version) is None


def test_a_newer_version_is_warned_of() -> None:
    assert check_version("0.33.1") is not None
    assert check_version("1.0.0") is not None


@pytest.mark.parametrize("version", ["0.31.9", "0.9.2", "dev"])
def test_an_older_version_is_refused_in_one_line(version: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_version(version)
    assert "needs vLLM 0.32 or newer" in str(caught.value)
    assert version in str(caught.value)
    assert "\n" not in str(caught.value)


def test_reports_of_ranks_are_joined() -> None:
    layout = (WorkerLayout("id", 8),)
    one = StepReport({Rank(0, 0): layout}, "", {1: SaveReport(1, 3)}, {"a": ALL_BLOCKS, "b": 2})
    two = StepReport(
        {Rank(0, 1): layout}, "no", {1: SaveReport(1, 2), 2: SaveReport(1, 1)}, {"a": 5}
    )
    joined = one.aggregate(two)
    assert joined == StepReport(
        {Rank(0, 0): layout, Rank(0, 1): layout},
        "no",
        {1: SaveReport(2, 2), 2: SaveReport(1, 1)},
        {"a": 5, "b": 2},
    )
    assert joined
    assert not StepReport()
    with pytest.raises(TypeError):
        one.aggregate(SimpleNamespace())


def test_ranks_with_equal_kv_are_one_shard() -> None:
    shards = Shards(pp_size=2, tp_size=4, tp_replicas=2)
    assert shards.count == 4
    assert [shards.shard_of(Rank(pp, tp)) for pp in range(2) for tp in range(4)] == [
        *(0, 0, 1, 1),
        *(2, 2, 3, 3),
    ]
    assert [shards.saves(Rank(0, tp)) for tp in range(4)] == [True, False, True, False]


def test_stats_add_up_and_travel_as_plain_data() -> None:
    stats, other = StoreStats(), StoreStats()
    assert stats.is_empty()
    assert stats.take() is None
    stats.add("blocks_saved", 3)
    stats.add("bytes", 10, "save", "shm")
    stats.observe("save_seconds", 0.5)
    other.add("blocks_saved", 4)
    other.observe("save_seconds", 1.5)
    taken = stats.take()
    assert taken is not None
    assert stats.is_empty()
    joined = HyMCacheConnector.build_kv_connector_stats(taken.to_dict()).aggregate(other)
    assert joined.reduce() == {"blocks_saved": 7, "bytes save shm": 10, "mean save_seconds": 1.0}


def test_every_metric_reaches_prometheus_under_its_name() -> None:
    registry = CollectorRegistry()

    def bound(kind: type) -> Any:
        return lambda **options: kind(registry=registry, **options)

    metrics = StorePromMetrics(
        SimpleNamespace(kv_transfer_config=None),
        {Counter: bound(Counter), Gauge: bound(Gauge), Histogram: bound(Histogram)},
        ["model_name", "engine"],
        {0: ["m", "0"]},
    )
    stats = StoreStats()
    for metric in METRICS.values():
        if metric.buckets:
            stats.observe(metric.name, 0.2)
        else:
            stats.add(metric.name, 2, *(f"some_{label}" for label in metric.labels))
    metrics.observe(stats.to_dict(), 0)
    for metric in METRICS.values():
        labels = {"model_name": "m", "engine": "0"} | {x: f"some_{x}" for x in metric.labels}
        name = metric.exported_name
        if metric.buckets:
            assert registry.get_sample_value(f"{name}_count", labels) == 1
        else:
            assert registry.get_sample_value(name, labels) == 2


def test_the_documentation_has_each_metric() -> None:
    rows = re.findall(r"^\| `(vllm:hymcache_\w+)` \| (.*?) \| (.*?) \|$", DOCS.read_text(), re.M)
    assert rows == [
        (metric.exported_name, ", ".join(f"`{x}`" for x in metric.labels), metric.documentation)
        for metric in METRICS.values()
    ]


def test_the_documentation_names_the_tested_versions() -> None:
    assert f"Tested with vLLM {', '.join(TESTED_VERSIONS)}." in DOCS.read_text()
