"""Kubernetes 1.34, where the API server knows neither capacity of claims nor conditions.

The way of arXiv 2609.10790: annotations say how much, the kubelet plugin waits for the status.
"""

from __future__ import annotations

import pytest

from hymcache.dra import cluster, names
from tests.dra.kubernetes.cluster_api import wait_until
from tests.dra.system.world import BLADE_MIB, World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def annotated(size_mib: int, shares: int, qos: int) -> dict[str, str]:
    return {
        names.ANNOTATION_CAPACITY_MIB: str(size_mib),
        names.ANNOTATION_SHARE_COUNT: str(shares),
        names.ANNOTATION_QOS: str(qos),
    }


def wait_offered(world: World) -> None:
    world.wait_led()
    wait_until(lambda: len(devices(world)) == 16, "a slice of sixteen devices")


def devices(world: World) -> list[object]:
    slices = world.slices()
    return list(slices[0]["spec"].get("devices") or ()) if slices else []


def test_the_papers_annotations_size_and_share_a_region(old_world: World) -> None:
    world = old_world
    world.start_controller()
    wait_offered(world)
    device = world.slice_device()
    assert device is not None
    assert "allowMultipleAllocations" not in device
    assert "bindingConditions" not in device
    world.api.add_claim("kv", annotations=annotated(1024, 2, 4))
    world.api.add_pod("engine", "kv")
    # Bound at once: nothing waits for the region but the kubelet plugin.
    world.wait_bound("engine")
    status = world.wait_attached("kv")
    assert "shareID" not in status
    assert status["data"][names.DATA_MAPPED_HOSTS] == list(world.nodes)
    assert status["data"]["sizeMiB"] == 1024
    claim = world.api.claim("kv")["metadata"]
    assert names.FINALIZER in claim["finalizers"]
    assert claim["annotations"][names.ANNOTATION_OWNER] == f"{names.DRIVER_NAME}/controller"
    assert world.allocated_mib() == 1024
    wait_until(lambda: world.published_mib() == BLADE_MIB - 1024, "the slice shows what is left")
    world.remove_claim_and_pod()


def test_a_share_of_one_goes_to_the_pods_node(old_world: World) -> None:
    world = old_world
    world.start_controller()
    wait_offered(world)
    world.api.add_claim("kv", annotations=annotated(512, 1, 1))
    world.api.add_pod("engine", "kv", node=world.nodes[1])
    status = world.wait_attached("kv")
    assert status["data"][names.DATA_MAPPED_HOSTS] == [world.nodes[1]]
    world.remove_claim_and_pod()


def test_two_claims_have_regions_of_their_own_on_one_blade(old_world: World) -> None:
    world = old_world
    world.start_controller()
    wait_offered(world)
    for name in ("one", "two"):
        world.api.add_claim(f"kv-{name}", annotations=annotated(1024, 2, 1))
        world.api.add_pod(f"engine-{name}", f"kv-{name}")
    first, second = (world.wait_attached(f"kv-{name}")["data"] for name in ("one", "two"))
    assert first["memoryId"] != second["memoryId"]
    assert first["allocationId"] != second["allocationId"]
    world.assert_never_sold_twice()
    for name in ("one", "two"):
        world.api.delete(cluster.POD, f"engine-{name}")
        world.api.delete(cluster.RESOURCE_CLAIM, f"kv-{name}")
    world.wait_clean()


def test_a_claim_that_another_driver_owns_is_left_alone(old_world: World) -> None:
    world = old_world
    world.start_controller()
    wait_offered(world)
    owned = {**annotated(512, 1, 1), names.ANNOTATION_OWNER: "the-papers-plugin/node-1"}
    world.api.add_claim("theirs", annotations=owned)
    world.api.add_pod("their-engine", "theirs")
    world.api.add_claim("ours", annotations=annotated(512, 1, 1))
    world.api.add_pod("our-engine", "ours")
    world.wait_attached("ours")
    assert world.api.device_status("theirs") is None
    assert names.FINALIZER not in (world.api.claim("theirs")["metadata"].get("finalizers") or ())
    assert world.allocated_mib() == 512
    for name in ("our", "their"):
        world.api.delete(cluster.POD, f"{name}-engine")
        world.api.delete(cluster.RESOURCE_CLAIM, f"{name}s")
    world.wait_clean()
