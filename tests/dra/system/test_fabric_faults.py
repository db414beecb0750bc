"""A fabric manager that is away, slow, or says no."""

from __future__ import annotations

import os
import signal
import time

import pytest

from hymcache.dra import cluster, names
from tests.dra.kubernetes.cluster_api import wait_until
from tests.dra.system.world import BLADE, BLOCK_MIB, World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_a_compose_whose_answer_is_lost_makes_one_region(world: World) -> None:
    world.start_controller()
    world.wait_published()
    world.simulator.fault(method="POST", pathPart="/memory", drop=True, after=True)
    world.add_claim_and_pod(1024)
    world.wait_bound("engine")
    assert len(world.regions()) == 1
    assert world.allocated_mib() == 1024
    world.assert_never_sold_twice()
    world.remove_claim_and_pod()


def test_errors_of_the_fabric_manager_are_tried_again(world: World) -> None:
    world.start_controller()
    world.wait_published()
    world.simulator.fault(method="POST", pathPart="/memory", status=500, times=2)
    world.add_claim_and_pod(1024)
    wait_until(lambda: world.api.condition("kv") is not None, "a condition", timeout_s=60)
    world.wait_bound("engine")
    assert len(world.regions()) == 1
    world.simulator.fault(method="DELETE", pathPart="/memory/", status=500, times=3)
    world.remove_claim_and_pod()


def test_a_refused_compose_sends_the_pod_back_to_the_scheduler(world: World) -> None:
    world.start_controller("--quarantine", "2s")
    world.wait_published()
    # As many as there are QoS to try.
    world.simulator.fault(method="POST", pathPart="/memory", status=409, times=3)
    world.add_claim_and_pod(1024)
    world.wait_bound("engine")
    events = world.api.items(cluster.EVENT)
    assert any(event["reason"] == "ComposeFailed" for event in events)
    assert len(world.regions()) == 1
    world.remove_claim_and_pod()


def test_a_blade_that_refuses_is_left_for_another(two_blades: World) -> None:
    world = two_blades
    world.start_controller()
    wait_until(lambda: len(world.slices()) == 2, "a slice of each blade")
    # It has the room, but not in one piece, now and later.
    refused = f"/blades/{BLADE}/memory"
    world.simulator.fault(method="POST", pathPart=refused, status=409, times=1000)
    world.add_claim_and_pod(1024)
    world.wait_bound("engine")
    (record,) = world.ledger()
    assert record["blade"][1] != BLADE
    # Smaller ones are still offered.
    (policy,) = [
        slice_["spec"]["devices"][0]["capacity"][names.CAPACITY]["requestPolicy"]
        for slice_ in world.slices()
        if slice_["spec"]["pool"]["name"].endswith(f"/{BLADE}")
    ]
    assert policy["validRange"]["max"] == str(1024 - BLOCK_MIB)
    world.simulator.clear_faults()
    world.api.delete(cluster.POD, "engine")
    world.api.delete(cluster.RESOURCE_CLAIM, "kv")
    world.wait_gone("kv")


def test_a_slow_fabric_manager_delays_and_nothing_else(world: World) -> None:
    world.start_controller()
    world.wait_published()
    world.simulator.fault(method="POST", pathPart="/memory", delayS=3.0)
    world.add_claim_and_pod(1024)
    time.sleep(1.5)
    assert not world.api.is_attached("kv")
    world.wait_bound("engine")
    assert len(world.regions()) == 1
    world.remove_claim_and_pod()


def test_a_claim_deleted_while_it_is_composed_leaves_nothing(world: World) -> None:
    world.start_controller()
    world.wait_published()
    world.simulator.fault(method="POST", pathPart="/memory", delayS=2.0)
    world.add_claim_and_pod(1024)
    wait_until(world.ledger, "the intent in the ledger")
    world.remove_claim_and_pod()


# Looks are as frequent as they can be, so that what is left over goes soon.
IMPATIENT = ("--compose-timeout", "2s", "--fabric-period", "10s", "--orphan-grace", "1s")


def test_a_region_that_comes_after_its_time_is_not_left_beside_the_next(
    paper_world: World,
) -> None:
    world = paper_world
    controller = world.start_controller(*IMPATIENT)
    world.wait_published()
    # Carried out when nobody waits for it any more, and another has been made.
    world.simulator.fault(method="POST", pathPart="/memory", delayS=8.0)
    world.add_claim_and_pod(1024)
    world.wait_bound("engine")
    wait_until(lambda: len(world.regions()) == 2, "the late region too")
    wait_until(lambda: len(world.regions()) == 1, "the late region freed")
    assert controller.metric("orphans_total") == 1
    kept = world.wait_attached("kv")["data"]["memoryId"]
    assert world.regions() == [kept]
    world.assert_never_sold_twice()
    world.remove_claim_and_pod()


def test_a_region_that_comes_after_its_time_goes_with_its_claim(world: World) -> None:
    controller = world.start_controller(*IMPATIENT)
    world.wait_published()
    world.simulator.fault(method="POST", pathPart="/memory", delayS=3.5)
    world.add_claim_and_pod(1024)
    wait_until(world.ledger, "the intent in the ledger")
    world.api.delete(cluster.POD, "engine")
    world.api.delete(cluster.RESOURCE_CLAIM, "kv")
    # Told by the controller: the region itself may be there for less than a look takes.
    wait_until(
        lambda: "found region" in controller.log() or controller.metric("orphans_total"),
        "the late region",
    )
    world.wait_clean()


def test_a_controller_killed_while_it_waits_for_a_region_leaves_one(paper_world: World) -> None:
    world = paper_world
    options = ("--lease-duration", "6s", *IMPATIENT)
    first = world.start_controller(*options)
    world.wait_published()
    second = world.start_controller(*options, identity="controller-b")
    # Until after the next leader has made another.
    world.simulator.fault(method="POST", pathPart="/memory", delayS=15.0)
    world.add_claim_and_pod(1024)
    wait_until(world.ledger, "the intent in the ledger")
    first.kill()
    world.wait_bound("engine")
    wait_until(lambda: second.metric("orphans_total") == 1, "the other found")
    wait_until(lambda: len(world.regions()) == 1, "the other freed")
    assert world.regions() == [world.wait_attached("kv")["data"]["memoryId"]]
    world.remove_claim_and_pod()


def test_a_fabric_manager_that_hangs_is_waited_for(world: World) -> None:
    world.start_controller()
    world.wait_published()
    os.kill(world.simulator.process.pid, signal.SIGSTOP)
    try:
        world.add_claim_and_pod(1024)
        time.sleep(3.0)
        assert world.api.node_of("engine") is None
    finally:
        os.kill(world.simulator.process.pid, signal.SIGCONT)
    world.wait_bound("engine", timeout_s=120)
    assert len(world.regions()) == 1
    world.remove_claim_and_pod()


def test_a_fabric_manager_that_is_killed_is_gone_on_with_when_it_is_back(world: World) -> None:
    controller = world.start_controller("--fabric-period", "10s")
    world.wait_published()
    world.add_claim_and_pod(1024)
    node = world.wait_bound("engine")
    with world.fabric_down():
        # Connections are refused: for one claim to be freed, and for one to be made.
        world.api.delete(cluster.POD, "engine")
        world.api.delete(cluster.RESOURCE_CLAIM, "kv")
        world.add_claim_and_pod(512, "next", "next-engine")
        wait_until(lambda: "freeing" in world.states(), "the region being freed")
        wait_until(lambda: unavailable(world, "next"), "the claim that waits")
        wait_until(lambda: controller.metric("fabric_reachable") == 0.0, "it is seen")
        assert world.api.node_of("next-engine") is None
    assert controller.alive
    world.wait_gone("kv", timeout_s=120)
    assert world.wait_bound("next-engine", timeout_s=120) == node
    assert world.allocated_mib() == 512
    world.remove_claim_and_pod("next", "next-engine")


def unavailable(world: World, claim: str) -> bool:
    conditions = (world.api.device_status(claim) or {}).get("conditions") or ()
    return any(condition["reason"] == "FabricUnavailable" for condition in conditions)


def test_half_attached_is_attached_for_the_pods_that_have_it(world: World) -> None:
    world.start_controller()
    world.wait_published()
    with world.simulator.agent_cut_off(world.nodes[1]):
        world.api.add_claim("kv", 1024)
        world.api.add_pod("engine", "kv", node=world.nodes[0])
        assert world.wait_bound("engine") == world.nodes[0]
        status = world.wait_attached("kv")
        assert status["data"][names.DATA_MAPPED_HOSTS] == [world.nodes[0]]
        assert status["data"]["attached"] == {world.nodes[0]: True, world.nodes[1]: False}
    wait_until(
        lambda: world.mapped_hosts("kv") == list(world.nodes), "the other host too", timeout_s=60
    )
    world.remove_claim_and_pod()
