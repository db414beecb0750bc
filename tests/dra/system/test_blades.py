"""Blades that lose their power, regions that are nobody's, and a ledger that is lost."""

from __future__ import annotations

import time
from typing import Any

import pytest

from hymcache.dra import cluster, names
from tests.dra.kubernetes.cluster_api import wait_until
from tests.dra.simulator_process import APPLIANCE
from tests.dra.system.world import BLADE, BLADE_MIB, World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

# The shortest period that there is.
LOOK = ("--fabric-period", "10s")
MEMORY = f"/cfm/v1/appliances/{APPLIANCE}/blades/{BLADE}/memory"


def compose(world: World, owner: str | None, size_mib: int = 512) -> None:
    """A region that no controller has asked for."""
    body: dict[str, Any] = {"memorySizeMiB": size_mib, "QoS": 1}
    if owner is not None:
        body |= {"shareCount": 1, "candidateHosts": [world.nodes[0]], "claimUid": owner}
    answer = world.simulator.http.post(MEMORY, json=body)
    assert answer.status_code == 201, answer.text


def cluster_name(world: World) -> str:
    namespace = world.api.call(world.api.client.get(cluster.NAMESPACE, "kube-system"))
    name: str = namespace["metadata"]["uid"]
    return name


def test_after_a_power_cycle_pods_are_evicted_and_new_ones_get_new_memory(world: World) -> None:
    controller = world.start_controller(*LOOK)
    world.wait_published()
    world.add_claim_and_pod(1024)
    node = world.wait_bound("engine")
    old = world.wait_attached("kv")["data"]["allocationId"]
    world.simulator.power_cycle(BLADE)
    # Its memory is gone: the blade is tainted, so that the pods on it end.
    wait_until(lambda: world.api.find(cluster.POD, "engine") is None, "the pod evicted")
    wait_until(lambda: not world.ledger(), "the lost region cleaned up")
    assert not world.simulator.cdi_spec(node, old).exists()
    assert controller.metric("resyncs_total") >= 1
    assert controller.metric("lost_regions_total") == 1
    world.wait_published()
    world.api.add_pod("engine", "kv")
    node = world.wait_bound("engine")
    new = world.wait_attached("kv")["data"]["allocationId"]
    assert new != old
    assert world.simulator.cdi_spec(node, new).exists()
    world.remove_claim_and_pod()


def test_a_region_of_a_claim_that_is_gone_is_collected(paper_world: World) -> None:
    world = paper_world
    compose(world, f"c0ffee00-0000-4000-8000-000000000001/share-1@{cluster_name(world)}")
    controller = world.start_controller(*LOOK, "--orphan-grace", "1s")
    world.wait_clean()
    assert controller.metric("orphans_total") == 1


def test_regions_of_others_are_left_alone_and_not_sold(paper_world: World) -> None:
    world = paper_world
    compose(world, "c0ffee00-0000-4000-8000-000000000002/share-1@another-cluster")
    compose(world, "c0ffee00-0000-4000-8000-000000000003", size_mib=256)
    controller = world.start_controller(*LOOK, "--orphan-grace", "1s")
    world.wait_published(BLADE_MIB - 768)
    time.sleep(12)
    assert len(world.regions()) == 2
    assert controller.metric("orphans_total") == 0
    for name in world.regions():
        assert world.simulator.http.delete(f"{MEMORY}/{name}").is_success
    world.wait_published(BLADE_MIB)


def test_on_exclusive_blades_regions_without_an_owner_are_collected(public_world: World) -> None:
    world = public_world
    compose(world, None)
    world.start_controller(*LOOK, "--orphan-grace", "1s", "--exclusive")
    world.wait_clean()


def test_a_ledger_that_is_lost_is_restored_from_the_claims(world: World) -> None:
    first = world.start_controller()
    world.wait_published()
    world.add_claim_and_pod(1024)
    world.wait_bound("engine")
    before = world.wait_attached("kv")["data"]
    first.stop()
    world.lose_ledger()
    world.start_controller()
    wait_until(lambda: world.states() == ["published"], "the record restored")
    assert world.wait_attached("kv")["data"]["allocationId"] == before["allocationId"]
    assert len(world.regions()) == 1
    world.remove_claim_and_pod()


def test_a_blade_without_links_is_not_offered(paper_world: World) -> None:
    world = paper_world
    world.start_controller(*LOOK)
    world.wait_published()
    with world.simulator.link_down(BLADE, "port-0"):
        wait_until(lambda: slice_hosts(world) == [world.nodes[1]], "the other host alone")
    wait_until(lambda: slice_hosts(world) == list(world.nodes), "both hosts again")


def slice_hosts(world: World) -> list[str]:
    slices = world.slices()
    terms = slices[0]["spec"]["nodeSelector"]["nodeSelectorTerms"] if slices else ()
    return [host for term in terms for host in term["matchExpressions"][0]["values"]]


def test_a_slice_that_somebody_deletes_or_edits_is_mended(paper_world: World) -> None:
    world = paper_world
    world.start_controller()
    world.wait_published()
    name = world.slices()[0]["metadata"]["name"]
    world.api.delete(cluster.RESOURCE_SLICE, name)
    world.wait_published()
    world.api.patch(cluster.RESOURCE_SLICE, name, {"spec": {"devices": []}})
    world.wait_published()
    device = world.slice_device()
    assert device is not None
    assert device["attributes"] == {
        names.ATTRIBUTE_APPLIANCE: {"string": APPLIANCE},
        names.ATTRIBUTE_BLADE: {"string": BLADE},
    }
