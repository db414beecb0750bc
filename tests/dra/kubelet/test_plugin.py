"""The plugin as a process: registration, updates, crashes, health, liveness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hymcache.bench.fake_kubelet import FakeKubelet
from hymcache.dra.kubelet_plugin.checkpoint import Checkpoint
from hymcache.dra.state_file import StateFile
from tests.dra.kubelet.node import DEVICE, POOL, Node
from tests.dra.kubelet.plugin_process import DRIVER, PluginProcess
from tests.dra.kubernetes.cluster_api import wait_until

pytestmark = pytest.mark.slow

_OLD_UID = "11111111-3d6c-4a55-9a43-1f6f8a0c9d10"
_NEW_UID = "22222222-3d6c-4a55-9a43-1f6f8a0c9d10"


def _prepared(kubelet: FakeKubelet) -> set[str]:
    path = kubelet.plugins_folder / DRIVER / "checkpoint.json"
    return set(StateFile(path, Checkpoint).load().claims)


def _health(plugin: PluginProcess, service: str = "") -> int:
    with grpc.insecure_channel(plugin.endpoints["liveness"]) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its types lack the methods
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
        return int(answer.status)


def test_it_registers_and_goes_without_a_trace(node: Node, plugin: PluginProcess) -> None:
    registered = node.kubelet.wait_registered(DRIVER)
    assert registered.supported_versions == ("v1.DRAPlugin", "v1alpha1.DRAResourceHealth")
    assert registered.socket == node.kubelet.registry / f"{DRIVER}-reg.sock"
    assert registered.endpoint == str(node.kubelet.plugins_folder / DRIVER / "dra.sock")
    assert plugin.stop() == 0
    node.kubelet.wait_gone(DRIVER)
    assert list(node.kubelet.registry.iterdir()) == []
    assert not Path(registered.endpoint).exists()
    assert "the kubelet has registered the plugin" in plugin.log()


def test_a_plugin_that_was_killed_unprepares_what_it_prepared(
    node: Node, plugin: PluginProcess
) -> None:
    claim, _ = node.add_attached("kv")
    before = node.kubelet.prepare(DRIVER, [claim])
    plugin.kill()
    plugin.start()
    # The kubelet finds it anew by its socket.
    assert node.kubelet.prepare_in_the_end(DRIVER, [claim], timeout_s=15) == before
    node.kubelet.unprepare(DRIVER, [claim])
    assert _prepared(node.kubelet) == set()


def test_during_an_update_two_plugins_share_what_is_prepared(node: Node) -> None:
    old, new = node.add_plugin(_OLD_UID), node.add_plugin(_NEW_UID)
    old.start()
    node.kubelet.wait_registered(DRIVER)
    first, _ = node.add_attached("first")
    node.kubelet.prepare(DRIVER, [first])
    new.start()
    both = node.kubelet.wait_registered(DRIVER, 2)
    assert _NEW_UID in both.endpoint
    second, _ = node.add_attached("second")
    node.kubelet.prepare(DRIVER, [second])
    assert old.stop() == 0
    assert node.kubelet.wait_registered(DRIVER, 1).endpoint == both.endpoint
    assert _prepared(node.kubelet) == {first.uid, second.uid}
    node.kubelet.unprepare(DRIVER, [first, second])
    assert _prepared(node.kubelet) == set()
    assert [path.name for path in (node.kubelet.plugins_folder / DRIVER).glob("*.sock")] == [
        f"dra-{_NEW_UID}.sock"
    ]


def test_the_sockets_of_a_killed_pod_are_removed_by_the_next(node: Node) -> None:
    old, new = node.add_plugin(_OLD_UID), node.add_plugin(_NEW_UID)
    old.start()
    node.kubelet.wait_registered(DRIVER)
    old.kill()
    new.start()
    wait_until(
        lambda: (
            [p.socket.name for p in node.kubelet.plugins(DRIVER)]
            == [Path(new.endpoints["registration"]).name]
        ),
        "the new plugin registered, and no other",
    )
    assert len(list(node.kubelet.registry.iterdir())) == 1


def test_the_health_of_devices_in_use_is_told(node: Node, plugin: PluginProcess) -> None:
    node.kubelet.wait_health(DRIVER, {})
    claim, allocation_id = node.add_attached("kv")
    node.kubelet.prepare(DRIVER, [claim])
    state = node.kubelet.wait_health(DRIVER, {(POOL, DEVICE): "Healthy"})[POOL, DEVICE]
    # The stream is not silent for as long as that: the kubelet would take it for unknown.
    assert state.timeout_s == 60
    node.unmaterialize(allocation_id)
    # Noticed at the next look, or when something is prepared.
    other, _ = node.add_attached("other")
    node.kubelet.prepare(DRIVER, [other])
    state = node.kubelet.wait_health(DRIVER, {(POOL, DEVICE): "Unhealthy"})[POOL, DEVICE]
    assert state.message.startswith(f"claim default/kv ({claim.uid}): no ")
    node.kubelet.unprepare(DRIVER, [claim])
    node.kubelet.wait_health(DRIVER, {(POOL, DEVICE): "Healthy"})
    node.kubelet.unprepare(DRIVER, [other])
    node.kubelet.wait_health(DRIVER, {})


def test_liveness_is_that_of_the_sockets(node: Node, plugin: PluginProcess) -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    assert _health(plugin) == serving
    assert _health(plugin, "liveness") == serving
    with pytest.raises(grpc.RpcError) as caught:
        _health(plugin, "other")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    Path(plugin.endpoints["registration"]).unlink()
    assert _health(plugin) == health_pb2.HealthCheckResponse.NOT_SERVING


def test_its_metrics_tell_what_it_did(node: Node, plugin: PluginProcess) -> None:
    claim, _ = node.add_attached("kv")
    node.kubelet.prepare(DRIVER, [claim])
    text = httpx.get(f"http://{plugin.endpoints['metrics']}/metrics", timeout=10).text
    assert 'hymcache_dra_plugin_prepares_total{result="done"} 1.0' in text
    assert "hymcache_dra_plugin_registered 1.0" in text
    assert "hymcache_dra_plugin_prepared_claims 1.0" in text
    assert "hymcache_dra_plugin_health_streams 1.0" in text
    assert httpx.get(f"http://{plugin.endpoints['metrics']}/healthz", timeout=10).text == "ok\n"


def test_a_checkpoint_of_another_version_is_not_lost(node: Node) -> None:
    folder = node.kubelet.plugins_folder / DRIVER
    folder.mkdir()
    (folder / "checkpoint.json").write_text('{"version": 2, "claims": {}}')
    with pytest.raises(AssertionError, match="has the layout version 2, this program writes 1"):
        node.add_plugin().start()
    assert (folder / "checkpoint.json").read_text() == '{"version": 2, "claims": {}}'
