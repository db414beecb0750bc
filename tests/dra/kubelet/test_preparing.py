"""Preparing claims, as the kubelet asks for it and the API server tells of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hymcache.bench.fake_kubelet import PrepareFailed, resolve_cdi
from hymcache.dra import cluster
from hymcache.dra.kubelet_plugin import plugin_pb2
from tests.dra.kubelet.node import DEVICE, POOL, Node
from tests.dra.kubelet.plugin_process import DRIVER, NODE

pytestmark = pytest.mark.slow

# The plugin answers 5 s before the kubelet gives up: here it waits for 1 s.
_SHORT_S = 6.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """One node with its plugin for all tests that break neither."""
    with Node(tmp_path_factory.mktemp("node")) as made:
        made.add_plugin().start()
        made.kubelet.wait_registered(DRIVER)
        yield made


def test_a_container_finds_the_region_of_its_claim(shared: Node) -> None:
    claim, allocation_id = shared.add_attached("kv")
    (device,) = shared.kubelet.prepare(DRIVER, [claim])[claim.uid]
    assert device == plugin_pb2.Device(
        request_names=["memory"],
        pool_name=POOL,
        device_name=DEVICE,
        cdi_device_ids=[f"cxl.seagate.com/dax={allocation_id}"],
        share_id=shared.share_id(claim.uid),
    )
    edits = resolve_cdi(shared.cdi_root, device.cdi_device_ids)
    path = edits.env["CXL_DAX_DEVICE"]
    assert edits.env["CXL_DAX_SIZE"] == str(2 << 20)
    assert edits.mounts[path].stat().st_size == 2 << 20


def test_preparing_again_tells_the_same(shared: Node) -> None:
    claim, _ = shared.add_attached("again")
    first = shared.kubelet.prepare(DRIVER, [claim])
    assert shared.kubelet.prepare(DRIVER, [claim]) == first
    shared.kubelet.unprepare(DRIVER, [claim])
    shared.kubelet.unprepare(DRIVER, [claim])
    assert shared.kubelet.prepare(DRIVER, [claim]) == first


def test_a_claim_that_is_not_attached_is_waited_for_and_then_told(shared: Node) -> None:
    claim = shared.add_claim("late")
    start_s = time.monotonic()
    with pytest.raises(PrepareFailed) as caught:
        shared.kubelet.prepare(DRIVER, [claim], timeout_s=_SHORT_S)
    assert 0.9 < time.monotonic() - start_s < _SHORT_S
    assert caught.value.reasons == {
        claim.uid: f"the region is not attached to node {NODE} yet: the controller has not "
        "composed it"
    }


def test_an_attachment_during_the_wait_is_noticed_at_once(shared: Node) -> None:
    claim, allocation_id = shared.add_claim("waiting"), shared.materialize()
    attached_s = 0.0

    def attach() -> None:
        nonlocal attached_s
        shared.attach(claim, allocation_id)
        attached_s = time.monotonic()

    timer = threading.Timer(1.0, attach)
    timer.start()
    (device,) = shared.kubelet.prepare(DRIVER, [claim])[claim.uid]
    assert time.monotonic() - attached_s < 2
    assert device.cdi_device_ids == [f"cxl.seagate.com/dax={allocation_id}"]
    timer.join()


def test_watches_that_break_while_it_waits_are_made_anew(shared: Node) -> None:
    claim, allocation_id = shared.add_claim("broken"), shared.materialize()

    def disturb() -> None:
        shared.cluster.drop_watches()
        time.sleep(1)
        shared.cluster.expire()
        shared.attach(claim, allocation_id)

    timer = threading.Timer(0.5, disturb)
    timer.start()
    assert shared.kubelet.prepare(DRIVER, [claim])[claim.uid]
    timer.join()


def test_a_failed_attachment_is_told_at_once(shared: Node) -> None:
    claim = shared.add_claim("failed")
    shared.attach(claim, "none", (), failure="no port of blade-0 is free")
    start_s = time.monotonic()
    with pytest.raises(PrepareFailed, match="no port of blade-0 is free"):
        shared.kubelet.prepare(DRIVER, [claim])
    assert time.monotonic() - start_s < 5


def test_a_region_on_other_nodes_only_is_not_this_nodes(shared: Node) -> None:
    claim, allocation_id = shared.add_claim("elsewhere"), shared.materialize()
    shared.attach(claim, allocation_id, ("node-2",))
    with pytest.raises(PrepareFailed, match=f"is not attached to node {NODE} yet"):
        shared.kubelet.prepare(DRIVER, [claim], timeout_s=_SHORT_S)


def test_a_claim_may_do_without_the_device_on_this_node(shared: Node) -> None:
    claim, allocation_id = shared.add_claim("any", anyHostWillDo=True), shared.materialize()
    shared.attach(claim, allocation_id, ("node-2",))
    (device,) = shared.kubelet.prepare(DRIVER, [claim])[claim.uid]
    assert device.cdi_device_ids == []
    assert device.request_names == ["memory"]


def test_without_the_hosts_cdi_spec_no_pod_starts(shared: Node) -> None:
    claim, allocation_id = shared.add_attached("unmade")
    shared.unmaterialize(allocation_id)
    with pytest.raises(PrepareFailed, match=r"no .*\.json: the host agent has not made"):
        shared.kubelet.prepare(DRIVER, [claim], timeout_s=_SHORT_S)


def test_a_claim_that_was_replaced_is_not_prepared(shared: Node) -> None:
    claim, _ = shared.add_attached("replaced")
    old = plugin_pb2.Claim(namespace=claim.namespace, name=claim.name, uid="of-before")
    with pytest.raises(PrepareFailed, match="that of the pod, of-before, is gone"):
        shared.kubelet.prepare(DRIVER, [old])
    gone = plugin_pb2.Claim(namespace=claim.namespace, name="nowhere", uid="x")
    with pytest.raises(PrepareFailed, match="claim default/nowhere is gone"):
        shared.kubelet.prepare(DRIVER, [gone])


def test_a_claim_that_is_deleted_meanwhile_ends_the_wait(shared: Node) -> None:
    claim = shared.add_claim("deleted")
    timer = threading.Timer(0.5, shared.api.delete, (cluster.RESOURCE_CLAIM, "deleted"))
    timer.start()
    start_s = time.monotonic()
    with pytest.raises(PrepareFailed, match="was deleted while it was prepared"):
        shared.kubelet.prepare(DRIVER, [claim])
    assert time.monotonic() - start_s < 15
    timer.join()


def test_one_claim_does_not_fail_another(shared: Node) -> None:
    good, _ = shared.add_attached("good")
    bad = plugin_pb2.Claim(namespace=good.namespace, name="bad", uid="bad-uid")
    with pytest.raises(PrepareFailed) as caught:
        shared.kubelet.prepare(DRIVER, [good, bad])
    assert set(caught.value.reasons) == {"bad-uid"}


def test_the_kubelet_tries_until_it_works(shared: Node) -> None:
    claim, allocation_id = shared.add_claim("tries"), shared.materialize()
    shared.attach(claim, allocation_id, (), failure="not now")
    timer = threading.Timer(1.5, shared.attach, (claim, allocation_id))
    timer.start()
    assert shared.kubelet.prepare_in_the_end(DRIVER, [claim], timeout_s=20)[claim.uid]
    timer.join()


def test_what_was_prepared_needs_no_api_server(node: Node) -> None:
    plugin = node.add_plugin()
    plugin.start()
    node.kubelet.wait_registered(DRIVER)
    claim, allocation_id = node.add_attached("kv")
    first = node.kubelet.prepare(DRIVER, [claim])
    other = node.add_claim("other")
    node.cluster.go_away(600)
    assert node.kubelet.prepare(DRIVER, [claim]) == first
    with pytest.raises(PrepareFailed, match="the API server does not answer"):
        node.kubelet.prepare(DRIVER, [other], timeout_s=_SHORT_S)
    # Not without the device, though: what the checkpoint says is checked.
    (node.cdi_root / f"{allocation_id}.json").unlink()
    with pytest.raises(PrepareFailed):
        node.kubelet.prepare(DRIVER, [claim], timeout_s=_SHORT_S)


def test_a_spec_of_another_kind_is_refused(shared: Node, tmp_path: Path) -> None:
    claim, allocation_id = shared.add_attached("foreign")
    path = shared.cdi_root / f"{allocation_id}.json"
    path.write_text(path.read_text().replace("cxl.seagate.com/dax", "example.com/gpu"))
    with pytest.raises(PrepareFailed, match=r"describes example\.com/gpu="):
        shared.kubelet.prepare(DRIVER, [claim], timeout_s=_SHORT_S)
    path.unlink()
