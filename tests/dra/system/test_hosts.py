"""Hosts whose agents are away, and devices that somebody holds."""

from __future__ import annotations

import time

import pytest

from hymcache.dra import cluster
from tests.dra.kubernetes.cluster_api import wait_until
from tests.dra.system.world import BLADE_MIB, World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_a_pod_is_not_bound_to_a_host_whose_agent_is_down(paper_world: World) -> None:
    world = paper_world
    world.start_controller("--attach-deadline", "2s", "--quarantine", "5s")
    world.wait_published()
    with world.simulator.agent_cut_off(world.nodes[0]):
        # The scheduler takes the first node that will do: the one that will not.
        world.api.add_claim("kv", 1024)
        world.api.add_pod("engine", "kv")
        assert world.wait_bound("engine", timeout_s=60) == world.nodes[1]
        world.assert_never_sold_twice()
        assert world.allocated_mib() <= 2 * 1024
    world.remove_claim_and_pod(timeout_s=120)


def test_a_pod_that_must_be_on_such_a_host_waits_for_it(world: World) -> None:
    world.start_controller("--attach-deadline", "2s", "--quarantine", "2s")
    world.wait_published()
    with world.simulator.agent_cut_off(world.nodes[1]):
        world.api.add_claim("kv", 1024)
        world.api.add_pod("engine", "kv", node=world.nodes[1])
        time.sleep(10)
        assert world.api.node_of("engine") is None
        # However often it is tried, what cannot be taken away again is there once.
        assert world.allocated_mib() <= 1024
    assert world.wait_bound("engine", timeout_s=90) == world.nodes[1]
    world.remove_claim_and_pod(timeout_s=120)


def test_memory_of_a_host_whose_agent_is_down_is_not_sold(paper_world: World) -> None:
    world = paper_world
    world.start_controller()
    world.wait_published()
    world.add_claim_and_pod(BLADE_MIB)
    world.wait_bound("engine")
    wait_until(lambda: world.mapped_hosts("kv") == list(world.nodes), "both hosts mapped")
    with world.simulator.agent_cut_off(world.nodes[1]):
        world.api.delete(cluster.POD, "engine")
        world.api.delete(cluster.RESOURCE_CLAIM, "kv")
        wait_until(lambda: world.states() == ["freeing"], "the region being freed")
        world.api.add_claim("next", 1024)
        world.api.add_pod("next-engine", "next")
        time.sleep(3)
        assert not world.api.is_attached("next")
        assert world.allocated_mib() == BLADE_MIB
    world.wait_gone("kv", timeout_s=90)
    world.wait_bound("next-engine", timeout_s=60)
    world.remove_claim_and_pod("next", "next-engine")


def events(world: World) -> set[str]:
    return {event["reason"] for event in world.api.items(cluster.EVENT)}


def test_capacity_that_the_scheduler_has_back_is_sold_when_it_is_detached(world: World) -> None:
    controller = world.start_controller()
    world.wait_published()
    world.add_claim_and_pod(BLADE_MIB)
    node = world.wait_bound("engine")
    allocation_id = world.wait_attached("kv")["data"]["allocationId"]
    with world.simulator.device(node, allocation_id).open("rb"):
        # The pod has ended and its claim is given up, but somebody still has the device open.
        world.api.delete(cluster.POD, "engine")
        world.api.delete(cluster.RESOURCE_CLAIM, "kv")
        world.api.add_claim("next", BLADE_MIB)
        world.api.add_pod("next-engine", "next")
        wait_until(lambda: world.states() == ["freeing"], "the region being freed")
        wait_until(lambda: world.published_mib() is None, "nothing on offer")
        time.sleep(2)
        assert not world.api.is_attached("next")
        assert world.api.find(cluster.RESOURCE_CLAIM, "kv") is not None
        assert controller.metric("blade_leaking_mib", appliance="appliance-0", blade="blade-0")
        # The agent waits a little for those who hold it.
        wait_until(
            lambda: controller.metric("free_failures_total", reason="held") >= 1, "it is held"
        )
        wait_until(lambda: "FreeFailed" in events(world), "an event that says so")
        assert world.allocated_mib() == BLADE_MIB
    world.wait_gone("kv", timeout_s=90)
    world.wait_bound("next-engine", timeout_s=60)
    world.assert_never_sold_twice()
    world.remove_claim_and_pod("next", "next-engine")
