"""What users see of one controller: shares that move with pods, and data that is found again."""

from __future__ import annotations

import asyncio
import json

from hymcache.dra import names
from tests.dra.controller.driver import Driver, until
from tests.dra.controller.parts import asynchronous


@asynchronous
async def test_a_share_moves_with_its_pod() -> None:
    driver = Driver(["node-1", "node-2", "node-3"])
    async with driver.running():
        driver.add_claim("kv", parameters={"shareCount": 2})
        for number in (1, 2):
            driver.add_pod(f"engine-{number}", "kv", f"node-{number}")
        await until(lambda: driver.mapped_hosts("kv") == ["node-1", "node-2"], "two hosts")
        allocation_id = driver.device_of("kv")["data"]["allocationId"]
        driver.delete("Pod", "engine-2")
        driver.add_pod("engine-3", "kv", "node-3")
        await until(lambda: driver.mapped_hosts("kv") == ["node-1", "node-3"], "the other two")
        assert driver.is_bound("engine-3")
        assert driver.device_of("kv")["data"]["allocationId"] == allocation_id
        assert {host for host, _ in driver.fabric.devices} == {"node-1", "node-3"}


@asynchronous
async def test_a_share_waits_for_who_holds_it() -> None:
    driver = Driver(["node-1", "node-2"])
    async with driver.running():
        driver.add_claim("kv", parameters={"shareCount": 1})
        driver.add_pod("engine-1", "kv", "node-1")
        await until(lambda: driver.is_bound("engine-1"), "bound")
        # Its pod is there for a moment longer than the one that comes.
        (allocation,) = (allocation for _, allocation in driver.fabric.devices)
        driver.fabric.held.add(allocation)
        driver.add_pod("engine-2", "kv", "node-2")
        await until(lambda: driver.is_bound("engine-2"), "bound too")
        driver.delete("Pod", "engine-1")
        await until(lambda: driver.mapped_hosts("kv") != [], "a host")
        driver.fabric.held.clear()
        await until(lambda: driver.mapped_hosts("kv") == ["node-2"], "the share moved")


@asynchronous
async def test_regions_are_found_by_status_where_ledger_and_annotation_are_lost() -> None:
    driver = Driver(["node-1", "node-2"])
    driver.add_claim("kv")
    driver.add_pod("engine", "kv", "node-1")
    async with driver.running():
        await until(lambda: driver.is_bound("engine"), "bound")
        await until(lambda: len(driver.mapped_hosts("kv")) == 2, "both hosts")
    before = driver.device_of("kv")["data"]
    for item in list(driver.store.items("ConfigMap")):
        driver.store.delete("ConfigMap", ("driver", item["metadata"]["name"]))
    patch = {"metadata": {"annotations": {names.ANNOTATION_TEARDOWN: None}}}
    driver.store.merge("ResourceClaim", ("default", "kv"), patch)
    async with driver.running():
        await until(lambda: bool(list(driver.store.items("ConfigMap"))), "the record restored")
        await until(lambda: len(driver.mapped_hosts("kv")) == 2, "both hosts still")
        assert driver.fabric.composed == 1
        assert driver.device_of("kv")["data"]["allocationId"] == before["allocationId"]
        driver.delete("Pod", "engine")
        driver.delete("ResourceClaim", "kv")
        await until(lambda: not driver.fabric.regions, "freed")
        await until(lambda: not list(driver.store.items("ConfigMap")), "and forgotten")


@asynchronous
async def test_a_bad_claim_does_not_go_round_and_round() -> None:
    driver = Driver(["node-1", "node-2"])
    async with driver.running():
        driver.add_claim("kv", parameters={"anyHostWillDo": "false"})
        driver.add_pod("engine", "kv", "node-1")
        await until(lambda: bool(driver.device_of("kv").get("conditions")), "a condition")
        conditions = {c["type"]: c for c in driver.device_of("kv")["conditions"]}
        assert conditions[names.CONDITION_ATTACHED]["reason"] == "BadRequest"
        assert "unquoted" in conditions[names.CONDITION_ATTACHED]["message"]
        assert conditions[names.CONDITION_ATTACH_FAILED]["status"] == "False"
        assert not driver.fabric.composed


@asynchronous
async def test_who_holds_memory_for_too_long_is_ended_where_that_is_asked_for() -> None:
    driver = Driver(["node-1"], fence_after_s=1.0, stuck_after_s=0.2)
    async with driver.running():
        driver.add_claim("kv")
        driver.add_pod("engine", "kv", "node-1")
        await until(lambda: driver.is_bound("engine"), "bound")
        ((_, allocation),) = driver.fabric.devices
        driver.fabric.held.add(allocation)
        driver.delete("Pod", "engine")
        driver.delete("ResourceClaim", "kv")
        await until(lambda: not driver.fabric.held, "who held it ended")
        await until(lambda: not driver.fabric.regions, "freed")


@asynchronous
async def test_a_blade_whose_memory_is_held_for_long_is_tainted() -> None:
    driver = Driver(["node-1"], stuck_after_s=0.2)
    async with driver.running():
        driver.add_claim("kv")
        driver.add_pod("engine", "kv", "node-1")
        await until(lambda: driver.is_bound("engine"), "bound")
        ((_, allocation),) = driver.fabric.devices
        driver.fabric.held.add(allocation)
        driver.delete("Pod", "engine")
        await until(lambda: driver.taints() == ["stuck"], "tainted")
        driver.fabric.held.clear()
        await until(lambda: not driver.taints(), "taken off")
        driver.delete("ResourceClaim", "kv")


@asynchronous
async def test_a_share_stays_where_the_pods_node_has_no_cable() -> None:
    driver = Driver(["node-1", "node-2"])
    async with driver.running():
        driver.add_claim("kv")
        driver.add_pod("engine-1", "kv", "node-1")
        await until(lambda: len(driver.mapped_hosts("kv")) == 2, "both hosts")
        detached = driver.fabric.detached
        # Bound there by hand.
        claim = driver.store.get("ResourceClaim", ("default", "kv"))
        labels = {"kubernetes.io/hostname": "node-9"}
        driver.create("Node", {"metadata": {"name": "node-9", "labels": labels}, "spec": {}})
        driver.add_pod("engine-9", "kv", "node-9")
        pod = driver.store.merge("Pod", ("default", "engine-9"), {"spec": {"nodeName": "node-9"}})
        user = {"resource": "pods", "name": "engine-9", "uid": pod["metadata"]["uid"]}
        reserved = [*claim["status"]["reservedFor"], user]
        status = {"status": {"reservedFor": reserved}}
        driver.store.merge("ResourceClaim", ("default", "kv"), status, "status")
        await asyncio.sleep(0.5)
        assert driver.mapped_hosts("kv") == ["node-1", "node-2"]
        assert driver.fabric.detached == detached


@asynchronous
async def test_a_blade_that_lost_one_of_two_regions_takes_no_claims_until_that_is_cleaned_up() -> (
    None
):
    driver = Driver(["node-1"])
    async with driver.running():
        for number in (1, 2):
            driver.add_claim(f"kv-{number}")
            driver.add_pod(f"engine-{number}", f"kv-{number}", "node-1")
        await until(lambda: driver.is_bound("engine-1") and driver.is_bound("engine-2"), "bound")
        assert not driver.taints()
    for item in list(driver.store.items("ConfigMap")):
        record = json.loads(item["data"]["record"])
        record["lost"] = record["claim_name"] == "kv-1"
        patch = {"data": {"record": json.dumps(record)}}
        driver.store.merge("ConfigMap", ("driver", item["metadata"]["name"]), patch)
    async with driver.running():
        await until(lambda: driver.taints() == ["lost-regions"], "no new claims")
        # The other region's pod stays.
        assert driver.is_bound("engine-2")
        driver.delete("Pod", "engine-1")
        await until(lambda: not driver.taints(), "cleaned up")


@asynchronous
async def test_a_claim_on_a_blade_that_is_gone_is_sent_to_one_that_is_there() -> None:
    driver = Driver(["node-1"])
    async with driver.running():
        await until(lambda: len(driver.pools()) == 1, "a slice")
    driver.offer_more("gone")
    driver.add_claim("kv")
    driver.add_pod("engine", "kv", "node-1")
    async with driver.scheduling():
        await until(lambda: driver.pool_of("kv") == "gone", "allocated by what is left of it")
    async with driver.running():
        await until(lambda: driver.is_bound("engine"), "bound")
        assert driver.pool_of("kv") == "appliance-0/blade-0"
        assert driver.pools() == ["appliance-0/blade-0"]


@asynchronous
async def test_blades_are_not_taken_for_gone_while_the_fabric_manager_is_away() -> None:
    driver = Driver(["node-1"])
    async with driver.running():
        await until(lambda: len(driver.pools()) == 1, "a slice")
    (before,) = driver.store.items("ResourceSlice")
    driver.fabric.trouble_rate = 2.0  # nothing gets through
    driver.add_claim("kv")
    driver.add_pod("engine", "kv", "node-1")
    async with driver.running():
        await until(lambda: bool(driver.device_of("kv").get("conditions")), "a condition")
        conditions = {c["type"]: c for c in driver.device_of("kv")["conditions"]}
        assert conditions[names.CONDITION_ATTACHED]["reason"] == "FabricUnavailable"
        assert conditions[names.CONDITION_ATTACH_FAILED]["status"] == "False"
        driver.fabric.trouble_rate = 0.0
        await until(lambda: driver.is_bound("engine"), "bound")
    (after,) = driver.store.items("ResourceSlice")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
