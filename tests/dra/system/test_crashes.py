"""The controller is killed at every step: nothing leaks, nothing is sold twice."""

from __future__ import annotations

import pytest

from hymcache.dra import cluster
from hymcache.dra.controller import Step
from tests.dra.system.world import World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

MAKING = (
    Step.CLAIMED,
    Step.INTENDED,
    Step.COMPOSED,
    Step.RECORDED,
    Step.NOTED,
    Step.ATTACHED,
    Step.PUBLISHED,
    Step.SETTLED,
)
FREEING = (
    Step.FREEING,
    Step.DETACHED,
    Step.FREED,
    Step.FREED_RECORDED,
    Step.RELEASED,
    Step.FORGOTTEN,
)


def crashes(world: World, step: Step) -> bool:
    # In the paper's dialect hosts are attached within composing.
    return not (step is Step.ATTACHED and world.dialect == "paper")


@pytest.mark.parametrize("step", MAKING)
def test_killed_while_making_it_goes_on(world: World, step: Step) -> None:
    if not crashes(world, step):
        step = Step.PUBLISHED
    doomed = world.start_controller(crash_at=step.value)
    world.wait_published()
    world.add_claim_and_pod(1024)
    doomed.wait_for_crash()
    world.start_controller()
    status = world.wait_attached("kv")
    node = world.wait_bound("engine")
    assert node in status["data"]["mappedHosts"]
    assert len(world.regions()) == 1
    assert world.allocated_mib() == 1024
    world.assert_never_sold_twice()
    world.remove_claim_and_pod()


@pytest.mark.parametrize("step", MAKING)
def test_killed_while_making_and_deleted_meanwhile_nothing_is_left(
    world: World, step: Step
) -> None:
    if not crashes(world, step):
        step = Step.PUBLISHED
    doomed = world.start_controller(crash_at=step.value)
    world.wait_published()
    world.add_claim_and_pod(1024)
    doomed.wait_for_crash()
    world.api.delete(cluster.POD, "engine")
    world.api.delete(cluster.RESOURCE_CLAIM, "kv")
    # Soon after that it is known that no attempt to compose is still under way.
    world.start_controller("--compose-timeout", "4s")
    world.wait_gone("kv")
    world.wait_clean()


@pytest.mark.parametrize("step", FREEING)
def test_killed_while_freeing_nothing_is_left(world: World, step: Step) -> None:
    doomed = world.start_controller(crash_at=step.value)
    world.wait_published()
    world.add_claim_and_pod(1024)
    world.wait_bound("engine")
    world.api.delete(cluster.POD, "engine")
    world.api.delete(cluster.RESOURCE_CLAIM, "kv")
    doomed.wait_for_crash()
    world.start_controller()
    world.wait_gone("kv")
    world.wait_clean()
