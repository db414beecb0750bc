"""An API server that goes away or forgets, writes that it refuses, and several controllers."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest

from hymcache.dra import cluster, names
from hymcache.dra.cluster import ClusterUnavailable
from tests.dra.kubernetes.cluster_api import wait_until
from tests.dra.system.controller_process import ControllerProcess
from tests.dra.system.world import BLADE_MIB, World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

AWAY_S = 60.0
RACERS = 50
RACER_MIB = 256


def test_dropped_watches_are_taken_up_again(paper_world: World) -> None:
    world, control_plane = paper_world, paper_world.cluster
    controller = world.start_controller()
    world.wait_published()
    assert control_plane.drop_watches() >= 3
    world.add_claim_and_pod(1024)
    world.wait_bound("engine")
    wait_until(lambda: controller.metric("watches_total") >= 6, "all three watched again")
    control_plane.drop_watches()
    world.remove_claim_and_pod()
    assert controller.metric("lists_total") == 3


@pytest.mark.parametrize("in_stream", [False, True], ids=["by-status", "by-event"])
def test_a_history_that_is_gone_is_listed_anew(paper_world: World, in_stream: bool) -> None:
    world, control_plane = paper_world, paper_world.cluster
    controller = world.start_controller()
    world.wait_published()
    control_plane.expire(in_stream=in_stream)
    world.add_claim_and_pod(1024)
    world.wait_bound("engine")
    control_plane.expire(in_stream=in_stream)
    world.remove_claim_and_pod()
    assert controller.metric("lists_total") > 3


def test_an_api_server_away_for_a_minute_loses_nothing(paper_world: World) -> None:
    world, control_plane = paper_world, paper_world.cluster
    controller = world.start_controller()
    world.wait_published()
    world.simulator.fault(method="POST", pathPart="/memory", delayS=1.0)
    world.add_claim_and_pod(1024)
    wait_until(world.ledger, "the intent in the ledger")
    # It goes while the region is composed, and comes back when the lease has long ended.
    control_plane.go_away(AWAY_S)
    started = time.monotonic()
    wait_until(lambda: len(world.regions()) == 1, "the region composed")
    time.sleep(max(0.0, AWAY_S - (time.monotonic() - started)))

    def is_back() -> bool:
        with contextlib.suppress(ClusterUnavailable):
            world.api.node_of("engine")
            return True
        return False

    wait_until(is_back, "the API server back")
    world.wait_bound("engine", timeout_s=90)
    assert controller.alive
    assert len(world.regions()) == 1
    world.assert_never_sold_twice()
    world.remove_claim_and_pod()


@pytest.mark.parametrize("status", [409, 500])
def test_refused_writes_are_made_again(paper_world: World, status: int) -> None:
    world, control_plane = paper_world, paper_world.cluster
    world.start_controller()
    world.wait_published()
    refused = [["configmaps", status], ["/status", status], ["resourceclaims/kv", status]]
    world.api.add_claim("kv", 1024)
    control_plane.fault(refusals=refused)
    world.api.add_pod("engine", "kv")
    world.wait_bound("engine")
    assert len(world.regions()) == 1
    # Not those of the claim itself: the test's own writes would meet them.
    control_plane.fault(refusals=[["configmaps", status], ["configmaps", status]])
    world.remove_claim_and_pod()


def test_another_controller_takes_over_from_one_that_is_killed(world: World) -> None:
    first = world.start_controller("--lease-duration", "6s", identity="controller-a")
    world.wait_published()
    second = world.start_controller("--lease-duration", "6s", identity="controller-b")
    world.add_claim_and_pod(1024)
    world.wait_bound("engine")
    assert (first.metric("leading"), second.metric("leading")) == (1.0, 0.0)
    first.kill()
    wait_until(lambda: second.metric("leading") == 1.0, "the second leads")
    world.remove_claim_and_pod()


def test_a_controller_that_was_paused_does_not_act_beside_its_successor(
    paper_world: World,
) -> None:
    world = paper_world
    first = world.start_controller("--lease-duration", "6s", identity="controller-a")
    world.wait_published()
    second = world.start_controller("--lease-duration", "6s", identity="controller-b")
    world.simulator.fault(method="POST", pathPart="/memory", delayS=2.0)
    world.add_claim_and_pod(1024)
    wait_until(world.ledger, "the intent in the ledger")
    # Paused within its request to compose: the answer waits for it.
    os.kill(first.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: second.metric("leading") == 1.0, "the second leads")
        world.wait_bound("engine")
    finally:
        os.kill(first.pid, signal.SIGCONT)
    wait_until(lambda: is_standing_by(first), "the first stands by")
    time.sleep(2)
    assert len(world.regions()) == 1
    world.assert_never_sold_twice()
    assert world.states() == ["published"]
    world.remove_claim_and_pod()


def is_standing_by(controller: ControllerProcess) -> bool:
    return controller.alive and controller.metric("leading") == 0.0


def test_fifty_claims_race_for_the_room_of_sixteen(world: World) -> None:
    world.start_controller()
    world.wait_published()
    room = BLADE_MIB // RACER_MIB
    for number in range(RACERS):
        world.add_claim_and_pod(RACER_MIB, f"kv-{number}", f"engine-{number}")
    bound: set[str] = set()
    served: set[str] = set()
    while len(served) < RACERS:
        bound = set(wait_until(lambda: bound_pods(world), "pods bound", timeout_s=90))
        assert len(bound) <= room
        assert world.allocated_mib() <= BLADE_MIB
        world.assert_never_sold_twice()
        served |= bound
        for pod in bound:
            world.api.delete(cluster.POD, pod)
            world.api.delete(cluster.RESOURCE_CLAIM, pod.replace("engine", "kv"))
    world.wait_clean()


def bound_pods(world: World) -> list[str]:
    return [
        pod["metadata"]["name"]
        for pod in world.api.items(cluster.POD, world.api.namespace)
        if pod["spec"].get("nodeName") and "deletionTimestamp" not in pod["metadata"]
    ]


def test_sizes_are_rounded_as_the_scheduler_counts_them(paper_world: World) -> None:
    world = paper_world
    world.start_controller()
    world.wait_published()
    world.add_claim_and_pod(200)
    world.wait_bound("engine")
    results = world.api.claim("kv")["status"]["allocation"]["devices"]["results"]
    assert results[0]["consumedCapacity"] == {names.CAPACITY: "256"}
    assert world.allocated_mib() == 256
    world.remove_claim_and_pod()
