"""A claim's life, from its capacity in the scheduler's books to free memory on the blade."""

from __future__ import annotations

import pytest

from hymcache.dra import cluster, names
from tests.dra.kubernetes.cluster_api import wait_until
from tests.dra.system.world import World

pytestmark = pytest.mark.slow


def test_a_claim_is_composed_attached_bound_and_freed(world: World) -> None:
    world.start_controller()
    world.wait_published()
    world.api.add_claim("kv", 1024)
    world.api.add_pod("engine", "kv")
    status = world.wait_attached("kv")
    node = world.wait_bound("engine")
    data = status["data"]
    assert node in data["mappedHosts"]
    assert data["sizeMiB"] == 1024
    assert data["cdiDevices"] == [f"cxl.seagate.com/dax={data['allocationId']}"]
    assert world.allocated_mib() == 1024
    assert world.simulator.cdi_spec(node, data["allocationId"]).exists()
    claim = world.api.claim("kv")
    assert names.FINALIZER in claim["metadata"]["finalizers"]
    world.api.delete(cluster.POD, "engine")
    world.api.delete(cluster.RESOURCE_CLAIM, "kv")
    world.wait_gone("kv")
    world.wait_clean()
    assert world.allocated_mib() == 0


def test_pods_on_two_nodes_share_the_same_bytes(world: World) -> None:
    world.start_controller()
    world.wait_published()
    world.api.add_claim("kv", 512)
    for node in world.nodes:
        world.api.add_pod(f"engine-{node}", "kv", node=node)
        assert world.wait_bound(f"engine-{node}") == node
    wait_until(lambda: world.mapped_hosts("kv") == list(world.nodes), "both hosts mapped")
    allocation = world.wait_attached("kv")["data"]["allocationId"]
    first, second = (world.simulator.device(node, allocation) for node in world.nodes)
    with first.open("r+b") as file:
        file.write(b"written on node-1")
    with second.open("rb") as file:
        assert file.read(17) == b"written on node-1"
    assert len(world.regions()) == 1
    for node in world.nodes:
        world.api.delete(cluster.POD, f"engine-{node}")
    world.api.delete(cluster.RESOURCE_CLAIM, "kv")
    world.wait_gone("kv")
    world.wait_clean()
