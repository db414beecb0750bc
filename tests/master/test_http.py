"""/metrics, /healthz and the page of a master."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from hymcache.master import MasterService
from hymcache.master.metrics import METRICS
from hymcache.metrics_reference import metrics_markdown
from tests.master.conftest import StartMaster
from tests.master.raw_peer import RawClient, RawNode, make_key

ROOT = Path(__file__).parents[2]


@pytest.fixture
def master(start_master: StartMaster) -> MasterService:
    return start_master("master.http=127.0.0.1:0")


def fetch(master: MasterService, path: str, accept: str = "*/*") -> tuple[str, dict[str, str]]:
    url = f"http://{master.endpoints['master.http']}{path}"
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as response:
        return response.read().decode(), {k.lower(): v for k, v in response.headers.items()}


def scrape(master: MasterService) -> dict[str, Metric]:
    text, _ = fetch(master, "/metrics")
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_every_metric_is_there_and_well_named(master: MasterService) -> None:
    families = scrape(master)
    for row in METRICS:
        assert re.fullmatch(r"hymcache_master_[a-z_]+", row.name)
        assert row.documentation.endswith(".")
        family = families[row.name]
        assert family.type == row.kind
        assert family.documentation == row.documentation
    assert "process_resident_memory_bytes" in families


def test_metrics_count_what_happens(master: MasterService) -> None:
    listen = master.endpoints["master.listen"]
    with RawNode(listen, "a", 1) as node, RawClient(listen) as client:
        node.register()
        node.publish([make_key(1), make_key(2)])
        node.heartbeat(used_bytes=4096)
        client.lookup([make_key(1), make_key(3)])
        families = scrape(master)

    def value(name: str, **labels: str) -> float:
        (sample,) = (s for s in families[name].samples if s.labels == labels)
        return sample.value

    assert value("hymcache_master_lookups") == 1
    assert value("hymcache_master_lookup_keys") == 2
    assert value("hymcache_master_lookup_hits") == 1
    assert value("hymcache_master_rows_published") == 2
    assert value("hymcache_master_rows") == 2
    assert value("hymcache_master_connections") == 2
    assert value("hymcache_master_cpu_seconds") > 0
    assert value("hymcache_master_nodes", state="alive") == 1
    assert value("hymcache_master_nodes", state="lost") == 0
    assert value("hymcache_master_namespace_rows", namespace=f"{7:016x}") == 2
    assert value("hymcache_master_node_objects_listed", node="a") == 2
    assert value("hymcache_master_node_used_bytes", node="a") == 4096
    assert 0 < value("hymcache_master_node_lease_seconds", node="a") <= 3


def test_metrics_come_as_openmetrics_where_that_is_wanted(master: MasterService) -> None:
    text, headers = fetch(master, "/metrics", accept="application/openmetrics-text")
    assert headers["content-type"].startswith("application/openmetrics-text")
    parse: Any = openmetrics.text_string_to_metric_families  # has no types
    assert {row.name for row in METRICS} <= {family.name for family in parse(text)}


def test_the_reference_in_docs_is_current() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == metrics_markdown(), "run: make docs"


def test_health(master: MasterService) -> None:
    assert fetch(master, "/healthz")[0] == "ok\n"


def test_health_fails_with_the_master(master: MasterService) -> None:
    master._master.stop()
    with pytest.raises(urllib.error.HTTPError) as failed:
        fetch(master, "/healthz")
    assert failed.value.code == 503
    assert failed.value.read().decode() == "the master is not running\n"
    failed.value.close()


def test_the_page_shows_the_nodes_and_runs_nothing_of_theirs(master: MasterService) -> None:
    page, headers = fetch(master, "/")
    assert "No node has registered" in page
    with RawNode(master.endpoints["master.listen"], "<script>alert(1)</script>", 1) as node:
        node.register()
        node.publish([make_key(1)])
        page, headers = fetch(master, "/")
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert ">alive</span>" in page
    assert "default-src 'none'" in headers["content-security-policy"]


def test_other_paths_are_not_found(master: MasterService) -> None:
    for path in ("/docs", "/openapi.json", "/metrics/x"):
        with pytest.raises(urllib.error.HTTPError) as failed:
            fetch(master, path)
        assert failed.value.code == 404
        failed.value.close()
