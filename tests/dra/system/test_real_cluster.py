"""What `make test-kubernetes` does on a cluster of one's own, on one that is served here.

It is there before the tests, with nodes, pods and slices of its own, and is used again after them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hymcache.dra import cluster, names
from tests.dra.kubernetes.cluster_api import ClusterApi
from tests.dra.kubernetes.cluster_process import ClusterProcess
from tests.dra.system.world import (
    CLUSTER_VARIABLE,
    LEDGER_NAMESPACE,
    NAMESPACE,
    real_cluster,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(real_cluster() is not None, reason="they run against a real one now"),
]

TESTS = Path(__file__).parent
NODES = ("a-control-plane", "worker-a", "worker-b")
OTHER_DRIVER = "gpu.example.com"
# A world of one blade after one of two, and what looks at nodes, pods and objects of others.
SELECTION = (
    "test_fabric_faults.py::test_a_blade_that_refuses_is_left_for_another",
    "test_blades.py::test_a_ledger_that_is_lost_is_restored_from_the_claims[paper]",
    "test_control_plane.py::test_fifty_claims_race_for_the_room_of_sixteen[paper]",
    "test_pods.py::test_a_pod_finds_its_memory_in_its_environment[public]",
)


@contextmanager
def lived_in_cluster(folder: Path) -> Iterator[ClusterProcess]:
    """A cluster with pods, nodes and a DRA driver that are none of this driver's business."""
    with (
        ClusterProcess(folder, "--minor", "36", "--retry-s", "0.5") as process,
        ClusterApi(process.kubeconfig, "kube-system") as api,
    ):
        for node in NODES:
            api.add_node(node)
            containers = [{"name": "c", "image": "example/proxy"}]
            pod = {"nodeName": node, "containers": containers}
            api.create(cluster.POD, {"metadata": {"name": f"proxy-{node}"}, "spec": pod})
            offer = {
                "driver": OTHER_DRIVER,
                "nodeName": node,
                "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
                "devices": [{"name": "gpu-0"}],
            }
            body = {"metadata": {"name": f"a-gpu-{node}"}, "spec": offer}
            api.create(cluster.RESOURCE_SLICE, body)
        yield process


def test_the_tests_for_real_clusters_pass_and_leave_nothing(tmp_path: Path) -> None:
    with lived_in_cluster(tmp_path) as process:
        chosen = [str(TESTS / test) for test in SELECTION]
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "--strict-markers", "-p", "no:cacheprovider", *chosen],
            check=False,
            cwd=TESTS.parents[2],
            env=os.environ | {CLUSTER_VARIABLE: str(process.kubeconfig)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        # One that is skipped has not run.
        assert "skipped" not in ran.stdout, ran.stdout
        with ClusterApi(process.kubeconfig) as api:
            slices = api.items(cluster.RESOURCE_SLICE)
            assert {item["spec"]["driver"] for item in slices} == {OTHER_DRIVER}
            assert len(api.items(cluster.POD)) == len(NODES)
            assert api.find(cluster.DEVICE_CLASS, names.DEVICE_CLASS) is None
            for kind in (cluster.RESOURCE_CLAIM, cluster.LEASE):
                assert not api.items(kind)
            for namespace in (NAMESPACE, LEDGER_NAMESPACE):
                (left,) = api.items(cluster.CONFIG_MAP, namespace)
                assert left["metadata"]["name"] == "kube-root-ca.crt"
