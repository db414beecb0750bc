"""From a claim to a pod's environment, and back, with the kubelet plugin of a node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from hymcache.bench.fake_kubelet import ContainerEdits, FakeKubelet, resolve_cdi
from hymcache.dra import names
from hymcache.dra.kubelet_plugin import plugin_pb2
from tests.dra.kubelet.plugin_process import DRIVER, PluginProcess
from tests.dra.system.world import World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

MIB = 1 << 20
PREPARE_TIMEOUT_S = 60.0


@contextmanager
def node_of(world: World) -> Iterator[tuple[FakeKubelet, PluginProcess]]:
    """The kubelet of the first node, with a plugin that serves."""
    # A socket's path has at most 107 bytes; those of pytest's folders are longer.
    with (
        TemporaryDirectory(prefix="kubelet-") as root,
        FakeKubelet(Path(root), retry_s=0.5) as kubelet,
    ):
        plugin = PluginProcess(kubelet, world.kubeconfig, cdi_root(world), node=world.nodes[0])
        try:
            plugin.start()
            kubelet.wait_registered(DRIVER, timeout_s=60)
            yield kubelet, plugin
        finally:
            plugin.kill()


def cdi_root(world: World) -> Path:
    return world.folder / "fabric" / "hosts" / world.nodes[0] / "cdi"


def claim_of(world: World, name: str) -> plugin_pb2.Claim:
    uid = world.api.claim(name)["metadata"]["uid"]
    return plugin_pb2.Claim(namespace=world.api.namespace, name=name, uid=uid)


def prepare(world: World, kubelet: FakeKubelet, claim: plugin_pb2.Claim) -> ContainerEdits:
    """What the container runtime adds to a container of the claim's pod."""
    devices = kubelet.prepare_in_the_end(DRIVER, [claim], PREPARE_TIMEOUT_S)[claim.uid]
    return resolve_cdi(cdi_root(world), [n for d in devices for n in d.cdi_device_ids])


def test_a_pod_finds_its_memory_in_its_environment(world: World) -> None:
    world.start_controller()
    world.wait_published()
    with node_of(world) as (kubelet, plugin):
        world.api.add_claim("kv", 512)
        world.api.add_pod("engine", "kv", node=world.nodes[0])
        world.wait_bound("engine")
        claim = claim_of(world, "kv")
        edits = prepare(world, kubelet, claim)
        assert edits.env[names.ENV_SIZE] == str(512 * MIB)
        assert edits.env[names.ENV_DEVICE]
        allocation_id = world.wait_attached("kv")["data"]["allocationId"]
        assert world.simulator.device(world.nodes[0], allocation_id).stat().st_size == 512 * MIB
        # An update of the DaemonSet, or a crash, between the pod's start and its end.
        plugin.kill()
        plugin.start()
        kubelet.wait_registered(DRIVER, timeout_s=60)
        kubelet.unprepare(DRIVER, [claim])
    world.remove_claim_and_pod()


def test_without_binding_conditions_prepare_waits_for_the_region(old_world: World) -> None:
    world = old_world
    world.start_controller()
    with node_of(world) as (kubelet, _plugin):
        world.simulator.fault(method="POST", pathPart="/memory", delayS=3.0)
        annotations = {
            names.ANNOTATION_CAPACITY_MIB: "512",
            names.ANNOTATION_SHARE_COUNT: "2",
            names.ANNOTATION_QOS: "1",
        }
        world.api.add_claim("kv", annotations=annotations)
        world.api.add_pod("engine", "kv", node=world.nodes[0])
        world.wait_bound("engine")
        claim = claim_of(world, "kv")
        edits = prepare(world, kubelet, claim)
        assert edits.env[names.ENV_SIZE] == str(512 * MIB)
        kubelet.unprepare(DRIVER, [claim])
    world.remove_claim_and_pod()
